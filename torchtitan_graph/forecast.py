"""The forecast of one rank, computed from its graphs before anything is allocated: the report of a dry run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from torchtitan_graph import device as devices
from torchtitan_graph.analysis.cost import Clock, Costs, Estimate, Link, estimate
from torchtitan_graph.analysis.liveness import Peak, at_node, host_memory, input_memory, owners, peak_memory, size_of
from torchtitan_graph.analysis.traffic import Traffic, traffic
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.config import job
from torchtitan_graph.device import GIB
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import outputs_of
from torchtitan_graph.log import logger
from torchtitan_graph.ops.operator import ALL_REDUCE
from torchtitan_graph.parallel import recompute
from torchtitan_graph.parallel.layout import PP
from torchtitan_graph.parallel.pipeline import FIRST, LAST, StageGraph
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.passes.compile_regions import WHOLE
from torchtitan_graph.runtime.gradients import find_made
from torchtitan_graph.runtime.partition import ONCE_A_STEP
from torchtitan_graph.steps import Assembly, Graphs, StepOptions
from torchtitan_graph.steps.budget import EARLIER, INPUTS, OPTIMIZER, at_rest, trained_bytes
from torchtitan_graph.steps.held import RUNS, peak_of_accumulation, peak_of_stages, runs_of
from torchtitan_graph.torch_private.pipelines import PipelineAction

BESIDE = "weights, while their average is in their place"
STEP, GRADIENTS, OFFLOADED = "step at its peak", "gradients", "offloaded activations"


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Memory, communication and time of a rank's training step.

    held        bytes by purpose; with the optimizer's unless it is a user's class
    rest        those of them held from step to step, and between the microbatches of a training step
    on_host     the same in the host's memory, at most
    where       the node at a step's peak memory; evaluation's, where its peak is higher than training's
    at_peak     bytes at that peak by purpose, in all `held[STEP]`
    sent        collectives of a microbatch by (axis, kind)
    sent_once   those once a step: of weights, of gradients, in a pipeline messages between stages, and with replica
                groups the sum over them
    time        an estimate of a microbatch, and of its communication
    time_once   that of the parts that run once a step, without messages
    operations  of a microbatch of rows of one document
    is_whole    whether Inductor compiles the whole step: it then plans the memory
    """

    held: dict[str, int]
    rest: dict[str, int]
    on_host: dict[str, int]
    where: str
    at_peak: dict[str, int]
    sent: dict[tuple[str, str], Traffic]
    sent_once: dict[tuple[str, str], Traffic]
    time: Estimate
    time_once: Estimate
    device: str
    operations: float
    optimizer: str
    is_whole: bool

    @property
    def in_all(self) -> int:
        return sum(self.held.values())

    @property
    def unknown(self) -> str:
        """Text on memory that is not known: an optimizer's own state, and what Inductor holds longer than the graph."""
        keeps = "" if OPTIMIZER in self.held | self.on_host else f", and what {self.optimizer} keeps"
        longer = ", and what Inductor's code of the whole step holds longer (measured: 20 to 50 % of the step)"
        return keeps + longer * self.is_whole

    def lines(self) -> list[str]:
        """Return the forecast as lines."""
        return [
            *(f"  {name:34}{size / GIB:10.3f} GiB" for name, size in self.held.items()),
            f"  {'in all':34}{self.in_all / GIB:10.3f} GiB{self.unknown}",
            f"  most is held in {self.where}; new gradients count, what operators need only while they run does not",
            *(f"  {name:34}{size / GIB:10.3f} GiB, in the host's memory" for name, size in self.on_host.items()),
            *_received(self.sent, "a microbatch"),
            *_received(self.sent_once, "a step"),
            *_exposed(self.time, "a microbatch", self.device),
            *_exposed(self.time_once, "a step, once", self.device),
            f"  {self.operations / 1e12:.3f} TFLOP a microbatch of rows of one document",
        ]


def check_fits(own: Forecast, with_policy: Callable[[Recompute], Forecast]) -> None:
    """Check on all ranks that each has enough memory, before anything is allocated.

    Args:
        with_policy: returns this rank's forecast with another recomputation policy.

    Raises:
        UserError: one has not; names the policies that would fit, and what they need.
    """
    memory = devices.memory_of_rank_gib()
    needs, fills = _largest(own, memory)
    if fills <= 1:
        return
    logger.info("the step does not fit into the memory: building it with other policies, to say which would")
    others = {str(each): _largest(with_policy(each.recompute), memory) for each in recompute.POLICIES}
    fitting = [f"activation_checkpoint.{name}: {gib:.4g} GiB" for name, (gib, part) in others.items() if part <= 1]
    least = min(others, key=lambda name: others[name][0])
    raise UserError(
        f"a rank needs {needs:.4g} GiB, and has {memory:.4g}: "
        + (
            f"these would fit: {'; '.join(fitting)}"
            if fitting
            else f"the least, activation_checkpoint.{least}, is {others[least][0]:.4g} GiB, most of it held in"
            f" {own.where}; take a smaller local_batch_size or seq_len, in training or in validation, more processes,"
            " or a higher parallelism.tensor_parallel_degree"
        )
    )


