"""Search for the fastest configuration of a job on a cluster: degrees, rows at a time, recomputation, resharding.

Note [Search]
The trainer decides which candidates are legal: each is a configuration that goes through `check` and `Trainer`. A
step's time, memory and communication are linear in the number of periods of alike layers, so a candidate is built with
few layers, twice, and extrapolated to the whole depth; with more layers where a third depth is not on that line. A
pipeline, whose stages are short, is built whole. Three things are never slower, or never smaller, than their
neighbours, and so need not be built: if the leanest way to compute some rows does not fit, more rows don't; less
recomputation is not slower, nor is keeping gathered weights. The peak is extrapolated place by place, for the place
that has most changes with depth; one that is close to the limit is not extrapolated. The three leading candidates are
built whole too, and ranked by that; in place of one that then does not fit, its siblings are tried.

Last come levers that hide or spare communication: the other exchange of experts' tokens, weights gathered once a step,
microbatches in pairs; and then a share of activations to keep, as large as the memory allows. With them a candidate
can't be faster than its way that recomputes least would be without all that it waits for: while that bound is below the
best, it is tried, lever by lever, built whole.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchtitan_graph.config import JobConfig, check
from torchtitan_graph.config.job import get, put
from torchtitan_graph.errors import UserError
from torchtitan_graph.parallel.layout import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from torchtitan_graph.parallel.recompute import Policy, fixed_policies
from torchtitan_graph.parallel.schedule import SCHEDULES
from torchtitan_graph.parallel.storage import ALL, EXPERTS, NONE
from torchtitan_graph.steps import num_replicas

_PP, _REPLICATE = "parallelism.pipeline_parallel_degree", "parallelism.data_parallel_replicate_degree"
_SHARD, _CP = "parallelism.data_parallel_shard_degree", "parallelism.context_parallel_degree"
_TP, _EP = "parallelism.tensor_parallel_degree", "parallelism.expert_parallel_degree"
_SCHEDULE, _ROWS = "parallelism.pipeline_parallel_schedule", "training.local_batch_size"
_STAGE_ROWS = "parallelism.pipeline_parallel_microbatch_size"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_ONCE, _PAIRS = "parallelism.fsdp_once_a_step", "parallelism.overlap_microbatches"
_EXCHANGE = "parallelism.expert_exchange"
_MODE, _OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
_BUDGET, _SHARE = "memory_budget", "activation_checkpoint.memory_budget"

SHORT = {
    _PP: PP,
    _REPLICATE: DP_REPLICATE,
    _SHARD: DP_SHARD,
    _CP: CP,
    _TP: TP,
    _EP: EP,
    _SCHEDULE: "schedule",
    _STAGE_ROWS: "rows",
    _ROWS: "rows",
    _RESHARD: "reshard",
    _ONCE: "once",
    _PAIRS: "pairs",
    _EXCHANGE: "exchange",
}
AXES = (DP_REPLICATE, TP, CP, PP, EP)
VARIED = (*AXES, "schedule", "rows", "recompute", "reshard", "once", "pairs", "exchange")

_CLOSE = 0.25  # a candidate that seems to need up to so much more or less than the limit is built whole
_RESHARDS = ("never", "default", "always")
_LEADING = 3  # candidates that are built whole, and ranked by that
_WITH_LEVERS = 8  # candidates that are tried with levers, at most
_ON_THE_LINE = 0.02  # of a figure, by which a third depth may be off the line through two
_MOST_DEPTHS = 5  # with more, all layers are built
_DIRECT, _BY_MACHINE = "direct", "by_machine"
_SHARES = 4  # shares of activations that are tried: to a 16th
_IN_PAIRS = "DualPipeV"  # the schedule whose forward and backward can run as one


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures by which candidates are compared.

    step_s   seconds of an optimizer step
    peak     bytes of the rank that needs most
    parts    seconds of the step by purpose: arithmetic, exposed communication by axis, bubble, optimizer, ...
    places   the most bytes by the place in the step, such as forward of the last layer; none: not known
    """

    step_s: float
    peak: float
    parts: Mapping[str, float]
    places: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def at(self, other: Figures, x: float) -> Figures:
        """Return the figures on the line between these, at 0, and others, at 1. The peak is that of the place which
        has most there: another one than here, where what layers keep outgrows the loss."""
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {n: _line(self.parts.get(n, 0.0), other.parts.get(n, 0.0), x) for n in names}
        places = {
            place: _line(size, other.places[place], x) for place, size in self.places.items() if place in other.places
        }
        peak = max([_line(self.peak, other.peak, x), *places.values()])
        return Figures(_line(self.step_s, other.step_s, x), peak, parts, places)

    def is_close(self, other: Figures) -> bool:
        """Return whether time and peak are the same but for little."""
        pairs = ((self.step_s, other.step_s), (self.peak, other.peak))
        return all(math.isclose(a, b, rel_tol=_ON_THE_LINE) for a, b in pairs)


