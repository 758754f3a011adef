"""Simulation of a step's time: kernels, overlapping collectives, the pipeline's schedule and the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import GraphModule

from torchtitan_graph.analysis.cost import Costs, Estimate, Link, estimate
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.forecast import wait_for_replicas
from torchtitan_graph.parallel.layout import PP
from torchtitan_graph.parallel.pipeline import StageGraph, beside
from torchtitan_graph.parallel.schedule import COMPUTING, Schedule
from torchtitan_graph.plan.ranks import BuiltJob, Rank
from torchtitan_graph.rates import Rates
from torchtitan_graph.runtime.partition import ONCE_A_STEP
from torchtitan_graph.steps.budget import trained_bytes
from torchtitan_graph.steps.held import bytes_of_adding, cast_for_sums, runs_of
from torchtitan_graph.torch_private.pipelines import PipelineAction

Prices = Callable[[Rank], Costs]  # the cost model of a rank's graphs

# Seconds of a step for the replica groups' quorum, for the exchange of their numbers of targets, and for the vote:
# measured, of two groups on one core of a CPU, over loopback. See docs/scale/replicas.md.
QUORUM_S, EXCHANGE_S, VOTE_S = 3.5e-3, 3.9e-3, 1.6e-3


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    seconds    from its begin to the next one's
    computed   of the kernels of all microbatches, by their kind
    sent       of communication, by axis
    exposed    of communication that is not hidden, by axis; along pp added by messages
    host       in which the device waits for the host to launch kernels
    optimizer  of clipping, and of the optimizer's step
    sums       to add up the microbatches' gradients
    bubble     in which a rank of a pipeline waits for others, with messages of no time
    replicas   for the sum of gradients over the replica groups, all of which live, beyond what backward hides
    meeting    for these groups' quorum, exchange and vote
    """

    seconds: float
    computed: Mapping[str, float]
    sent: Mapping[str, float]
    exposed: Mapping[str, float]
    host: float
    optimizer: float
    sums: float
    bubble: float = 0.0
    replicas: float = 0.0
    meeting: float = 0.0


@dataclass(frozen=True)
class JobForecast:
    """A forecast of the rank that needs most memory, with the time of a step, which is the same on all.

    fullest   its place in `job.ranks`
    needs     bytes that each of `job.ranks` needs, the device's `reserved_gib` included
    mfu       model FLOPs of a step over the device's bf16 peak, 0 to 1; in a pipeline the mean of its stages
    """

    job: BuiltJob
    rates: Rates
    step: StepTime
    fullest: int
    needs: tuple[int, ...]
    mfu: float

    @property
    def rank(self) -> Rank:
        return self.job.ranks[self.fullest]

    @property
    def fits(self) -> bool:
        return max(self.needs) <= self.rates.memory_gib * 2**30

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks, those of all replica groups."""
        return self.job.tokens_per_step / self.step.seconds


def by_rates(job: BuiltJob, rates: Rates) -> Prices:
    """Return the cost model of a kind of device. The host does not launch kernels that a CUDA graph replays."""
    rates = rates._replace(launch=0.0) if job.config.compile.cuda_graphs else rates
    return lambda rank: Costs(rates, rank.links, rank.visible)


def simulate(job: BuiltJob, prices: Prices, rates: Rates) -> JobForecast:
    """Return the forecast of a job from its ranks' graphs.

    Args:
        prices: the cost model of a rank's graphs.
        rates: of the device: its memory and its peak.
    """
    needs = tuple(rank.forecast.in_all + int(rates.reserved_gib * 2**30) for rank in job.ranks)
    fullest = needs.index(max(needs))
    is_whole = job.options.pipeline is None
    step = _whole(job, prices(job.ranks[0])) if is_whole else _pipelined(job, prices, fullest)
    if (groups := job.options.num_replicas) > 1:
        step = _with_replicas(step, job, prices)
    operations = sum(rank.forecast.operations for rank in job.ranks) / len(job.ranks)
    operations *= job.options.num_microbatches / groups  # on average: some groups may have one microbatch fewer
    return JobForecast(job, rates, step, fullest, needs, operations / (step.seconds * rates.half))


def _with_replicas(step: StepTime, job: BuiltJob, prices: Prices) -> StepTime:
    """Return a group's step with what it does with the others. See Note [Replicas]."""
    link = job.dims.link_of_replicas(job.options.num_replicas, job.options.target.rates.num_near)
    sums = max(wait_for_replicas(rank.graphs, job.options, prices(rank), link) for rank in job.ranks)
    meeting = QUORUM_S + EXCHANGE_S + VOTE_S
    return dataclasses.replace(step, seconds=step.seconds + sums + meeting, replicas=sums, meeting=meeting)


def _of_trained(rank: Rank, price: Callable[[int, bool], float]) -> float:
    """Return a cost of a rank's trainable parameters, summed over its device and its host."""
    storages = rank.graphs.storages.values()
    return sum(price(trained_bytes(s for s in storages if s.on_host == away), away) for away in (False, True))


def _whole(job: BuiltJob, costs: Costs) -> StepTime:
    """Return the step time of microbatches one after the other, whose gradients are summed."""
    (rank,), number, train = job.ranks, job.num_microbatches, job.ranks[0].graphs.train
    if isinstance(train, StageGraph):
        each = [estimate(train.all_parts[name].gm, costs) * times for name, times in runs_of(train, number)]
        time = sum(each[1:], each[0])
        sums = costs.moving(cast_for_sums(train))  # of the first microbatch; the others' are in the graphs
    else:
        assert isinstance(train, TracedResult)
        time = estimate(train.gm, costs) * number
        sums = _of_trained(rank, costs.accumulating) * (number - 1)
    optimizer = _of_trained(rank, costs.optimizer)
    return _step_time(time, time.seconds + sums + optimizer, optimizer, sums)


