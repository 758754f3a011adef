"""Roofline of a step: the bytes and FLOPs of its operators, each a kernel of its own, and fused.

Note [Roofline]
The graph is the job's own, all passes but `compile_regions` done, and its kernels are priced by analysis/cost.py, as a
forecast is. Unfused, each operator reads its inputs and writes its outputs. Fused, all operators between two products,
or attention's kernels, are one kernel, which moves only its inputs and outputs; its bytes and time are divided among
its operators by their unfused bytes. Each of the two is timed twice: at the peaks of the device, where launches and
hops take no time; and realistically, with the shares and the seconds of its file, of which `fusion_share` says how much
of ideal fusion a compiler reaches.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cost import (
    ATTENTION,
    LAUNCH,
    MEMORY,
    OTHER,
    PRODUCT,
    Clock,
    Costs,
    Kernel,
    Work,
    fused_kernels,
    sum_bytes,
    touched,
    update_bytes,
    works_of,
)
from torchtitan_graph.analysis.liveness import owners, readers_of_memory
from torchtitan_graph.analysis.scopes import operations_of
from torchtitan_graph.analysis.traffic import received
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.config import JobConfig, dump_toml
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import loss_of
from torchtitan_graph.ops.operator import num_bytes
from torchtitan_graph.plan.ranks import BuiltJob, Rank, build
from torchtitan_graph.plan.simulate import by_rates
from torchtitan_graph.rates import Rates
from torchtitan_graph.steps.budget import trained_bytes

LOSS, NORMS, POINTWISE, COPIES = "loss", "norms", "pointwise and others", "copies and casts"
COMMUNICATION, OPTIMIZER = "communication", "optimizer"
CLASSES = (PRODUCT, ATTENTION, LOSS, NORMS, POINTWISE, COPIES, COMMUNICATION, OPTIMIZER)
UNFUSED, FUSED, REALISTIC, UNCOMPILED = "unfused", "fused", "realistic", "realistic, unfused"
OUTSIDE = "outside modules"
_KNOWN = ("Adam", "AdamW")  # optimizers whose traffic is known
_NOTHING = 1e-12  # seconds below which a difference is rounding

aten = torch.ops.aten
# Operators that only move numbers, to another place or dtype.
_COPIES = (
    aten._to_copy.default,
    aten.clone.default,
    aten.copy.default,
    aten.copy_.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.contiguous.default,
    aten.repeat.default,
)


@dataclass
class OperatorCost:
    """The cost of some operators of a step.

    flops     the model's, by the convention of analysis/flops.py: recomputation does not count
    moved     bytes read and written
    received  bytes that come from other ranks, or over PCIe
    seconds   by bound: COMPUTE, MEMORY, LAUNCH or COMMUNICATION
    """

    flops: float = 0.0
    moved: float = 0.0
    received: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def time(self) -> float:
        return sum(self.seconds.values())

    def add(self, other: OperatorCost, times: float = 1.0) -> None:
        """Add another cost, `times` times."""
        self.flops += other.flops * times
        self.moved += other.moved * times
        self.received += other.received * times
        for what, seconds in other.seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + seconds * times


Costed = dict[tuple[str, str], OperatorCost]  # by module, with layers under one name, and class


@dataclass(frozen=True)
class Roofline:
    """A step of one rank, by UNFUSED, FUSED, REALISTIC and UNCOMPILED: the cost of each module's operators, by class;
    the last equals a forecast of the job, none of which is compiled."""

    job: BuiltJob
    rates: Rates
    steps: Mapping[str, Costed]
    flops: float

    def seconds(self, how: str) -> float:
        return sum(cost.time for cost in self.steps[how].values())

    def mfu(self, how: str) -> float:
        """Return the model FLOPs over the device's bf16 peak in that time, 0 to 1."""
        return self.flops / (self.seconds(how) * self.rates.half)

    def by_class(self, how: str) -> dict[str, OperatorCost]:
        """Return the sums over the modules, in the order of CLASSES."""
        return {each: _sum(c for (_, kind), c in self.steps[how].items() if kind == each) for each in CLASSES}

    def by_module(self, how: str) -> dict[str, OperatorCost]:
        """Return the sums over the classes, in the order of the graph."""
        names = dict.fromkeys(module for module, _ in self.steps[how])
        return {name: _sum(c for (module, _), c in self.steps[how].items() if module == name) for name in names}


