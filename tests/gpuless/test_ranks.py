"""Four ranks under torch's own NCCL group, each a process with a null GPU: what they send in a step meets, and a graph
sends what eager does."""

import collections
import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import null_gpu
import pytest
import torch
import torch.distributed as dist
from null_gpu import Message
from ranks import members, run_on, that_do_not_meet
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.fx import GraphModule

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, Cell
from torchtitan_graph.device import CudaRecorder, Recorders
from torchtitan_graph.graph.collectives import made_from_inputs
from torchtitan_graph.models.layers.moe import MoE
from torchtitan_graph.parallel.dispatch import Exchange
from torchtitan_graph.parallel.layout import EP, ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.schedule import SCHEDULES
from torchtitan_graph.runtime import pieces
from torchtitan_graph.steps import Steps, bind_graphs, build_graphs

QWEN: dict[str, Any] = {
    "family": "qwen3",
    "flavor": "debugmodel_moe",
    "changes": (("num_layers", 2), ("num_experts", 8)),
}
DEEPSEEK: dict[str, Any] = {"family": "deepseek_v3", "changes": (("num_layers", 2),)}
LAYOUTS = {
    "FSDP": Cell(ParallelDims(dp_shard=4), BF16),
    "HSDP": Cell(ParallelDims(dp_replicate=2, dp_shard=2), BF16),
    "FSDP x TP": Cell(ParallelDims(dp_shard=2, tp=2), BF16),
    "FSDP x CP": Cell(ParallelDims(dp_shard=2, cp=2), BF16),
    "EP": Cell(ParallelDims(dp_shard=4, ep=4), BF16, **QWEN),
    "FSDP x EP": Cell(ParallelDims(dp_shard=4, ep=2), BF16, **DEEPSEEK),
    "TP x EP": Cell(ParallelDims(dp_shard=2, tp=2, ep=4), BF16, **QWEN),
}
# Of each schedule the ranks have the first, two middle and the last of four stages, or two of eight.
PIPELINES = {
    schedule: Cell(
        ParallelDims(pp=4),
        BF16,
        num_microbatches=8,
        changes=(("num_layers", 8),),
        pipeline=(("pipeline_parallel_schedule", schedule),),
    )
    for schedule in SCHEDULES
}
TWO_STAGES: dict[str, Any] = {"num_microbatches": 4, "pipeline": (("pipeline_parallel_schedule", "1F1B"),)}
PIPELINES |= {
    "PP x FSDP": Cell(ParallelDims(pp=2, dp_shard=2), BF16, changes=(("num_layers", 4),), **TWO_STAGES),
    "PP x TP": Cell(ParallelDims(pp=2, tp=2), BF16, changes=(("num_layers", 4),), **TWO_STAGES),
    "PP x EP": Cell(ParallelDims(pp=2, dp_shard=2, ep=2), BF16, **QWEN, **TWO_STAGES),
}
IN_PAIRS: dict[str, Any] = {
    "num_microbatches": 8,
    "pipeline": (("pipeline_parallel_schedule", "DualPipeV"), ("overlap_microbatches", True)),
}
DEEP = {**QWEN, "changes": (("num_layers", 4), ("num_experts", 8))}
FULL = {"recompute": Recompute(every=1)}
TWO_MACHINES = ParallelDims(dp_shard=4, ep=4, ep_near=2)
# Orders by the cost model's clock, which all ranks must choose alike.
ORDERS = {
    "recomputed ahead": Cell(ParallelDims(dp_shard=4, ep=4), BF16, **DEEP, **FULL),
    "once a step": Cell(ParallelDims(dp_shard=4, ep=2), BF16, num_microbatches=2, once="all", **DEEP),
    "in pairs": Cell(ParallelDims(dp_shard=4, ep=4), BF16, num_microbatches=2, pairs=True, **DEEP, **FULL),
    "in pairs once a step": Cell(
        ParallelDims(dp_shard=4, ep=2), BF16, num_microbatches=2, pairs=True, once="all", **DEEP
    ),
    "a pipeline's pairs": Cell(ParallelDims(pp=4), BF16, changes=(("num_layers", 8),), **IN_PAIRS),
    "a pipeline's pairs of experts": Cell(
        ParallelDims(pp=2, dp_shard=2, ep=2), BF16, **{**IN_PAIRS, "num_microbatches": 4}, **DEEP, **FULL
    ),
    "by machine": Cell(TWO_MACHINES, BF16, **DEEP, **FULL),
    "by machine, sums and float8": Cell(TWO_MACHINES, BF16, exchange=Exchange(False, True), **DEEP),
    "by machine in pairs": Cell(TWO_MACHINES, BF16, num_microbatches=2, pairs=True, **DEEP, **FULL),
}

