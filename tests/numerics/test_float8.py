"""Layers that multiply in float8: the graph, with weights quantised once a step, is eager, which quantises them in each
call, bit for bit; and what is trained is what bf16 trains, up to the format's rounding."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from matrix import (
    BF16,
    CPU,
    DDP2,
    FP32,
    FSDP2,
    FSDP2_TP2,
    HSDP,
    ONE,
    ONE_LAYER,
    SEED,
    TP2,
    Cell,
    bits_that_differ,
    build_graph,
    build_model,
    eager,
    final_graphs,
    layout_of,
    microbatches,
    trace,
    train,
)
from torch import Tensor, nn

from pool import run_on
from torchtitan_graph.compiler import Inspection, passes, run_passes
from torchtitan_graph.graph.edit import value
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.parallel.storage import Reshard
from torchtitan_graph.quantize.layers import Linear
from torchtitan_graph.quantize.products import DELAYED, E4M3, MX, MX_WIDE, ROWWISE, ROWWISE_WIDE, Recipe
from torchtitan_graph.quantize.state import Float8State
from torchtitan_graph.steps import Assembly, Steps, build_steps

c10d = torch.ops._c10d_functional


def cell_of(dims: ParallelDims, recipe: Recipe | None, **changes: object) -> Cell:
    few = {"precision": BF16, "ffn_dim": 128, "float8": recipe, "num_microbatches": 2, "num_steps": 3}
    return Cell(dims, **few | changes)


EP2 = ParallelDims(dp_shard=2, ep=2)
CURRENT, PAST, ROWS = Recipe(), Recipe(DELAYED), Recipe(ROWWISE, E4M3)
BLOCKS, BLOCKS_WIDE = Recipe(MX, E4M3, emulate=True), Recipe(MX_WIDE, E4M3, emulate=True)
QWEN3 = {"family": "qwen3", "flavor": "debugmodel_moe"}
NOW, LATER = cell_of(ONE, CURRENT, num_steps=5), cell_of(ONE, PAST, num_steps=5)
# A few recipes, policies and kinds of layers; the others, and most pairs of them, are in the slow tier.
CELLS = {
    "norms": cell_of(ONE, None, family="own_models.float8_norms", recompute=Recompute(1)),
    "mx-recompute-full-one-layer": cell_of(ONE, BLOCKS, recompute=Recompute(1), **ONE_LAYER),
    "FSDP-2-delayed-one-layer": cell_of(FSDP2, PAST, **ONE_LAYER),
}
SLOW = {
    "experts-rowwise-two-layers": cell_of(ONE, ROWS, family="deepseek_v3", changes=(("num_layers", 2),)),
    "TP-2-current-one-layer": cell_of(TP2, CURRENT, **ONE_LAYER),
    "current-e4m3-fp32-recompute-full": cell_of(ONE, Recipe(gradient=E4M3), precision=FP32, recompute=Recompute(1)),
    "delayed-recompute-op": cell_of(ONE, PAST, recompute=Recompute(by_op=True)),
    "experts-rowwise-recompute-full": cell_of(ONE, ROWS, family="deepseek_v3", recompute=Recompute(1)),
    "experts-EP-2-recompute-op": cell_of(EP2, CURRENT, num_steps=2, recompute=Recompute(by_op=True), **QWEN3),
    "mx-recompute-full": cell_of(ONE, BLOCKS, recompute=Recompute(1)),
    "FSDP-2-delayed-recompute-full": cell_of(FSDP2, PAST, recompute=Recompute(every=1)),
    "TP-2-current": cell_of(TP2, CURRENT),
    "rowwise-wide": cell_of(ONE, Recipe(ROWWISE_WIDE, E4M3), num_microbatches=1),
    "delayed-budget": cell_of(ONE, PAST, recompute=Recompute(budget=Budget(0.3))),
    "FSDP-2-mx": cell_of(FSDP2, BLOCKS),
    "experts-biased-FSDP-2": cell_of(FSDP2, CURRENT, family="gpt_oss", num_microbatches=1, num_steps=2),
    "CP-2-delayed": cell_of(ParallelDims(cp=2), PAST),
    "experts-delayed": cell_of(ONE, PAST, **QWEN3),
    "current": NOW,
    "delayed": LATER,
    "FSDP-2-current": cell_of(FSDP2, CURRENT),
    "DDP-2-delayed": cell_of(DDP2, PAST),
    "rowwise": cell_of(ONE, ROWS),
    "FSDP-2-rowwise": cell_of(FSDP2, ROWS),
    "TP-2-mx": cell_of(TP2, BLOCKS),
    "FSDP-2-stay-gathered": cell_of(FSDP2, CURRENT, reshard=Reshard(blocks=False)),
    "FSDP-2-reshard-all": cell_of(FSDP2, CURRENT, reshard=Reshard(root=True)),
    "FSDP-3": cell_of(ParallelDims(dp_shard=3), PAST, num_microbatches=1),
    "HSDP-2x2": cell_of(HSDP, PAST),
    "FSDP-2-x-TP-2": cell_of(FSDP2_TP2, PAST),
    "TP-2-rowwise": cell_of(TP2, ROWS),
    "experts-EP-2-delayed": cell_of(EP2, PAST, **QWEN3),
    "experts-EP-2-rowwise": cell_of(EP2, ROWS, family="deepseek_v3", recompute=Recompute(1)),
    "experts-EP-2-x-FSDP-2": cell_of(ParallelDims(dp_shard=4, ep=2), PAST, family="llama4", num_microbatches=1),
    "experts-FSDP-3": cell_of(ParallelDims(dp_shard=3), CURRENT, num_microbatches=1, **QWEN3),
    "experts-TP-2": cell_of(TP2, CURRENT, family="gpt_oss"),
    "experts-wide-budget": cell_of(ONE, Recipe(ROWWISE_WIDE, E4M3), recompute=Recompute(budget=Budget(0.3)), **QWEN3),
    "experts-mx": cell_of(ONE, BLOCKS, recompute=Recompute(by_op=True), **QWEN3),
    "experts-mx-EP-2": cell_of(EP2, BLOCKS, family="deepseek_v3", recompute=Recompute(1)),
    "experts-mx-EP-2-x-FSDP-2": cell_of(ParallelDims(dp_shard=4, ep=2), BLOCKS, family="llama4", num_microbatches=1),
    "experts-mx-wide-TP-2": cell_of(TP2, BLOCKS_WIDE, family="gpt_oss", recompute=Recompute(budget=Budget(0.3))),
    "norms-FSDP-2": cell_of(FSDP2, None, family="own_models.float8_norms"),
    "norms-TP-2": cell_of(TP2, None, family="own_models.float8_norms"),
    "flex": cell_of(ONE, PAST, attn="flex"),
}


def differences(cell: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell)))


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, cell in (CELLS | SLOW).items()],
)
def test_the_graph_is_eager_bit_for_bit(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


CAPTURED = {
    "linear": cell_of(ONE, PAST, recompute=Recompute(1), num_steps=2),
    "mx": cell_of(ONE, BLOCKS, num_steps=2),
    "experts": cell_of(ONE, CURRENT, num_steps=2, **QWEN3),
    "norms": cell_of(ONE, None, family="own_models.float8_norms", num_steps=2),
    "experts-rowwise-EP-2": cell_of(EP2, ROWS, num_steps=2, **QWEN3),
    "experts-mx-EP-2": cell_of(EP2, BLOCKS, num_steps=2, **QWEN3),
}


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo captures steps from torch 2.13 on")
@pytest.mark.parametrize(
    "cell",
    CAPTURED.values(),
    ids=CAPTURED,
)
def test_what_dynamo_captures_is_eager_too(cell: Cell) -> None:
    cell = dataclasses.replace(cell, capture="dynamo")
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


def stale_differences(cell: Cell) -> list[str]:
    steps = build_graph(cell)
    assert steps.quantized is not None
    steps.quantized.refresh()
    steps.quantized.refresh = lambda always=True: None  # type: ignore[method-assign]
    return bits_that_differ(eager(cell), train(cell, steps))


def test_weights_that_are_not_quantised_anew_after_a_step_are_seen() -> None:
    (different,) = run_on(1, stale_differences, cell_of(ONE, CURRENT, **ONE_LAYER))
    assert "step 2: loss" in different and "step 1: loss" not in different


def seen_by_all(all_dims: list[ParallelDims]) -> list[list[float]]:
    """Give what delayed scaling keeps of two steps where each rank has seen something else."""
    found, rank = [], dist.get_rank()
    for dims in all_dims:
        model = nn.Sequential(Linear(nn.Linear(16, 16), PAST))
        told = {"0.amax": torch.tensor([1.0 + rank, 2.0 - rank, 1.0])}
        state = Float8State(model, {}, layout_of(dims), torch.float32)
        for factor in (1, 3):
            state.take({name: x * torch.tensor([factor, factor, 1]) for name, x in told.items()})
        found.append(model[0].amax_history[:3].flatten().tolist())
    return found


def test_all_ranks_keep_the_largest_that_any_has_seen() -> None:
    """Graph and eager share this: between them nothing would differ."""
    all_dims = [FSDP2, DDP2, TP2, ParallelDims(cp=2), EP2]
    assert run_on(2, seen_by_all, all_dims) == [[[6.0, 6.0, 2.0, 2.0, 0.0, 0.0]] * len(all_dims)] * 2


def verified(cell: Cell) -> None:
    traced = trace(cell)
    run_passes(traced.train.gm, passes(traced.plan), (), CPU, Inspection(verify_on=traced.inputs))


@pytest.mark.slow
def test_every_pass_keeps_its_promise() -> None:
    run_on(2, verified, cell_of(FSDP2, PAST, recompute=Recompute(every=1)))


def losses(cell: Cell) -> Tensor:
    seen = eager(cell)
    return torch.stack([seen[f"step {k}: loss"] for k in range(1, cell.num_steps + 1)])


def test_the_loss_follows_that_of_bf16() -> None:
    cells = [cell_of(ONE, recipe, num_steps=5) for recipe in (None, CURRENT, PAST, ROWS, BLOCKS)]
    expected, *found = (run_on(1, losses, cell)[0] for cell in cells)
    learned = expected[0] - expected[-1]
    assert learned > 0.1
    for each in found:
        assert not torch.equal(each, expected)
        assert (each - expected).abs().max() < learned / 10


def gathered(cell: Cell) -> dict[torch.dtype, int]:
    """Give the numbers that a rank gives to gathers in a step, by dtype."""
    _, graphs = final_graphs(cell)
    found: dict[torch.dtype, int] = {}
    for node in graphs.train.gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        x = value(node.args[0])
        found[x.dtype] = found.get(x.dtype, 0) + x.numel()
    return found


@pytest.mark.slow
def test_float8_travels_in_the_place_of_bf16() -> None:
    ((plain, _), (quantised, _)) = (run_on(2, gathered, cell_of(FSDP2, recipe)) for recipe in (None, CURRENT))
    assert quantised[torch.uint8] > quantised[torch.bfloat16] and torch.uint8 not in plain
    assert sum(quantised.values()) == sum(plain.values())


def evaluated(cell: Cell) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Evaluate before and after a step, on the graph and eagerly."""
    found = []
    for mode in ("graph", "eager"):
        steps = build_with_evaluation(cell, mode)
        batches, num_tokens = microbatches(cell, 0, 1)
        found.append(steps.evaluate(batches[0]))
        steps.train(batches, num_tokens)
        for p in steps.model.parameters():
            p.data.add_(p.grad, alpha=-1e-1)
            p.grad = None
        found.append(steps.evaluate(batches[0]))
        workspaces = [x.to_local() for name, x in steps.model.named_buffers() if name.endswith("weight_q")]
        writes = [x._version for x in workspaces]
        assert torch.equal(steps.evaluate(batches[0]), found[-1])
        assert [x._version for x in workspaces] == writes, "nothing has changed since: they are not quantised again"
        assert bool(workspaces) == (mode == "graph")
    return tuple(found)  # type: ignore[return-value]


def build_with_evaluation(cell: Cell, mode: str) -> Steps:
    options = cell.options(mode)
    options = dataclasses.replace(options, eval_rows=options.rows)
    steps = build_steps(Assembly(build_model(cell), load_family(cell.family), layout_of(cell.dims), options))
    initialize(steps.model, SEED)
    return steps


def test_an_evaluation_sees_the_weights_of_its_moment() -> None:
    ((before, after, eager_before, eager_after),) = run_on(1, evaluated, cell_of(ONE, PAST, **ONE_LAYER))
    assert torch.equal(before, eager_before) and torch.equal(after, eager_after) and not torch.equal(before, after)