def _sum(costs: Iterable[OperatorCost]) -> OperatorCost:
    found = OperatorCost()
    for cost in costs:
        found.add(cost)
    return found


def roofline(config: JobConfig, world_size: int, rates: Rates) -> Roofline:
    """Build a job's step on devices of a kind, and compute its cost. See Note [Roofline].

    Raises:
        UserError: the job has a pipeline, an optimizer whose bytes are not known, or as `build`.
    """
    if (degree := config.parallelism.pipeline_parallel_degree) > 1:
        raise UserError(
            f"parallelism.pipeline_parallel_degree = {degree}: a roofline is of a step that one rank computes alone; "
            "leave it at 1, or let python -m torchtitan_graph.plan forecast the pipeline"
        )
    for key in ("fsdp_once_a_step", "overlap_microbatches"):
        if (value := getattr(config.parallelism, key)) not in ("none", False):
            raise UserError(
                f"parallelism.{key} = {value}: a roofline is of a microbatch that is computed alone; leave it"
                " out, or let python -m torchtitan_graph.plan forecast the step"
            )
    if config.fault_tolerance.enable:
        raise UserError(
            "fault_tolerance.enable = true: a roofline is of a job without replica groups; set it to false, or let"
            " python -m torchtitan_graph.plan forecast the step"
        )
    if (name := config.optimizer.name) not in _KNOWN:
        raise UserError(
            f"optimizer.name = {name!r}: what it reads, writes and computes is not known here; a roofline knows "
            f"{' and '.join(_KNOWN)}: add --optimizer.name AdamW"
        )
    for key in ("state_dtype", "ema_decay"):
        if (value := getattr(config.optimizer, key)) is not None:
            raise UserError(f"optimizer.{key} = {value!r}: a roofline does not know what it costs; leave it out")
    job = build(config, world_size, rates, _uncompiled)
    (rank,) = job.ranks
    assert isinstance(rank.graphs.train, TracedResult)
    peaks = rates._replace(
        product_share=1.0, fp8_share=1.0, attention_share=1.0, memory_share=1.0, network_share=1.0, fusion_share=1.0,
        message_share=0.0,
        launch=0.0, kernel=0.0, near_hop=0.0, far_hop=0.0,
    )  # fmt: skip
    gm = rank.graphs.train.gm
    costs = by_rates(job, rates)(rank)
    nodes = [node for node in gm.graph.nodes if costs.link(node) is None]
    each = [Kernel((node,), work) for node in nodes for work in works_of(node, rank.visible)]
    fused = fused_kernels(nodes, owners(gm), readers_of_memory(gm), rank.visible)
    steps = {
        how: _step(job, rank, dataclasses.replace(costs, rates=of), kernels)
        for how, of, kernels in (
            (UNFUSED, peaks, each),
            (FUSED, peaks, fused),
            (REALISTIC, costs.rates, fused),
            (UNCOMPILED, costs.rates, each),
        )
    }
    return Roofline(job, rates, steps, rank.forecast.operations * job.options.num_microbatches)


def _uncompiled(config: JobConfig, world_size: int, target: Target) -> Blueprint:
    blueprint = Blueprint(config, world_size, target)
    blueprint.options = dataclasses.replace(blueprint.options, regions={})
    return blueprint


@dataclass(frozen=True)
class _Kernels(Costs):
    """The cost model of the same device for given kernels: each runs at the place of its last node."""

    kernels: Mapping[Node, Kernel] = field(default_factory=dict)

    def works(self, node: Node) -> Sequence[Work]:
        return (self.kernels[node].work,) if node in self.kernels else ()


