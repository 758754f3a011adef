"""Every family's training step as a graph is FSDP2's, bit for bit, and that of a plain module; and what a step says of
its experts is right in every layout."""

import dataclasses
from collections.abc import Iterable

import faults
import pytest
from matrix import (
    BF16,
    FP32,
    FP64,
    FSDP2,
    FSDP2_TP2,
    NUM_ROWS,
    ONE,
    ONE_LAYER,
    SEQ_LEN,
    TP2,
    Cell,
    Seen,
    bits_that_differ,
    build_graph,
    build_plain,
    eager,
    gathered,
    off_one_rank,
    patched,
    train,
)
from torch import Tensor

from pool import run_on
from torchtitan_graph.models.layers import moe
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.models.spec import family_names, load_family
from torchtitan_graph.parallel.recompute import Budget, Recompute

# Every debug flavour of every family in the folder, and DeepSeek-V2 and V3 with what their debug flavour leaves out:
# groups of experts, and layers that predict more tokens.
GROUPS = (("q_lora_rank", 20), ("num_groups", 3), ("num_chosen_groups", 2), ("route_scale", 2.5))
MODELS = {
    f"{family}-{flavor}": {"family": family, "flavor": flavor}
    for family in family_names()
    for flavor in load_family(family).FLAVORS
    if flavor.startswith("debugmodel")
} | {
    f"deepseek_v3-groups-version-{version}": {
        "family": "deepseek_v3",
        "changes": (*GROUPS, ("version", version), ("num_mtp_layers", version - 1)),
    }
    for version in (2, 3)
}
# A model of transformers with experts.
MODELS["transformers-mixtral"] = {"family": "transformers", "flavor": "mixtral"}
# In the fast tier are llama3 in test_graph_equals_eager.py, qwen3 with experts in many files, gpt_oss in
# test_row_lengths.py, llama4 in test_varlen.py and beside one rank, and of those below the cheapest. Version 2 of
# deepseek_v3 is version 3 with softmax scores and no bias.
WITH_EXPERTS = [n for n in MODELS if n not in ("llama3-debugmodel", "qwen3-debugmodel") and "transformers" not in n]
PRECISIONS = {"fp32": FP32, "bf16": BF16}
LAYOUTS = {"one-rank": ONE, "FSDP-2": FSDP2, "TP-2": TP2, "FSDP-2-x-TP-2": FSDP2_TP2}
AUXILIARY = {
    "over-the-batch": AuxiliaryLoss(load_balance=0.1, router_z=0.01),
    "over-each-sequence": AuxiliaryLoss(load_balance=0.1, by_sequence=True),
}


def slow_but(fast: object, values: Iterable[object]) -> list[object]:
    return [pytest.param(value, marks=[] if value == fast else [pytest.mark.slow]) for value in values]


def differences(cell: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell)))


def check(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


FEW = {"changes": (("num_layers", 2),), "num_steps": 2}
SMALL = {
    "gpt_oss, flex, TP 2": Cell(TP2, family="gpt_oss", attn="flex", fused_layers=True, **FEW),
    "llama4, FSDP 2": Cell(FSDP2, BF16, "llama4", **FEW),
    "mixtral, FSDP 2": Cell(FSDP2, BF16, "transformers", "mixtral", **FEW),
    "deepseek_v3, FSDP 2, losses": Cell(
        FSDP2, family="deepseek_v3", auxiliary=AUXILIARY["over-the-batch"], recompute=Recompute(every=1), **FEW
    ),
}


@pytest.mark.parametrize("name", slow_but("deepseek_v3, FSDP 2, losses", SMALL))
def test_every_family(name):
    check(SMALL[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "attn", "precision", "layout"),
    [(m, a, p, x) for m in MODELS for a in ("sdpa", "flex") for p in PRECISIONS for x in LAYOUTS],
)
def test_every_family_in_every_layout(model, attn, precision, layout):
    """With flex attention as a GPU has it: with the elementwise operators of our own."""
    cell = Cell(LAYOUTS[layout], precision=PRECISIONS[precision], attn=attn, **MODELS[model])
    check(dataclasses.replace(cell, fused_layers=attn == "flex"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [Recompute(every=1), Recompute(by_op=True), Recompute(budget=Budget(0.0))],
    ids=["full", "op", "budget"],
)
@pytest.mark.parametrize("model", MODELS)
def test_with_recomputation_and_accumulation(model, recompute):
    check(Cell(FSDP2, precision=BF16, num_microbatches=2, recompute=recompute, **MODELS[model]))


@pytest.mark.slow
@pytest.mark.parametrize("model", WITH_EXPERTS)
@pytest.mark.parametrize("layout", ["FSDP-2", "FSDP-2-x-TP-2"])
@pytest.mark.parametrize("auxiliary", AUXILIARY.values(), ids=AUXILIARY)
def test_with_auxiliary_losses(model, layout, auxiliary):
    check(Cell(LAYOUTS[layout], auxiliary=auxiliary, recompute=Recompute(every=1), **MODELS[model]))


# --- the plain module -----------------------------------------------------------------------------------------------


def differences_from_plain(cell: Cell) -> list[str]:
    graph = {n: x.to_local() if hasattr(x, "to_local") else x for n, x in train(cell, build_graph(cell)).items()}
    return bits_that_differ(train(cell, build_plain(cell)), graph)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_is_the_plain_module(model):
    assert run_on(1, differences_from_plain, Cell(**MODELS[model])) == [[]]


def whole_graph(cell: Cell) -> Seen:
    return gathered(cell, train(cell, build_graph(cell)))


def check_against_plain(cell: Cell) -> None:
    for found in run_on(cell.dims.num_ranks, whole_graph, cell):
        assert off_one_rank(cell, found) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (model, layout)
        for model in MODELS
        for layout in ("FSDP-2", "FSDP-2-x-TP-2", "TP-2")
        # Its parameters are small beside what Adam makes of rounding errors in gradients near zero, which tensor
        # parallelism has other ones of: scripts/check_transformers.py compares its gradients.
        if "TP" not in layout or model != "transformers-mixtral"
    ],
)
def test_every_layout_is_the_plain_module(model, layout):
    """Under TP-2 with the elementwise operators of our own; the plain module has torch's."""
    check_against_plain(Cell(LAYOUTS[layout], precision=FP64, fused_layers=layout == "TP-2", **MODELS[model]))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [FSDP2, TP2], ids=["FSDP-2", "TP-2"])
