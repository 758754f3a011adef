"""Pipeline schedules: the modules of each stage, and the actions of each rank in a step, in order."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.small_files import BadFile, read_text
from torchtitan_graph.torch_private.pipelines import Pairs, PipelineAction, pipeline_order, with_messages

# Schedules, and the number of stages of a rank: exactly one, exactly two (V: the first and the last stage are on one
# rank), or any number from two on.
ONE, V, LOOPED = "one", "two", "several"
SCHEDULES = {"GPipe": ONE, "1F1B": ONE, "Interleaved1F1B": LOOPED, "ZBVZeroBubble": V, "DualPipeV": V}

MOST_MICROBATCHES = 4096  # of a step: torch's time to order their messages is quadratic
COMPUTING = ("F", "B", "I", "W")  # the actions other than sends and receives
_ALIKE = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # relative times, where all stages are alike

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_SIDE_BY_SIDE = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A step of a pipeline.

    stages   the modules of each stage, by name
    actions  of each rank along pp, in order
    rank_of  each stage's rank along pp
    pairs    forwards that run alongside the backward right behind them, as one
    """

    stages: tuple[tuple[str, ...], ...]
    actions: tuple[tuple[PipelineAction, ...], ...]
    rank_of: tuple[int, ...]
    pairs: Pairs = dataclasses.field(default_factory=dict)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def pairs_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the stages of a rank's pairs: of the forward, and of the backward."""
        found = ((a.stage, self.pairs[a].stage) for a in self.actions[rank] if a in self.pairs)
        return list(dict.fromkeys(found))

    @property
    def splits_backward(self) -> bool:
        return any(action.kind == "W" for actions in self.actions for action in actions)

    def waiting(self, seconds: Callable[[PipelineAction], float] | None = None) -> float:
        """Return the bubble: the share of a step in which a rank is idle, on average over ranks.

        Messages take no time, and an action `seconds`. Unless they are given, stages are alike, and backward takes
        twice as long as forward.
        """
        time_of = seconds or (lambda action: _ALIKE[action.kind])
        busy = sum(time_of(action) for actions in self.actions for action in actions if action.kind in _ALIKE)
        return 1 - busy / (len(self.actions) * max(self.ends(time_of)))

    def ends(
        self,
        seconds: Callable[[PipelineAction], float],
        message: Callable[[PipelineAction], float] = lambda action: 0.0,
        before: Callable[[PipelineAction], float] = lambda action: 0.0,
    ) -> list[float]:
        """Return the time at which each rank has finished its actions.

        Args:
            seconds: of a computing action; of a pair those of its forward, which waits for both inputs.
            before: seconds of a rank's work before it waits for such an action's input.
            message: seconds in transit of an action's message; messages in one direction between
                two ranks go one after the other, each once it is sent and the receiver asks for it.
        """
        now, places = [0.0] * len(self.actions), [0] * len(self.actions)
        sent: dict[tuple[str, int, int], tuple[PipelineAction, float]] = {}  # (F or B, receiving stage, microbatch)
        asked: dict[tuple[str, int, int], float] = {}
        there: dict[tuple[str, int, int], float] = {}  # when x or dy has arrived
        free: dict[tuple[int, int], float] = {}  # when the link between two ranks is free
        last = len(self.stages) - 1

        def way_of(kind: str) -> str:
            return "F" if kind in ("F", "SEND_F", "RECV_F") else "B"

        def waits(action: PipelineAction) -> bool:
            return action.stage > 0 if action.kind == "F" else action.stage < last and action.kind != "W"

        def travel(what: tuple[str, int, int]) -> None:
            action, when = sent.pop(what)
            way = self.rank_of[action.stage], self.rank_of[what[1]]
            there[what] = free[way] = max(when, asked.pop(what), free.get(way, 0.0)) + message(action)

        while any(place < len(order) for place, order in zip(places, self.actions, strict=True)):
            for rank, order in enumerate(self.actions):
                while places[rank] < len(order):
                    kind, stage, i = action = order[places[rank]]
                    way = way_of(kind)
                    if kind.startswith("SEND"):
                        what = way, stage + 1 if way == "F" else stage - 1, i
                        sent[what] = action, now[rank]
                    elif kind.startswith("RECV"):
                        what = way, stage, i
                        asked[what] = now[rank]
                    else:
                        together = [action, self.pairs[action]] if action in self.pairs else [action]
                        needed = [(way_of(a.kind), a.stage, a.microbatch) for a in together if waits(a)]
                        if not there.keys() >= {*needed}:
                            break  # until other ranks have advanced
                        begin = max((there[each] for each in needed), default=0.0)
                        now[rank] = max(now[rank] + before(action), begin) + seconds(action)
                        what = way, stage + 1 if way == "F" else stage - 1, i
                        if kind != "W" and 0 <= what[1] <= last and self.rank_of[what[1]] == rank:
                            there[what] = now[rank]
                    if what in sent and what in asked:
                        travel(what)
                    places[rank] += 1
        return now