def _step(job: BuiltJob, rank: Rank, costs: Costs, kernels: Sequence[Kernel]) -> Costed:
    """Return the cost of a rank's step, in these kernels: its microbatches, the sums between them and the optimizer."""
    assert isinstance(rank.graphs.train, TracedResult)
    found: Costed = collections.defaultdict(OperatorCost)
    for key, cost in _microbatch(rank.graphs.train.gm, costs, {kernel.nodes[-1]: kernel for kernel in kernels}):
        found[key].add(cost, job.options.num_microbatches)
    storages, num_sums = rank.graphs.storages.values(), job.options.num_microbatches - 1
    for away in (False, True):
        trained = trained_bytes(s for s in storages if s.on_host == away)
        update = OperatorCost(moved=update_bytes(trained), seconds={MEMORY: costs.optimizer(trained, away)})
        found[OPTIMIZER, OPTIMIZER].add(update)
        if num_sums:
            added = OperatorCost(moved=sum_bytes(trained), seconds={MEMORY: costs.accumulating(trained, away)})
            found["sums of gradients", OPTIMIZER].add(added, num_sums)
    return dict(found)


def _microbatch(
    gm: GraphModule, costs: Costs, kernels: Mapping[Node, Kernel]
) -> Iterator[tuple[tuple[str, str], OperatorCost]]:
    loss, clock = loss_of(gm), Clock(_Kernels(costs.rates, costs.links, costs.visible, kernels))
    for node in gm.graph.nodes:
        before, sent = clock.now, sum(clock.sent.values())
        clock.advance(node)
        seconds, place = clock.now - before, _place(node, loss)
        if (kernel := kernels.get(node)) is not None:
            terms = costs.terms(kernel.work)
            bound = max(terms, key=terms.__getitem__)
            spent = {bound: terms[bound]}
            if (stood := seconds - terms[bound]) > _NOTHING:  # it waits for the host
                spent[LAUNCH] = spent.get(LAUNCH, 0.0) + stood
            alone, moved = [touched(part) or 1 for part in kernel.nodes], costs.moved(kernel.work)
            for part, size in zip(kernel.nodes, alone, strict=True):
                share = size / sum(alone)
                cost = OperatorCost(moved=moved * share, seconds={k: s * share for k, s in spent.items()})
                if meta.origin(part) != meta.RECOMPUTED:
                    cost.flops = operations_of(part, costs.visible)
                yield (_place(part, loss), _class(part, loss, kernel.work)), cost
        elif sum(clock.sent.values()) > sent:
            link = costs.link(node)
            size = received(node, link.degree) if link is not None else num_bytes(node.meta.get("val"))
            yield (place, COMMUNICATION), OperatorCost(received=size)
        elif seconds:
            yield (place, COMMUNICATION), OperatorCost(seconds={COMMUNICATION: seconds})


def _place(node: Node, loss: Container[Node]) -> str:
    return LOSS if node in loss else re.sub(r"\b\d+\b", "*", meta.module(node)) or OUTSIDE


def _class(node: Node, loss: Container[Node], work: Work) -> str:
    if work.kind != OTHER:
        return work.kind
    if node in loss:
        return LOSS
    if "norm" in meta.module(node).rpartition(".")[2]:
        return NORMS
    return COPIES if node.target in _COPIES else POINTWISE


# --- as text and data -------------------------------------------------------------------------------------------------

ALL = "in all"
_SHOWN = 0.0005  # share of a step: smaller modules are summed up in one line
_TITLES = {
    UNFUSED: "at the peaks, unfused",
    FUSED: "at the peaks, fused",
    UNCOMPILED: "realistic, unfused: as planned",
    REALISTIC: "realistic, fused in part",
}