def test_a_loss_of_each_sequence_is_the_same_in_every_layout(dims):
    auxiliary = AUXILIARY["over-each-sequence"]
    check_against_plain(Cell(dims, precision=FP64, auxiliary=auxiliary, **MODELS["deepseek_v3-debugmodel"]))


def test_tensor_parallelism_of_experts_is_the_plain_module():
    check_against_plain(Cell(TP2, FP64, "llama4", fused_layers=True, **FEW))


@pytest.mark.slow
def test_a_loss_over_the_batch_is_the_same_under_data_parallel():
    auxiliary = AUXILIARY["over-the-batch"]
    check_against_plain(Cell(FSDP2, FP64, auxiliary=auxiliary, **MODELS["qwen3-debugmodel_moe"], **ONE_LAYER))


# --- loads ------------------------------------------------------------------------------------------------------------


def loads(cell: Cell) -> dict[str, Tensor]:
    return {name: x for name, x in train(cell, build_graph(cell)).items() if name.endswith(".load")}


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ONE, FSDP2, TP2], ids=["one-rank", "FSDP-2", "TP-2"])
def test_loads_count_every_slot_once(dims):
    """Whatever is recomputed, accumulated or split."""
    cell = Cell(dims, num_microbatches=2, recompute=Recompute(every=1), **MODELS["deepseek_v3-debugmodel"])
    for of_rank in run_on(dims.num_ranks, loads, cell):
        assert {int(x.sum()) for x in of_rank.values()} == {NUM_ROWS * SEQ_LEN * 2}


# --- the checks can fail ----------------------------------------------------------------------------------------------


def differences_with(cell: Cell, other: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(other, build_graph(other)))


@pytest.mark.parametrize(
    ("model", "size", "attn"),
    [
        ("gpt_oss", "window", "sdpa"),
        pytest.param("llama4", "chunk", "flex", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "window", "flex", marks=pytest.mark.slow),
        pytest.param("llama4", "chunk", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_a_mask_off_by_one_is_seen_in_the_first_loss(model, size, attn):
    tiny = {"window": 7, "chunk": 8}[size]
    cells = [Cell(family=model, attn=attn, changes=((size, n),), num_steps=1) for n in (tiny, tiny - 1)]
    (different,) = run_on(1, differences_with, *cells)
    assert "step 1: loss" in different


def differences_after(cell: Cell, edit) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell, edit)))


@pytest.mark.parametrize("attn", ["sdpa", pytest.param("flex", marks=pytest.mark.slow)])
def test_a_dropped_gradient_of_the_sinks_is_seen(attn):
    (different,) = run_on(
        1, differences_after, Cell(family="gpt_oss", attn=attn, **FEW), faults.drop_gradients_of_sinks
    )
    assert different[0] == "step 1: gradient of layers.0.attention.sinks"


def differences_with_a_leaking_bias(cell: Cell) -> list[str]:
    expected, right = eager(cell), moe.Router.scores
    with patched(moe.Router, "scores", lambda self, logits: right(self, logits) + self.bias_E):
        return bits_that_differ(expected, train(cell, build_graph(cell)))


def test_a_correction_bias_that_leaks_into_the_weights_is_seen():
    """In the second step: the bias begins at zero."""
    (different,) = run_on(1, differences_with_a_leaking_bias, Cell(family="deepseek_v3", **FEW))
    assert different[0].startswith("step 2: ")