def plan_pipeline(
    options: job.Parallelism, modules: Sequence[str], num_microbatches: int, most_deferred: int | None = None
) -> Schedule:
    """Divide a model's modules, in the order of forward, into stages, and schedule a step's microbatches.

    Args:
        most_deferred: the microbatches whose weights' gradients a rank may put off at once; None: as the schedule does.

    Raises:
        UserError: the options don't fit the model, the number of ranks or of microbatches.
    """
    num_ranks = options.pipeline_parallel_degree
    if num_microbatches > MOST_MICROBATCHES:
        raise UserError(
            f"parallelism.pipeline_parallel_microbatch_size = {options.pipeline_parallel_microbatch_size}: makes"
            f" {num_microbatches:,} microbatches of a step's rows on a rank, and {MOST_MICROBATCHES:,} are the most; "
            "raise it, or lower training.global_batch_size or training.local_batch_size"
        )
    path = options.pipeline_parallel_schedule_csv
    if path is not None:
        if most_deferred is not None:
            raise UserError(
                f"{_DEFERRED} = {most_deferred}: not with {_CSV}, which says when each W runs; leave it out"
            )
        orders: Sequence[Sequence[PipelineAction]]
        orders, pairs = read_csv(Path(path), num_ranks, num_microbatches)
        pairs = pairs if options.overlap_microbatches else {}
        _check_pairs(options, pairs)
        num_stages = 1 + max(action.stage for order in orders for action in order)
        problem = _find_bad_order(orders, num_stages, num_microbatches)
        try:
            actions, rank_of = ([], []) if problem else with_messages(orders, num_stages, num_microbatches, pairs)
        except (AssertionError, ValueError, KeyError) as error:
            problem = str(error).partition("\n")[0] or "no rank could go on"
        if problem:
            raise UserError(
                f"{_CSV} = {path!r}: {problem}; every stage needs F, and B or I and W, of each of the"
                f" {num_microbatches} microbatches, all on one rank, each after what it waits for"
            )
        stages = _divide(options, modules, num_stages)
        return Schedule(stages, tuple(map(tuple, actions)), tuple(rank_of), pairs)
    name = options.pipeline_parallel_schedule
    num_stages = _count_stages(options)
    stages = _divide(options, modules, num_stages)
    if name == "DualPipeV" and num_microbatches < num_stages:
        raise UserError(
            f"parallelism.pipeline_parallel_schedule = 'DualPipeV': needs as many microbatches in a step as there are"
            f" stages, {num_stages}, not {num_microbatches}; {_MORE}, or take ZBVZeroBubble"
        )
    rounds = max(1, num_microbatches // num_ranks)
    if name == "Interleaved1F1B" and num_microbatches % rounds:
        raise UserError(
            f"parallelism.pipeline_parallel_schedule = 'Interleaved1F1B': {num_microbatches} microbatches in a step"
            f" don't make {rounds} equal rounds over {num_ranks} ranks; let their number be a multiple of"
            f" parallelism.pipeline_parallel_degree: {_MORE}"
        )
    orders, pairs = _orders(name, num_ranks, num_stages, num_microbatches)
    pairs = pairs if options.overlap_microbatches else {}
    _check_pairs(options, pairs)
    if most_deferred is not None:
        if SCHEDULES[name] != V:
            raise UserError(
                f"{_DEFERRED} = {most_deferred}: {name} puts no weights' gradients off; take ZBVZeroBubble or"
                " DualPipeV, or leave it out"
            )
        orders = [_deferring(order, most_deferred) for order in orders]
    actions, rank_of = with_messages(orders, num_stages, num_microbatches, pairs)
    return Schedule(stages, tuple(map(tuple, actions)), tuple(rank_of), pairs)


def _check_pairs(options: job.Parallelism, pairs: Pairs) -> None:
    if options.overlap_microbatches is True and not pairs:
        of_csv = options.pipeline_parallel_schedule_csv is not None
        what = f"the schedule of {_CSV}" if of_csv else options.pipeline_parallel_schedule
        raise UserError(
            f"parallelism.overlap_microbatches = true: {what} runs no forward alongside a backward; take"
            ' pipeline_parallel_schedule = "DualPipeV", or set it to false'
        )


def _deferring(order: Sequence[PipelineAction], most: int) -> list[PipelineAction]:
    """Return a rank's order with at most so many microbatches, of all its stages, whose weights' gradients are still to
    be computed: the oldest ones' are computed before the next is put off."""
    found: list[PipelineAction] = []
    waiting: list[PipelineAction] = []
    done: set[PipelineAction] = set()
    for action in order:
        if action.kind == "I":
            if len(waiting) == most:
                found.append(waiting.pop(0))
                done.add(found[-1])
            waiting.append(action._replace(kind="W"))
        elif action in waiting:
            waiting.remove(action)
        if action not in done:
            found.append(action)
    return found


_DEFERRED = "parallelism.pipeline_parallel_deferred_weights"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
_MORE = (
    "raise training.global_batch_size or training.local_batch_size, or lower"
    " parallelism.pipeline_parallel_microbatch_size"
)


def _orders(
    name: str, num_ranks: int, num_stages: int, num_microbatches: int
) -> tuple[Sequence[Sequence[PipelineAction]], Pairs]:
    if name == "1F1B":  # torch's 1F1B begins with a backward on the last rank (2.11 to 2.15)
        return [_one_forward_one_backward(rank, num_ranks - rank, num_microbatches) for rank in range(num_ranks)], {}
    return pipeline_order(name, num_ranks, num_stages // num_ranks, num_microbatches)


def _one_forward_one_backward(stage: int, num_ahead: int, num_microbatches: int) -> list[PipelineAction]:
    """Return a stage's 1F1B order: `num_ahead` forwards, one for each stage from it on, then a backward and a forward
    in turn, then the remaining backwards."""
    forwards = [PipelineAction("F", stage, i) for i in range(num_microbatches)]
    backwards = [PipelineAction("B", stage, i) for i in range(num_microbatches)]
    order, rest = forwards[:num_ahead], forwards[num_ahead:]
    for i, backward in enumerate(backwards):
        order += [backward, *rest[i : i + 1]]
    return order


# --- stages ---------------------------------------------------------------------------------------------------------


def _count_stages(options: job.Parallelism) -> int:
    """Return the number of stages on all ranks."""
    num_ranks, name = options.pipeline_parallel_degree, options.pipeline_parallel_schedule
    kind, num_stages = SCHEDULES[name], len(options.module_fqns_per_model_part)
    if not num_stages:
        return num_ranks * (1 if kind == ONE else 2)
    per_rank, rest = divmod(num_stages, num_ranks)
    wanted = {ONE: per_rank == 1, V: per_rank == 2, LOOPED: per_rank > 1}
    if rest or not wanted[kind]:
        raise UserError(
            f"parallelism.module_fqns_per_model_part: {num_stages} parts on parallelism.pipeline_parallel_degree"
            f" {num_ranks}: {name} needs {kind} on each rank"
        )
    return num_stages


def _divide(options: job.Parallelism, modules: Sequence[str], num_stages: int) -> tuple[tuple[str, ...], ...]:
    if options.module_fqns_per_model_part:
        return _as_named(options.module_fqns_per_model_part, modules, num_stages)
    first, last = options.pipeline_parallel_first_stage_less_layers, options.pipeline_parallel_last_stage_less_layers
    num_layers = _num_layers(modules)
    each, more = divmod(num_layers + _weight_of_ends(options), num_stages)
    sizes = [each + (stage < more) for stage in range(min(num_stages, len(modules)))]
    sizes[0] -= first
    sizes[-1] -= last
    if num_stages > len(modules) or min(sizes) < 0 or 0 in sizes[1:-1]:
        raise UserError(
            f"parallelism.pipeline_parallel_degree = {options.pipeline_parallel_degree}: {num_layers} layers can't fill"
            f" {num_stages} stages, the first with pipeline_parallel_first_stage_less_layers {first}, the last with"
            f" pipeline_parallel_last_stage_less_layers {last} fewer than the others; use fewer stages, or lower these"
        )
    stages, rest = [], list(modules)
    for stage, size in enumerate(sizes):
        size += (stage == 0) + 2 * (stage == num_stages - 1)  # the embedding; the last norm and the output
        stages.append(tuple(rest[:size]))
        rest = rest[size:]
    return tuple(stages)


def _num_layers(modules: Sequence[str]) -> int:
    return len(modules) - 3  # the embedding, the last norm, the output


def _weight_of_ends(options: job.Parallelism) -> int:
    return options.pipeline_parallel_first_stage_less_layers + options.pipeline_parallel_last_stage_less_layers


def _as_named(parts: Sequence[Sequence[str]], modules: Sequence[str], num_stages: int) -> tuple[tuple[str, ...], ...]:
    named = [name for part in parts for name in part]
    where, in_order = "parallelism.module_fqns_per_model_part", f"the modules are {_shown(modules)}, in this order"
    if unknown := next((name for name in named if name not in modules), None):
        hint = did_you_mean(unknown, modules, f"; {in_order}")
        raise UserError(f"{where}: {unknown!r} is not a part of this model{hint}")
    if missing := [name for name in modules if name not in named]:
        raise UserError(f"{where}: {', '.join(missing[:5])} is in no part; {in_order}")
    if repeated := next((name for name in named if named.count(name) > 1), None):
        raise UserError(f"{where}: {repeated} is there more than once; {in_order}")
    if [] in parts:
        raise UserError(f"{where}: part {list(parts).index([]) + 1} of {len(parts)} is empty")
    if early := next((name for name, due in zip(named, modules, strict=True) if name != due), None):
        raise UserError(f"{where}: {early} comes too early; {in_order}")
    if len(parts) != num_stages:
        raise UserError(f"{where}: has {len(parts)} parts, but the schedule has {num_stages} stages")
    return tuple(map(tuple, parts))


def _shown(modules: Sequence[str]) -> str:
    layers = modules[1:-2]
    between = layers if len(layers) < 3 else [f"{layers[0]} to {layers[-1]}"]
    return ", ".join([modules[0], *between, *modules[-2:]])


# --- a user's own schedule ------------------------------------------------------------------------------------------


def _find_bad_order(orders: Sequence[Sequence[PipelineAction]], num_stages: int, num_microbatches: int) -> str | None:
    """Return the first fault in the ranks' computing actions, None if there is none; messages are checked by torch."""
    lines: dict[int, int] = {}
    done: set[tuple[str, int, int]] = set()
    for line, order in enumerate(orders, 1):
        for kind, stage, i in order:
            first = {"B": "F", "I": "F", "W": "I"}.get(kind)
            if lines.setdefault(stage, line) != line:
                return f"stage {stage} is in line {lines[stage]} and in line {line}"
            if first and (first, stage, i) not in done:
                return f"line {line}: {stage}{kind}{i} has no {stage}{first}{i} before it"
            done.add((kind, stage, i))
    for stage in range(num_stages):
        for i in range(num_microbatches):
            kinds = "".join(kind for kind in "FBIW" if (kind, stage, i) in done)
            if kinds not in ("FB", "FIW"):
                return f"of stage {stage} and microbatch {i} there is {', '.join(kinds) or 'nothing'}"
    return None


def read_csv(path: Path, num_ranks: int, num_microbatches: int) -> tuple[list[list[PipelineAction]], Pairs]:
    """Return each rank's actions, and the pairs, from a file: a line for each, actions such as 0F0, 1B0, 0I2 or 0W2
    (stage, kind, microbatch) separated by commas, empty where it waits; (0F3;1B0)OVERLAP_F_B for two side by side.

    Raises:
        UserError: it can't be read; names the line.
    """
    try:
        text = io.StringIO(read_text(path), newline="")
        lines = [row for row in csv.reader(text) if any(cell.strip() for cell in row)]
    except BadFile as error:
        raise UserError(f"{_CSV}: {error}") from error
    except (OSError, csv.Error) as error:
        raise UserError(f"{_CSV} = {str(path)!r}: can't be read ({error})") from error
    if len(lines) != num_ranks:
        raise UserError(f"{_CSV} = {str(path)!r}: has {len(lines)} lines of actions, but there are {num_ranks} ranks")
    orders: list[list[PipelineAction]] = []
    together: dict[PipelineAction, PipelineAction] = {}
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line if cell.strip()]
        pairs = [_SIDE_BY_SIDE.fullmatch(cell) for cell in cells]
        words = [w.strip() for cell, m in zip(cells, pairs, strict=True) for w in (m[1].split(";") if m else [cell])]
        actions = []
        for word in words:
            found = _ACTION.fullmatch(word)
            if not found or int(found[3]) >= num_microbatches:
                raise UserError(
                    f"{_CSV} = {str(path)!r}, line {number}: {word!r} is not an action, such as 0F1: a stage, F, B,"
                    f" I or W, and a microbatch, from 0 to {num_microbatches - 1}"
                )
            actions.append(PipelineAction(found[2], int(found[1]), int(found[3])))
        orders.append(actions)
        by_word = dict(zip(words, actions, strict=True))
        for cell, m in zip(cells, pairs, strict=True):
            inside = [by_word[w.strip()] for w in m[1].split(";")] if m else []
            if len(inside) == 2 and [a.kind for a in inside] == ["F", "B"] and inside[0].stage != inside[1].stage:
                together[inside[0]] = inside[1]
            elif m:
                raise UserError(
                    f"{_CSV} = {str(path)!r}, line {number}: {cell!r}: side by side run a forward and the backward of"
                    " another stage, such as (0F3;1B0)OVERLAP_F_B"
                )
        # 0F0 is 00F0 too.
        if repeated := next((a for a, count in Counter(actions).items() if count > 1), None):
            raise UserError(
                f"{_CSV} = {str(path)!r}, line {number}: {repeated.stage}{repeated.kind}{repeated.microbatch} is"
                " there more than once"
            )
    return orders, together