def _step_time(time: Estimate, seconds: float, optimizer: float, sums: float, bubble: float = 0.0) -> StepTime:
    host = time.seconds - sum(time.exposed.values()) - sum(time.computed.values())
    return StepTime(seconds, time.computed, time.sent, time.exposed, host, optimizer, sums, bubble)


# --- a pipeline -------------------------------------------------------------------------------------------------------


def _pipelined(job: BuiltJob, prices: Prices, shown: int) -> StepTime:
    """Return the step time of all ranks' actions, in the schedule's order; `shown` is the rank reported on."""
    schedule = job.schedule
    assert schedule is not None
    known: dict[GraphModule, list[tuple[Costs, Estimate]]] = {}  # equal stages share their parts' graphs
    parts: dict[Key, Estimate] = {}
    passed: dict[int, int] = {}
    adding: dict[int, tuple[float, float]] = {}  # seconds of gradient sums, by stage: first microbatch, later one
    near = all(link.near == link.degree for link in _links_along_pp(job))
    costs_of = [prices(rank) for rank in job.ranks]
    for rank, costs in zip(job.ranks, costs_of, strict=True):
        assert isinstance(rank.graphs.train, dict)
        for number, stage in rank.graphs.train.items():
            passed[number] = stage.passed.nbytes
            adding[number] = costs.moving(cast_for_sums(stage)), costs.moving(bytes_of_adding(stage))
            for name, part in stage.all_parts.items():
                parts[number, name] = _estimate(part.gm, costs, known.setdefault(part.gm, []))
    names = {number: list(s.parts.by_name) for rank in job.ranks for number, s in rank.graphs.train.items()}  # type: ignore[union-attr]
    runs = [_runs(schedule, place, names) for place in range(len(job.ranks))]
    giving = [action for actions in schedule.actions for action in actions if action.kind in ("B", "W")]
    firsts = {action.stage: action for action in reversed(giving)}

    def taken(keys: Sequence[Key]) -> float:
        return sum(parts[key].seconds for key in keys)

    def summing(action: PipelineAction) -> float:
        return adding[action.stage][action != firsts[action.stage]] if action.kind in ("B", "W") else 0.0

    def seconds(action: PipelineAction) -> float:
        return taken(runs[schedule.rank_of[action.stage]].during[action]) + summing(action)

    def before(action: PipelineAction) -> float:
        return taken(runs[schedule.rank_of[action.stage]].before.get(action, ()))

    def end(ends: Sequence[float]) -> float:
        return max(each + taken(run.after) for each, run in zip(ends, runs, strict=True))

    def message(action: PipelineAction) -> float:
        return costs_of[shown].message(passed[action.stage], near)

    without, whole = end(schedule.ends(seconds, before=before)), end(schedule.ends(seconds, message, before))
    optimizer = max(_of_trained(rank, costs.optimizer) for rank, costs in zip(job.ranks, costs_of, strict=True))
    time = sum((parts[key] for key in runs[shown].everything()), Estimate(0.0, {}, {}))
    received = [a for a in schedule.actions[shown] if a.kind.startswith("RECV")]
    added = whole - without
    if received:
        time += Estimate(added, {PP: sum(map(message, received))}, {PP: added})
    sums = sum(map(summing, runs[shown].during))
    bubble = without - (time.seconds - added) - sums
    return _step_time(time, whole + optimizer, optimizer, sums, bubble)


def _estimate(gm: GraphModule, costs: Costs, known: list[tuple[Costs, Estimate]]) -> Estimate:
    """Return the estimate of a graph, reused if it is known for the same costs."""
    found = next((each for of, each in known if of == costs), None)
    if found is None:
        known.append((costs, found := estimate(gm, costs)))
    return found


def _links_along_pp(job: BuiltJob) -> list[Link]:
    return [link for link in job.ranks[0].links.values() if PP in link.axis.split("/")]


Key = tuple[int, str]  # a stage, and the name of one of its parts


class _Runs(NamedTuple):
    """The parts that a place along pp runs: during its computing actions, before them, and after all."""

    during: Mapping[PipelineAction, list[Key]]
    before: Mapping[PipelineAction, list[Key]]
    after: list[Key]

    def everything(self) -> list[Key]:
        """Return all these parts."""
        return [key for keys in (*self.during.values(), *self.before.values(), self.after) for key in keys]


def _runs(schedule: Schedule, place: int, names: Mapping[int, list[str]]) -> _Runs:
    """Return the parts that a place along pp runs: the weights of all its stages are gathered before the first action,
    and a stage's gradients reduced when its last one's message is sent, before the next."""
    actions = [action for action in schedule.actions[place] if action.kind in COMPUTING]
    during: dict[PipelineAction, list[Key]] = {}
    together, stages = {*schedule.pairs.values()}, schedule.stages_of(place)
    for action in actions:
        if action in schedule.pairs or action in together:
            pair = schedule.pairs.get(action)
            during[action] = [(action.stage, beside(stages.index(pair.stage)))] if pair else []
            continue
        backward = [name for name in names[action.stage] if name not in ("forward", *ONCE_A_STEP)]
        which = {"F": ["forward"], "B": backward, "I": backward[:1], "W": backward[1:]}[action.kind]
        during[action] = [(action.stage, name) for name in which]
    before: dict[PipelineAction, list[Key]] = {actions[0]: [(stage, "gather") for stage in schedule.stages_of(place)]}
    after: list[Key] = []
    last = {action.stage: number for number, action in enumerate(actions) if action.kind in ("B", "W")}
    for stage, number in last.items():
        late = before.setdefault(actions[number + 1], []) if number + 1 < len(actions) else after
        late.append((stage, "reduce"))
    return _Runs(during, before, after)