def _line(a: float, b: float, x: float) -> float:
    return a + (b - a) * x


EXPOSED = "exposed "  # begins the parts of communication
WAITS = ("messages between stages", "bubble")  # the other parts in which a rank waits
Progress = Callable[[str], None]
Settings = Mapping[str, Any]  # options of a job, by name
Forecaster = Callable[[JobConfig, "int | None"], Figures]  # of a job, with so many of the model's layers, or all


@dataclasses.dataclass
class JobCandidate:
    """A candidate configuration: its settings, and either its figures, or why it is out."""

    settings: Settings
    figures: Figures | None = None
    why: str = ""
    whole: bool = False  # its figures are of all layers, not extrapolated
    next: Sequence[Settings] = ()  # ways that are slower and need less, from the fastest on
    least: float = math.inf  # bound of its ways that recompute less

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite where it could not be built."""
        return math.inf if self.figures is None else self.figures.step_s

    @property
    def bound(self) -> float:
        """The least seconds that a step could take if it waited for no communication, nor for other stages, and
        recomputed as little as any of its ways that were built."""
        parts = {} if self.figures is None else self.figures.parts
        waits = sum(s for name, s in parts.items() if name in WAITS or name.startswith(EXPOSED))
        return min(self.step_s - waits, self.least)

    def __str__(self) -> str:
        given = [(SHORT[key], value) for key, value in self.settings.items() if key in SHORT]
        # 1 equals True
        plain = [str(each) for each in (1, NONE, False, _DIRECT)]
        shown = {name: value for name, value in given if str(value) not in plain or name == "rows"}
        if _STAGE_ROWS in self.settings:
            shown["rows"] = self.settings[_STAGE_ROWS]
        elif self.settings.get(_PP, 1) == 1:
            shown.pop("schedule", None)
        policy = self.settings.get(_MODE)
        words = [f"{name} {str(value).lower() if value is True else value}" for name, value in shown.items()]
        if policy is not None:
            share = f" {self.settings[_SHARE]:g}" if policy == _BUDGET and _SHARE in self.settings else ""
            words.append(f"recompute {self.settings.get(_OPTION, policy)}{share}")
        return ", ".join(words) or "one rank"


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search: candidates that fit, the fastest first, and all others."""

    fitting: Sequence[JobCandidate]
    others: Sequence[JobCandidate]

    @property
    def best(self) -> JobCandidate:
        return self.fitting[0]


# --- the candidates -------------------------------------------------------------------------------------------------


def degrees(world_size: int, num_near: int, num_experts: int, fixed: Settings) -> Iterator[dict[str, int]]:
    """Yield all ways to divide a job's ranks: degrees that multiply to their number, and for experts those that divide
    the ranks they reuse, and their own number. Tensor parallelism stays inside a machine of `num_near` ranks; experts
    share ranks of one machine, or whole machines."""

    def divisors(n: int) -> list[int]:
        return [d for d in range(1, n + 1) if n % d == 0]

    def choices(key: str, legal: Sequence[int]) -> Sequence[int]:
        return (fixed[key],) if key in fixed else legal

    all_of = divisors(world_size)
    inside = [d for d in all_of if num_near % d == 0 or (d <= num_near and world_size <= num_near)]
    for pp, replicate, cp, tp in itertools.product(
        choices(_PP, all_of), choices(_REPLICATE, all_of), choices(_CP, all_of), choices(_TP, inside)
    ):
        rest, left = divmod(world_size, pp * replicate * cp * tp)
        if left:
            continue
        reused = [d for d in divisors(rest * cp * tp) if d in inside or d % num_near == 0]
        for ep in choices(_EP, [d for d in reused if num_experts % d == 0] if num_experts else [1]):
            yield {_PP: pp, _REPLICATE: replicate, _SHARD: rest, _CP: cp, _TP: tp, _EP: ep}