def _largest(own: Forecast, memory_gib: float) -> tuple[float, float]:
    """Return the largest need of any rank, in GiB, and the largest share of its memory that any rank needs."""
    gib = own.in_all / GIB
    found = torch.tensor([gib, gib / memory_gib], dtype=torch.float64, device=devices.device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    needs, fills = found.tolist()
    return needs, fills


def _received(sent: Mapping[tuple[str, str], Traffic], span: str) -> list[str]:
    by_axis: dict[str, list[str]] = {}
    for (axis, kind), (number, num_bytes) in sent.items():
        by_axis.setdefault(axis, []).append(f"{kind} {num_bytes / GIB:.3f} GiB in {number}")
    return [f"  received over {axis} in {span}: {', '.join(kinds)}" for axis, kinds in by_axis.items()]


def _exposed(time: Estimate, span: str, device: str) -> list[str]:
    return [f"  communication in {span}: {time}; an estimate, by the rates of {device}"] if time.sent else []


def forecast(assembly: Assembly, graphs: Graphs, optimizer: job.Optimizer, stage_rank: int | None = None) -> Forecast:
    """Return the forecast of this rank's training step, from its graphs.

    Args:
        stage_rank: the rank along pp that has these graphs, if it is not this one.
    """
    model, layout, options = assembly.model, assembly.layout, assembly.options
    stage_rank = layout.rank(PP) if stage_rank is None else stage_rank
    rest = partial(
        at_rest,
        graphs.storages,
        model,
        optimizer,
        accumulates=options.num_microbatches > 1 and isinstance(graphs.train, TracedResult),
    )
    at_all_times, on_host = rest(), rest(on_host=True)
    held = dict(at_all_times)
    if on_host:
        on_host[GRADIENTS] = trained_bytes(graphs.storages.values())  # all are there, or none
    axes, visible = layout.axes_by_group, assembly.visible_in_one_document(options.rows[1])
    costs = dataclasses.replace(assembly.costs, visible=visible)
    time = time_once = Estimate(0.0, {}, {})
    sent: dict[tuple[str, str], Traffic] = {}
    sent_once: dict[tuple[str, str], Traffic] = {}
    if isinstance(graphs.train, dict):
        assert options.pipeline is not None
        peak = peak_of_stages(graphs.train, options.pipeline, stage_rank)
        held[STEP], where, by = peak.num_bytes, peak.where, dict(peak.by)
        if peak.part is not None:
            stage_number, name, node = peak.part
            del by[RUNS]
            by = _sum(by, at_node(graphs.train[stage_number].all_parts[name].gm, node))
        offloaded = _offloaded_of_stages(graphs.train, options.pipeline.actions[stage_rank])
        for stage in graphs.train.values():
            for name, part in stage.parts.by_name.items():
                if name in ONCE_A_STEP:
                    time_once += estimate(part.gm, costs)
                else:
                    time += estimate(part.gm, costs)
                _add(sent_once if name in ONCE_A_STEP else sent, traffic(part.gm, axes))
        _add(sent_once, _messages(graphs.train, options.pipeline.actions[stage_rank]))
    elif isinstance(graphs.train, StageGraph):
        whole = graphs.train
        peak = peak_of_accumulation(whole, options.num_microbatches)
        assert peak.part is not None
        _, name, node = peak.part
        rest_of_peak = {what: size for what, size in peak.by.items() if what != RUNS}
        held[STEP], by = peak.num_bytes, _sum(rest_of_peak, at_node(whole.all_parts[name].gm, node))
        where = f"{name}, {meta.phase(node)} {meta.module(node)} {node.name}"
        offloaded = host_memory(whole.train.gm) * (1 + whole.in_pairs)
        for name, part in whole.parts.by_name.items():
            _add(sent_once if name in ONCE_A_STEP else sent, traffic(part.gm, axes))
        for name, times in runs_of(whole, options.num_microbatches):
            estimated = estimate(whole.all_parts[name].gm, costs) * times
            if name in (FIRST, LAST):
                time_once += estimated
            else:
                time += estimated * (1 / (options.num_microbatches - 1))
        time_once = time_once.beyond(time)
    else:
        held[INPUTS] = input_memory(graphs.train.gm)
        most = peak_memory(graphs.train.gm)
        held[STEP], where, by = most.num_bytes, _shown(most), at_node(graphs.train.gm, most.node)
        offloaded = host_memory(graphs.train.gm)
        sent = traffic(graphs.train.gm, axes)
        time = estimate(graphs.train.gm, costs)
    beside = trained_bytes(graphs.storages.values()) if optimizer.ema_decay is not None else 0
    for gm, inputs in _evaluations(graphs):
        most = peak_memory(gm)
        if inputs + beside + most.num_bytes > sum(held.get(each, 0) for each in (STEP, INPUTS, EARLIER)):
            held = {name: size for name, size in held.items() if name != EARLIER}
            held |= {INPUTS: inputs, STEP: beside + most.num_bytes}
            where, by = f"evaluation, {_shown(most)}", at_node(gm, most.node)
            if beside:
                by[BESIDE] = beside
    if options.num_replicas > 1:
        link = layout.dims.link_of_replicas(options.num_replicas, options.target.rates.num_near)
        messages = gradient_messages(graphs)
        received = sum(ALL_REDUCE.received(size, link.degree) for size in messages)
        sent_once[link.axis, "all_reduce"] = Traffic(len(messages), received)
        seconds, waits = seconds_over_replicas(messages, costs, link), wait_for_replicas(graphs, options, costs, link)
        time_once += Estimate(waits, {link.axis: seconds}, {link.axis: waits})
    if offloaded:
        on_host[OFFLOADED] = offloaded
    operations = graphs.flops.of(visible)
    return Forecast(
        held, at_all_times, on_host, where, by, sent, sent_once, time, time_once, costs.rates.name, operations,
        optimizer.name, WHOLE in options.regions,
    )  # fmt: skip


def gradient_messages(graphs: Graphs) -> list[int]:
    """Return the bytes of each message in which a rank's gradients are summed over the replica groups: gradients that
    share memory are one. See Note [Replicas]."""
    sizes: dict[Node, int] = {}
    train = graphs.train
    for step in train.values() if isinstance(train, dict) else [train]:
        gm = step.gm if isinstance(step, TracedResult) else step.train.gm
        owner = owners(gm)
        memories = [owner[node] for slot, node in outputs_of(gm) if slot.kind == "grad" and node is not None]
        sizes |= {memory: size_of(memory) for memory in memories}
    return list(sizes.values())


def seconds_over_replicas(messages: Iterable[int], costs: Costs, link: Link) -> float:
    """Return the seconds of the sum of gradients over the replica groups, message by message."""
    return sum(costs.all_reduce(size, link) for size in messages)


def wait_for_replicas(graphs: Graphs, options: StepOptions, costs: Costs, link: Link) -> float:
    """Return the seconds that a step takes longer for the sum of gradients over the replica groups: all of it, but
    where they come from one graph, which still runs for the last microbatch when the sums begin."""
    late = seconds_over_replicas(gradient_messages(graphs), costs, link)
    if options.recorders is not None or not isinstance(graphs.train, TracedResult):
        return late
    clock, gm, done = Clock(costs), graphs.train.gm, 0.0
    gradients = [place for place, (slot, _) in enumerate(outputs_of(gm)) if slot.kind == "grad"]
    made: dict[Node, list[Node]] = {}
    for last, memory in find_made(gm.graph, gradients):
        made.setdefault(last, []).append(memory)
    for node in gm.graph.nodes:
        clock.advance(node)
        for memory in made.get(node, ()):
            taken = costs.all_reduce(size_of(memory), link)
            done, late = max(done, clock.now) + taken, late - taken
    return max(done, clock.now) + late - clock.now


def _add(sent: dict[tuple[str, str], Traffic], more: Mapping[tuple[str, str], Traffic]) -> None:
    for key, (number, num_bytes) in more.items():
        before = sent.get(key, Traffic(0, 0))
        sent[key] = Traffic(before.number + number, before.num_bytes + num_bytes)


def _sum(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in a | b if a.get(key, 0) + b.get(key, 0)}


def _messages(graphs: Mapping[int, StageGraph], actions: Iterable[PipelineAction]) -> dict[tuple[str, str], Traffic]:
    """Return the messages that a rank receives from other stages in a step."""
    received = [graphs[a.stage].passed.nbytes for a in actions if a.kind.startswith("RECV")]
    return {(PP, "message"): Traffic(len(received), sum(received))} if received else {}


def _evaluations(graphs: Graphs) -> Iterator[tuple[GraphModule, int]]:
    """Yield the graphs of evaluation, in a pipeline one for each stage, with the bytes of their inputs."""
    if graphs.evaluate is not None:
        yield graphs.evaluate.gm, input_memory(graphs.evaluate.gm)
    for number, stage in graphs.train.items() if isinstance(graphs.train, dict) else ():
        if stage.evaluate is not None and stage.eval_passed is not None:
            received = stage.eval_passed.nbytes if number else 0
            yield stage.evaluate.gm, input_memory(stage.evaluate.gm) + received


def _shown(peak: Peak) -> str:
    return " ".join(filter(None, [meta.phase(peak.node), meta.module(peak.node), peak.node.name]))


def _offloaded_of_stages(graphs: Mapping[int, StageGraph], actions: Iterable[PipelineAction]) -> int:
    """Return the most bytes in the host's memory of the microbatches between forward and backward."""
    sizes = {number: host_memory(graph.train.gm) for number, graph in graphs.items()}
    held = most = 0
    for action in actions:
        if action.kind in ("F", "B", "W"):
            held += sizes[action.stage] if action.kind == "F" else -sizes[action.stage]
            most = max(most, held)
    return most