def lines(found: Roofline) -> list[str]:
    """Return a roofline as lines: bytes by class, time and bounds by module, and the step."""
    job, rates = found.job, found.rates
    microbatches = f"{job.options.num_microbatches} x {job.options.rows[0]} rows of {job.options.rows[1]} tokens"
    by_class = [found.by_class(how) for how in (UNFUSED, FUSED)]
    by_module = [found.by_module(how) for how in (UNFUSED, FUSED, REALISTIC)]
    seconds = found.seconds(REALISTIC)
    shown = [name for name, cost in by_module[-1].items() if cost.time > _SHOWN * seconds]
    rows = {name: [each[name] for each in by_module] for name in shown}
    rest = [[cost for name, cost in each.items() if name not in rows] for each in by_module]
    if any(rest):
        rows["all others"] = [_sum(each) for each in rest]
    rows[ALL] = [_sum(each.values()) for each in by_module]
    return [
        f"a step of {microbatches} on {rates.name}, of one rank of {job.dims.num_ranks}; "
        f"{found.flops / 1e12:.3f} TFLOP of the model:",
        f"{'  GB moved':38}{'unfused':>10}{'fused':>10}",
        *(
            f"  {name:36}{cost.moved / 1e9:10.2f}{by_class[1][name].moved / 1e9:10.2f}"
            for name, cost in by_class[0].items()
            if cost.moved
        ),
        f"  {ALL:36}{rows[ALL][0].moved / 1e9:10.2f}{rows[ALL][1].moved / 1e9:10.2f}",
        *([f"  {'received':36}{rows[ALL][0].received / 1e9:10.2f}"] if rows[ALL][0].received else []),
        f"{'  module':38}{'unfused':>18}{'fused':>18}{'realistic':>18}",
        f"  {'':36}{'GB':>9}{'MFU':>9}{'GB':>9}{'MFU':>9}{'ms':>9}{'MFU':>9}  bound by",
        *(_row(name, costs, rates) for name, costs in rows.items()),
        f"{'  the step':38}{'ms':>10}{'MFU':>10}",
        *(f"  {title:36}{found.seconds(how) * 1e3:10.2f}{found.mfu(how):10.1%}" for how, title in _TITLES.items()),
    ]


def _row(name: str, costs: Sequence[OperatorCost], rates: Rates) -> str:
    mfus = [f"{mfu:9.1%}" if (mfu := _mfu(cost, rates)) else f"{'':9}" for cost in costs]
    unfused, fused, realistic = costs
    by_size = sorted(realistic.seconds.items(), key=lambda item: -item[1])
    bounds = ", ".join(f"{what} {s / realistic.time:.0%}" for what, s in by_size if s >= _SHOWN * realistic.time)
    return (
        f"  {name:36}{unfused.moved / 1e9:9.2f}{mfus[0]}{fused.moved / 1e9:9.2f}{mfus[1]}"
        f"{realistic.time * 1e3:9.2f}{mfus[2]}  {bounds}"
    )


def _mfu(cost: OperatorCost, rates: Rates) -> float:
    return cost.flops / (cost.time * rates.half) if cost.time else 0.0


def as_data(found: Roofline) -> dict[str, Any]:
    """Return a roofline as plain data: bytes, seconds and FLOPs."""

    def figures(cost: OperatorCost) -> dict[str, Any]:
        own = {"flops": cost.flops, "bytes": cost.moved, "received": cost.received}
        return {**own, "seconds": cost.time, "bound_by": dict(cost.seconds)}

    return {
        "config": dump_toml(found.job.config),
        "world_size": found.job.dims.num_ranks,
        "rates": found.rates._asdict(),
        "tokens_per_step": found.job.tokens_per_step,
        "flops": found.flops,
        "steps": {
            how: {
                "seconds": found.seconds(how),
                "mfu": found.mfu(how),
                "classes": {name: figures(cost) for name, cost in found.by_class(how).items()},
                "modules": {
                    name: {**figures(cost), "mfu": _mfu(cost, found.rates)}
                    for name, cost in found.by_module(how).items()
                },
            }
            for how in found.steps
        },
    }