def rows_at_a_time(rows: int) -> list[int]:
    """Return the powers of two that divide a rank's rows of a step, and all of them."""
    return sorted({*(2**i for i in range(rows.bit_length()) if rows % 2**i == 0), rows})


def ways(of: Settings, fixed: Settings) -> list[list[dict[str, Any]]]:
    """Return the other settings, by recomputation, and then by when gathered weights are freed: the first of each is
    not slower than the second, nor smaller."""
    policies = [{}] if _MODE in fixed else [_settings(policy) for policy in fixed_policies()]
    gathers = of[_SHARD] * of[_CP] > 1
    reshards = [{}] if _RESHARD in fixed or not gathers else [{_RESHARD: how} for how in _RESHARDS]
    return [[{**policy, **reshard} for reshard in reshards] for policy in policies]


def _settings(policy: Policy) -> dict[str, Any]:
    return {f"activation_checkpoint.{key}": value for key, value in policy.options.items()}


# --- the search -----------------------------------------------------------------------------------------------------


class Search:
    """One search.

    Args:
        config: the job; options that are not varied stay as they are.
        varied: members of `VARIED` that may differ from it.
        rows: rows of a step, on all ranks together.
        memory: limit of a rank's bytes.
        forecast: function that returns a candidate's figures, or raises the trainer's `UserError`.
        num_experts: of a layer; 0: none.
        depths: the first two numbers of layers to build, and the position of all layers on their line; None: whole.
        progress: called with a line for each candidate.
    """

    def __init__(
        self,
        config: JobConfig,
        world_size: int,
        *,
        num_near: int,
        num_experts: int,
        rows: int,
        memory: float,
        forecast: Forecaster,
        depths: tuple[int, int, float] | None,
        varied: Sequence[str] = VARIED,
        progress: Progress = lambda line: None,
    ) -> None:
        self.config, self.world_size, self.rows, self.memory = config, world_size, rows, memory
        self.num_near, self.num_experts = num_near, num_experts
        self.forecast, self.depths, self.progress = forecast, depths, progress
        self.fixed = self._fixed(varied)
        self.num_built, self.num_at_most, self.is_stopped = 0, 0, False
        self.found: list[JobCandidate] = []

    def _fixed(self, varied: Sequence[str]) -> dict[str, Any]:
        of: dict[str, list[str]] = {"recompute": [_MODE, _OPTION]}
        for key, name in SHORT.items():
            of.setdefault(name, []).append(key)
        if self.config.parallelism.pipeline_parallel_schedule_csv is not None:
            varied = [name for name in varied if name != "schedule"]  # the file is the schedule
        return {key: get(self.config, key) for name in VARIED if name not in varied for key in of[name]}

    def run(self) -> Found:
        """Return the result, with the fastest candidate that fits first. Ctrl-C ends the search early: the result is
        then that of the candidates so far.

        Raises:
            UserError: none is legal, or none fits: names the one that needs least.
        """
        divided = list(degrees(self.world_size, self.num_near, self.num_experts, self.fixed))
        self.num_at_most = sum(map(self._num_with_degrees, divided))
        try:
            for of in divided:
                self._with_degrees(of)
            self._check_leading()
            self._with_levers()
        except KeyboardInterrupt:
            self.is_stopped = True
            self.progress("stopped: the leading candidates are built whole; Ctrl-C again ends without a result")
        fitting = self._check_leading()
        others = [each for each in self.found if each.why]
        if not fitting:
            raise UserError(self._why_none(others))
        for each in fitting[1:]:
            each.why = why_slower(each, fitting[0])
        return Found(fitting, others)

    def fitting(self) -> list[JobCandidate]:
        """Return the candidates so far that fit, the fastest first."""
        return sorted((each for each in self.found if not each.why), key=lambda each: each.step_s)

    def _data(self, of: Settings) -> int:
        """Return the number of ranks, or of groups of them, with rows of their own, in all replica groups."""
        return of[_REPLICATE] * of[_SHARD] * num_replicas(self.config)

    def _rows_and_schedules(self, of: Settings) -> tuple[list[int], Sequence[str | None]]:
        """Return the rows at a time, none if those of a step don't divide; and a pipeline's schedules, else None."""
        data = self._data(of)
        rows = rows_at_a_time(self.rows // data) if self.rows % data == 0 else []
        if rows and _ROWS in self.fixed:
            rows = [self.fixed[_STAGE_ROWS if of[_PP] > 1 else _ROWS]]
        if of[_PP] == 1:
            return rows, [None]
        return rows, [self.fixed[_SCHEDULE]] if _SCHEDULE in self.fixed else list(SCHEDULES)

    def _num_with_degrees(self, of: Settings) -> int:
        """Return the number of candidates of some degrees, without levers, if all are built."""
        rows, schedules = self._rows_and_schedules(of)
        return len(rows) * len(schedules) * sum(map(len, ways(of, self.fixed)))

    def _with_degrees(self, of: dict[str, int]) -> None:
        """Judge all candidates of some degrees, without levers."""
        data = self._data(of)
        all_rows, schedules = self._rows_and_schedules(of)
        if not all_rows:
            of_groups = ", those of all replica groups" if num_replicas(self.config) > 1 else ""
            why = f"illegal: {self.rows} rows of a step don't divide over {data} data-parallel ranks{of_groups}"
            self.found.append(JobCandidate(of, why=why))
            return
        levers: dict[str, Any] = {_ONCE: NONE, _PAIRS: False}
        if of[_EP] > 1:
            levers[_EXCHANGE] = _BY_MACHINE if of[_EP] > self.num_near else _DIRECT
        levers |= {key: self.fixed[key] for key in levers if key in self.fixed}
        if of[_PP] > 1:
            levers[_ONCE] = NONE  # its stages gather and reduce once a step in any case
        for schedule in schedules:
            is_too_much = False
            for rows in all_rows:
                if is_too_much and rows * data < self.rows:
                    continue  # fewer rows did not fit; a single microbatch may, which sums no gradients
                base: dict[str, Any] = {**of, **levers, _ROWS: rows}
                if schedule is not None:
                    base = {**of, **levers, _SCHEDULE: schedule, _ROWS: self.rows // data, _STAGE_ROWS: rows}
                judged = self._with_rows(base)
                is_too_much = all(each.why.startswith("does not fit") for each in judged)
                if judged[0].why.startswith("illegal") and schedule is None:
                    break  # the degrees themselves are illegal

    def _with_rows(self, base: dict[str, Any]) -> list[JobCandidate]:
        """Return the ways to compute some rows, judged from the fastest on; stop where no slower one can be better."""
        found: list[JobCandidate] = []
        by_policy = ways(base, self.fixed)
        all_ways = [way for of_policy in by_policy for way in of_policy]
        for of_policy in by_policy:
            for way in of_policy:
                found.append(self._judge({**base, **way}))
                if found[-1].why.startswith("illegal"):
                    return found
                found[-1].least = min(each.bound for each in found)
                if not found[-1].why:
                    later = all_ways[1 + next(i for i, each in enumerate(all_ways) if each is way) :]
                    found[-1].next = [{**base, **each} for each in later]
                    break  # the next ones free weights sooner, and gather them again
            if way is of_policy[0] and not found[-1].why:
                break  # the next ones recompute more, and free no later
        return found

    def _with_levers(self) -> None:
        """Judge the leading candidates with levers, while their bound is below the best."""
        leading: dict[str, JobCandidate] = {}
        for each in sorted(self.fitting(), key=lambda each: each.bound):
            # A pipeline's pairs bring their own schedule: of the schedules, one is tried with them.
            leading.setdefault(str({key: x for key, x in each.settings.items() if key != _SCHEDULE}), each)
        for each in [*leading.values()][:_WITH_LEVERS]:
            if each.bound >= self.fitting()[0].step_s:
                return
            best = each
            for alternatives in self._levers(each):
                for way in alternatives:
                    if all(best.settings.get(key) == value for key, value in way.items()):
                        continue
                    other = self._judge({**best.settings, **way}, is_whole=True)
                    is_faster = not other.why and other.step_s < best.step_s
                    best = other if is_faster else best
                    if is_faster or (not other.why and _PAIRS in way):
                        break  # the next ways of pairs need less, and are slower
            self._with_shares(best)

    def _with_shares(self, each: JobCandidate) -> None:
        """Judge a candidate that recomputes something with other shares of activations that it keeps, halving what is
        between the largest share that fits and the least that does not."""
        if _MODE in self.fixed or each.settings.get(_MODE, "none") == "none":
            return
        settings = {key: value for key, value in each.settings.items() if key != _OPTION}
        low, high = 0.0, 1.0
        for _ in range(_SHARES):
            share = (low + high) / 2
            tried = self._judge({**settings, _MODE: _BUDGET, _SHARE: share}, is_whole=True)
            if tried.figures is None:
                return
            low, high = (low, share) if tried.why else (share, high)

    def _levers(self, each: JobCandidate) -> list[list[dict[str, Any]]]:
        """Return settings to try with a candidate, lever by lever; of a lever the first that is faster is enough."""
        of, found = each.settings, list[list[dict[str, Any]]]()
        # In pairs more is in memory: with the ways to compute that need less too.
        keys = (_MODE, _OPTION, _RESHARD)
        less_memory = dict.fromkeys(tuple((key, way[key]) for key in keys if key in way) for way in each.next)
        if of[_EP] > 1 and _EXCHANGE not in self.fixed:
            found.append([{_EXCHANGE: _DIRECT if of.get(_EXCHANGE) == _BY_MACHINE else _BY_MACHINE}])
        if of[_PP] > 1:
            has_its_own = self.config.parallelism.pipeline_parallel_schedule_csv is not None
            if _PAIRS not in self.fixed and self.fixed.get(_SCHEDULE, _IN_PAIRS) == _IN_PAIRS and not has_its_own:
                ways_of_pairs = {(): None, **less_memory}
                found.append([{_SCHEDULE: _IN_PAIRS, _PAIRS: True, **dict(way)} for way in ways_of_pairs])
        elif self.rows > self._data(of) * of[_ROWS]:  # several microbatches
            onces = [{_ONCE: ALL}, *([{_ONCE: EXPERTS}] if of[_EP] > 1 else [])]
            if _ONCE in self.fixed:
                onces = []
            found += [onces]
            if _PAIRS not in self.fixed:
                less = [*onces[1:], {_ONCE: NONE}] if onces else []
                less += map(dict, less_memory)
                found += [[{_PAIRS: True}, *({_PAIRS: True, **way} for way in less)]]
        return found

    def _judge(self, settings: dict[str, Any], is_whole: bool = False) -> JobCandidate:
        """Return a candidate, added to `found`, with its forecast, or why it is out; one judged before as it is."""
        for each in self.found:
            if each.settings == settings and (each.whole or each.figures is None or not is_whole):
                return each
        each = JobCandidate(settings)
        config = self.configured(settings)
        try:
            check(config, self.world_size)
            each.figures = None if is_whole or settings[_PP] > 1 else self._extrapolated(config)
            if each.figures is None:
                each.figures, each.whole = self.forecast(config, None), True
        except UserError as error:
            each.why = _illegal(error)
        if each.figures is not None:
            self.num_built += 1
            self._judge_memory(each)
        self.found.append(each)
        if each.figures is not None:
            self.progress(f"{self._count}: {each}: {each.why or f'{each.step_s:.4g} s a step'}{self._best_so_far()}")
        return each

    @property
    def _count(self) -> str:
        return f"{self.num_built} of at most {max(self.num_at_most, self.num_built)}"

    def _best_so_far(self) -> str:
        best = self.fitting()[:1]
        return "".join(f"; best so far {each}: {each.step_s:.4g} s" for each in best)

    def _extrapolated(self, config: JobConfig) -> Figures | None:
        """Return a job's figures on the line through two depths that a third confirms; None: all layers must be
        built."""
        if self.depths is None:
            return None
        few, more, x = self.depths
        built = [self.forecast(config, few), self.forecast(config, more)]
        while len(built) <= x:
            if len(built) == _MOST_DEPTHS:
                return None
            built.append(self.forecast(config, few + len(built) * (more - few)))
            if built[-3].at(built[-2], 2.0).is_close(built[-1]):
                break
        found = built[-2].at(built[-1], x - len(built) + 2)
        return None if abs(found.peak / self.memory - 1) < _CLOSE else found

    def configured(self, settings: Settings) -> JobConfig:
        """Return the job's configuration with a candidate's settings; it trains unchanged."""
        config = copy.deepcopy(self.config)
        for key, value in {**settings, "training.global_batch_size": self.rows}.items():
            put(config, key, value)
        return config

    def _judge_memory(self, each: JobCandidate) -> None:
        assert each.figures is not None
        if each.figures.peak > self.memory:
            needs, has = each.figures.peak / 2**30, self.memory / 2**30
            each.why = f"does not fit: needs {needs:.4g} GiB of {has:.4g}"

    def _check_leading(self) -> list[JobCandidate]:
        """Return the candidates that fit, sorted by time, after the leading ones were built whole. In place of one that
        then does not fit comes its next way that does."""
        while True:
            fitting = self.fitting()
            each = next((each for each in fitting[:_LEADING] if not each.whole), None)
            if each is None:
                return fitting
            try:
                each.figures = self.forecast(self.configured(each.settings), None)
                self._judge_memory(each)
            except UserError as error:
                each.why = _illegal(error)
            each.whole = True  # only now: Ctrl-C may have ended the build
            self.progress(f"whole: {each}: {each.why or f'{each.step_s:.4g} s a step'}")
            if each.why:
                self._judge_siblings(each)

    def _judge_siblings(self, each: JobCandidate) -> None:
        """Judge the ways that need less than a candidate that does not fit, as `_with_rows` does."""
        fitting: tuple[Any, ...] = ()
        for number, settings in enumerate(each.next, 1):
            policy = (settings.get(_MODE), settings.get(_OPTION))
            if policy == fitting:
                continue  # frees weights sooner, and gathers them again
            sibling = self._judge(dict(settings))
            if sibling.why:
                continue
            sibling.next, fitting = sibling.next or each.next[number:], policy
            sibling.least = min(sibling.least, each.bound)
            if settings.get(_RESHARD, _RESHARDS[0]) == _RESHARDS[0]:
                return  # the next ones recompute more, and free no later

    def _why_none(self, others: Sequence[JobCandidate]) -> str:
        built = [each for each in others if each.figures is not None]
        if not others:
            return "--search: stopped before the first candidate was built"
        if not built:
            return f"--search: no candidate is legal; the first, {others[0]}: {others[0].why}"
        least = min(built, key=lambda each: each.figures.peak if each.figures else math.inf)
        return f"--search: none of {len(built)} candidates fits; the least, {least}, {least.why}"


def _illegal(error: UserError) -> str:
    first, *problems = str(error).splitlines()
    return f"illegal: {(problems or [first])[0].strip()}"


def why_slower(each: JobCandidate, best: JobCandidate) -> str:
    """Return by how much a candidate is slower than the best, and its largest cause."""
    assert each.figures is not None and best.figures is not None
    by = each.figures.step_s / best.figures.step_s - 1
    more = {name: s - best.figures.parts.get(name, 0.0) for name, s in each.figures.parts.items()}
    what = max(more, key=more.__getitem__, default="")
    policies = [_settings(policy).items() for policy in fixed_policies()]
    mine, its = (
        next((i for i, own in enumerate(policies) if own <= c.settings.items()), int(c.settings.get(_MODE) == _BUDGET))
        for c in (each, best)
    )
    name = "recomputation" if what == "arithmetic" and mine > its else what
    because = f": {name} takes {more[what] * 1e3:.3g} ms more" if what and more[what] > 0 else ""
    return f"slower by {by:.1%}{because}"
