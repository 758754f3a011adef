"""Frozen parameters and low-rank adapters: the graph is FSDP2's bit for bit, each layout is one rank's, and what is
frozen keeps its bits."""

from contextlib import nullcontext

import faults
import pytest
from matrix import (
    BF16,
    FP64,
    FSDP2,
    FSDP2_TP2,
    ONE_LAYER,
    TP2,
    Cell,
    bits_that_differ,
    build_graph,
    eager,
    gathered,
    off_one_rank,
    patched,
    train,
)

from pool import run_on
from torchtitan_graph.models.layers import adapt
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

LORA = (("rank", 4), ("alpha", 8.0))
FROZEN = ("tok_embeddings", "layers.[01].*", "layers.2.attention.w[qk]")
EP2, TP2_EP2 = ParallelDims(dp_shard=2, ep=2), ParallelDims(tp=2, ep=2)
CP2, PP2 = ParallelDims(cp=2), ParallelDims(pp=2)
MOE = {"family": "qwen3", "flavor": "debugmodel_moe", "lora": LORA, "num_steps": 3}


def slow(*cell, **options):
    return pytest.param(Cell(*cell, **options), marks=pytest.mark.slow)


def trained(cell: Cell, edit=None):
    """Train on the graph; also return the names of frozen parameters with other bits than before."""
    steps = build_graph(cell, edit)
    before = {n: p.detach().clone() for n, p in steps.model.named_parameters() if not p.requires_grad}
    assert before
    seen = train(cell, steps)
    after = {n: p.detach() for n, p in steps.model.named_parameters() if n in before}
    return seen, bits_that_differ(before, after)


def differences(cell: Cell, edit=None) -> list[str]:
    seen, moved = trained(cell, edit)
    return bits_that_differ(eager(cell), seen) + moved


def off(cell: Cell, roles=None) -> list[str]:
    """Return what differs from one rank; `roles` replaces the function that gives adapters their roles."""
    with nullcontext() if roles is None else patched(adapt, "_roles", roles):
        seen, moved = trained(cell)
    return off_one_rank(cell, gathered(cell, seen)) + moved


@pytest.mark.parametrize(
    "cell",
    [
        slow(FSDP2, BF16, freeze=FROZEN, num_steps=3),
        Cell(FSDP2, BF16, lora=LORA, num_microbatches=2, num_steps=3, **ONE_LAYER),
        slow(FSDP2, BF16, lora=LORA, num_microbatches=2, num_steps=3),
        slow(TP2, BF16, lora=LORA, num_steps=3),
        slow(TP2, BF16, freeze=FROZEN),
        slow(TP2, BF16, freeze=("tok_embeddings", "output"), tied=True),
        slow(FSDP2_TP2, BF16, freeze=FROZEN),
        slow(FSDP2_TP2, BF16, lora=LORA),
        slow(CP2, BF16, lora=LORA),
        slow(EP2, BF16, **MOE),
        slow(TP2_EP2, BF16, **MOE),
        *(slow(TP2, BF16, family, lora=LORA) for family in ("gpt_oss", "deepseek_v3", "llama4", "transformers")),
    ],
)
def test_the_graph_is_eager(cell):
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


def test_a_lost_reduction_of_an_adapter_is_seen():
    cell = Cell(FSDP2, BF16, lora=LORA, num_microbatches=2, num_steps=3, **ONE_LAYER)
    assert all(run_on(2, differences, cell, faults.drop_one_reduction))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(TP2, FP64, lora=LORA, num_steps=3, **ONE_LAYER),
        slow(EP2, FP64, **MOE, **ONE_LAYER),
        slow(TP2, FP64, lora=LORA, num_steps=3),
        slow(EP2, FP64, **MOE),
        slow(FSDP2, FP64, lora=LORA),
        slow(FSDP2_TP2, FP64, lora=LORA),
        slow(FSDP2_TP2, FP64, freeze=FROZEN),
        slow(CP2, FP64, lora=LORA),
        slow(PP2, FP64, lora=LORA, num_microbatches=2),
        slow(TP2, FP64, **MOE),
        slow(TP2_EP2, FP64, **MOE),
        *(slow(TP2, FP64, family, lora=LORA) for family in ("gpt_oss", "deepseek_v3", "llama4", "transformers")),
    ],
)
def test_each_layout_is_one_rank(cell):
    assert run_on(cell.dims.num_ranks, off, cell) == [[]] * cell.dims.num_ranks


def share_B(plan, model, weights):
    """Count B of a layer that is cut by columns once in all, where each rank's product is a term."""
    roles = _RIGHT(plan, model, weights)
    return roles | {name: {"tp": "share"} for name in roles if name.endswith("wo.lora_B.weight")}


_RIGHT = adapt._roles


def test_a_wrong_role_is_seen():
    assert all(run_on(2, off, Cell(TP2, FP64, lora=LORA, num_steps=3, **ONE_LAYER), share_B))


WHOLE_BLOCKS = (("dim", 128), ("ffn_dim", 256))
IN_ONE_LAYER = {"changes": (*WHOLE_BLOCKS, *ONE_LAYER["changes"])}
MOE_BLOCKS = {
    "family": "qwen3",
    "flavor": "debugmodel_moe",
    "changes": (("dim", 128), ("moe_ffn_dim", 128), ("head_dim", 64)),
}
LATENT = (*WHOLE_BLOCKS, ("moe_ffn_dim", 128), ("kv_lora_rank", 64), ("nope_dim", 64), ("rope_dim", 64), ("v_dim", 64))


def packed(dims, precision, packing="nf4", **options):
    """A cell whose weights next to adapters are packed: rows of whole blocks, after tensor parallelism's cut too."""
    lora = (*LORA, ("base", packing))
    return Cell(dims, precision, lora=lora, **{"changes": WHOLE_BLOCKS, "ffn_dim": 256, "num_steps": 3, **options})


def slow_packed(*cell, **options):
    return pytest.param(packed(*cell, **options), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "cell",
    [
        packed(FSDP2, BF16, num_microbatches=2, **IN_ONE_LAYER),
        slow_packed(FSDP2, BF16, num_microbatches=2),
        slow_packed(TP2, BF16, "float8"),
        slow_packed(FSDP2_TP2, BF16),
        slow_packed(CP2, BF16),
        slow_packed(EP2, BF16, **MOE_BLOCKS),
        slow_packed(TP2_EP2, BF16, "float8", **MOE_BLOCKS),
        slow_packed(FSDP2, BF16, capture="dynamo"),
        slow_packed(FSDP2, BF16, recompute=Recompute(every=1)),
        slow_packed(TP2, BF16, family="deepseek_v3", changes=LATENT),
    ],
)
def test_packed_weights_in_the_graph_are_eagers(cell):
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize(
    "cell",
    [
        packed(TP2, FP64, **IN_ONE_LAYER),
        slow_packed(TP2, FP64),
        slow_packed(FSDP2, FP64, "float8"),
        slow_packed(FSDP2_TP2, FP64),
        slow_packed(CP2, FP64),
        slow_packed(PP2, FP64, num_microbatches=2),
        slow_packed(EP2, FP64, **MOE_BLOCKS),
        # Later, gradients of A are so small that Adam's eps shows rounding in the parameters.
        slow_packed(TP2, FP64, **MOE_BLOCKS, num_steps=1),
        slow_packed(TP2, FP64, family="deepseek_v3", changes=LATENT),
    ],
)
def test_packed_weights_are_one_ranks(cell):
    assert run_on(cell.dims.num_ranks, off, cell) == [[]] * cell.dims.num_ranks