Edit = Callable[[GraphModule], GraphModule]
Taken = tuple[list[Message], null_gpu.Counts]


def taken(cell: Cell, build: Callable[[Cell], Steps]) -> Taken:
    """Give what this rank sends in a second step, in order, and what else it does: all groups are joined by then."""
    steps, data = build(cell), matrix.microbatches(cell, matrix.layout_of(cell.dims).data_rank, 1)
    with rows_for_all(cell):
        for _ in range(2):
            for parameter in steps.model.parameters():
                parameter.grad = None
            null_gpu.take(), null_gpu.take_sent()
            steps.train(*data)
    return null_gpu.take_sent(), null_gpu.take()


def in_both_ways(cell: Cell) -> tuple[Taken, Taken]:
    return taken(cell, matrix.build_eager), taken(cell, matrix.build_graph)


def as_graph(cell: Cell, edit: Edit | None = None) -> Taken:
    return taken(cell, partial(matrix.build_graph, edit=edit))


@contextlib.contextmanager
def rows_for_all(cell: Cell) -> Iterator[None]:
    """Let every rank send some rows to each other's experts: no router counts them where no kernel runs."""
    layout, degree = matrix.layout_of(cell.dims), cell.dims.ep
    if degree == 1:
        yield
        return
    moe = next(module for module in matrix.build_model(cell).modules() if isinstance(module, MoE))
    num_tokens = matrix.NUM_ROWS * matrix.SEQ_LEN // cell.num_microbatches // layout.num_routing_parts
    num_rows, me = num_tokens * moe.config.top_k, layout.rank(EP)

    def sent_by(rank: int) -> list[int]:
        others = [num_rows * (1 + (rank + to) % degree) // (2 * degree**2) for to in range(1, degree)]
        return [num_rows - sum(others), *others]

    splits_2R = torch.tensor([sent_by(me), [sent_by(rank)[me] for rank in range(degree)]])
    splits_2K = torch.full((2, 2), num_tokens // 4)  # of a hop between two machines, or in one

    def row_splits(sent_RE: Tensor, received_RE: Tensor) -> Tensor:
        counted: Tensor = OPDEFS["torchtitan_graph::row_splits"]._init_fn(sent_RE, received_RE)
        return counted.copy_(splits_2R if counted.shape == splits_2R.shape else splits_2K)

    with torch.library._scoped_library("torchtitan_graph", "IMPL") as library:
        library.impl("row_splits", row_splits, "CUDA", allow_override=True)
        yield


def by_group(messages: Sequence[Message]) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """Give what is sent in each group, by kind and in order: dtype, number, peer. What NCCL takes together has no
    order."""
    found: dict[tuple[str, str], list[tuple[str, int, int]]] = collections.defaultdict(list)
    for _, batch in itertools.groupby(messages, key=lambda message: message.batch):
        for m in sorted(batch, key=lambda m: m.peer):
            found[m.group, m.kind].append((m.dtype, m.number, m.peer))
    return found


def that_differs(eager: Sequence[Message], graph: Sequence[Message]) -> list[str]:
    """Name the groups, and what in them, where a graph sends other messages than eager, or in another order.

    Three things may differ. A gather comes earlier beside messages of other kinds, for it is prefetched by estimates,
    not by FSDP2's hooks. For backward the graph gathers again only the weights that are read there: of a block with a
    router that multiplies in fp32, a few less. And sums of norms' gradients over TP have no order of their own.
    """
    one, other = by_group(eager), by_group(graph)
    found = []
    for group, kind in one | other:
        ours, theirs = other[group, kind], one[group, kind]
        if kind == "all_reduce":
            ours, theirs = sorted(ours), sorted(theirs)
        if kind == "all_gather" and len(ours) == len(theirs):
            theirs = [min(pair) if pair[0][0] == pair[1][0] else pair[1] for pair in zip(ours, theirs, strict=True)]
        if ours != theirs:
            found.append(f"{kind} in {group}")
    return found


def tell(by_rank: Sequence[Sequence[Message]]) -> None:
    """Say what the first rank sends, and to whom."""
    groups, num_bytes = members(by_rank), Counter[tuple[str, str, str]]()
    for m in by_rank[0]:
        ranks = ", ".join(map(str, sorted(groups[m.group].values())))
        num_bytes[ranks, m.kind, m.dtype] += m.number * getattr(torch, m.dtype).itemsize
    for (ranks, kind, dtype), number in sorted(num_bytes.items()):
        null_gpu.tell(f"among ranks {ranks}: {kind} of {dtype}, {number:,} bytes")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_sends_what_eager_does(layout: str) -> None:
    cell = LAYOUTS[layout]
    ranks = run_on(4, in_both_ways, cell)
    eager, graph = ([sent for sent, _ in way] for way in zip(*ranks, strict=True))
    tell(graph)
    for way in (eager, graph):
        assert way[0] and that_do_not_meet(way) == []
    for one, other in zip(eager, graph, strict=True):
        assert that_differs(one, other) == []


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(every=1)], ids=["", "recomputed"])
@pytest.mark.parametrize("layout", [name for name, cell in LAYOUTS.items() if cell.dims.ep > 1])
def test_the_host_waits_for_rows_once_a_layer(layout: str, recompute: Recompute) -> None:
    """In forward: backward sends as many rows back, and what is computed again knows them."""
    cell = dataclasses.replace(LAYOUTS[layout], recompute=recompute)
    num_layers = sum(isinstance(module, MoE) for module in matrix.build_model(cell).modules())
    for _, counts in run_on(4, as_graph, cell):
        assert sum(number for what, number in counts.items() if what.startswith("wait ")) == num_layers
        assert not counts["copy to the host, not pinned"]


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_send_what_the_others_wait_for(name: str) -> None:
    """First, middle and last ones; each message is as large as a microbatch's activations."""
    cell = PIPELINES[name]
    sent = [messages for messages, _ in run_on(4, as_graph, cell)]
    tell(sent)
    assert that_do_not_meet(sent) == []
    schedule = cell.schedule()
    assert schedule is not None
    rows = matrix.NUM_ROWS // cell.num_parts, matrix.SEQ_LEN // cell.dims.tp
    size = rows[0] * rows[1] * matrix.build_model(cell).config.dim
    for rank, messages in enumerate(sent):
        actions = schedule.actions[rank * cell.dims.pp // 4]
        passed = [m for m in messages if m.size == 2 and m.kind in ("send", "receive") and m.number == size]
        assert [m.kind for m in passed] == [
            {"SEND": "send", "RECV": "receive"}[kind[:4]] for kind, *_ in actions if "_" in kind
        ]


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_by_the_clock_is_the_same_on_all_ranks(name: str) -> None:
    sent = [messages for messages, _ in run_on(4, as_graph, ORDERS[name])]
    tell(sent)
    assert all(sent) and that_do_not_meet(sent) == []


# --- the checks can fail ----------------------------------------------------------------------------------------------


def _reduce(gm: GraphModule) -> torch.fx.Node:
    target = torch.ops._c10d_functional.reduce_scatter_tensor.default
    return gm.graph.find_nodes(op="call_function", target=target)[0]


def again(gm: GraphModule) -> GraphModule:
    node = _reduce(gm)
    with gm.graph.inserting_after(node):
        gm.graph.node_copy(node)
    gm.recompile()
    return gm


def later_on_one_rank(gm: GraphModule) -> GraphModule:
    """Exchange the first two gathers of rank 1."""
    if dist.get_rank() == 1:
        target = torch.ops._c10d_functional.all_gather_into_tensor.default
        first, second = gm.graph.find_nodes(op="call_function", target=target)[:2]
        for node in made_from_inputs(second):
            first.prepend(node)
        gm.recompile()
    return gm


def right_and_wrong(edit: Edit) -> tuple[list[list[Message]], list[list[Message]]]:
    """Give what all ranks send as it is, and after an edit: in one run, for groups have other names in another."""
    ranks = run_on(4, without_and_with, LAYOUTS["FSDP"], edit)
    return [right for right, _ in ranks], [wrong for _, wrong in ranks]


def without_and_with(cell: Cell, edit: Edit) -> tuple[list[Message], list[Message]]:
    return as_graph(cell)[0], as_graph(cell, edit)[0]


def test_a_reduction_sent_twice_is_found() -> None:
    for right, wrong in zip(*right_and_wrong(again), strict=True):
        assert len(that_differs(right, wrong)) == 1


def test_another_order_on_one_rank_is_found() -> None:
    right, wrong = right_and_wrong(later_on_one_rank)
    assert that_do_not_meet(right) == []
    pairs = [told.split(":")[0] for told in that_do_not_meet(wrong)]
    assert pairs == ["ranks 0 and 1", "ranks 1 and 2", "ranks 1 and 3"]
    assert [bool(that_differs(*ways)) for ways in zip(right, wrong, strict=True)] == [False, True, False, False]


# --- as CUDA graphs ---------------------------------------------------------------------------------------------------


def recorded(cell: Cell) -> list[tuple[int, null_gpu.Counts]]:
    """Give how many messages each of three steps starts, and what else it does: as it is, recorded, replayed."""
    options = dataclasses.replace(cell.options("graph"), recorders=Recorders(CudaRecorder))
    assembly = matrix.assemble(cell, options)
    model, layout = assembly.model, assembly.layout
    steps, data = bind_graphs(build_graphs(assembly), assembly), matrix.microbatches(cell, layout.data_rank, 1)
    found = []
    with rows_for_all(cell):
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            null_gpu.take(), null_gpu.take_sent()
            steps.train(*data)
            found.append((len(null_gpu.take_sent()), null_gpu.take()))
    steps.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_recorded_in_cuda_graphs(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but experts' exchanges, whose rows the host reads: these run between the pieces in each step."""
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING")  # a recorder's pool is the caching allocator's
    for (first, _), (second, captured), (third, replayed) in run_on(4, recorded, LAYOUTS[layout]):
        assert first == second > 0 and bool(third) == (LAYOUTS[layout].dims.ep > 1)
        assert captured["capture"] == replayed["replay"] > 0
        assert not [what for what in captured + replayed if what.startswith(("refused", "not captured"))]


def recorded_with_rows(cell: Cell) -> list[tuple[int, null_gpu.Counts]]:
    """Record what depends on rows of which the host reads the number, too."""
    pieces._unrecorded = lambda calls: set()  # type: ignore[assignment]
    return recorded(cell)


def test_rows_that_the_host_reads_in_a_capture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING")
    with pytest.raises(AssertionError, match="captur"):
        run_on(4, recorded_with_rows, LAYOUTS["EP"])
