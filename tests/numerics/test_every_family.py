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
# In the fast tier a family has one cell of a kind; llama3 is in test_layouts_agree.py, and data parallelism is one code
# for all of them. Version 2 of deepseek_v3 is version 3 with softmax scores and no bias; test_expert_parallel.py has it
# with TP.
TO_PLAIN = {(model, "TP-2") for model in ("gpt_oss-debugmodel", "llama4-debugmodel", "qwen3-debugmodel_moe")}
WITH_EXPERTS = [n for n in MODELS if n not in ("llama3-debugmodel", "qwen3-debugmodel") and "transformers" not in n]
PRECISIONS = {"fp32": FP32, "bf16": BF16}
LAYOUTS = {"one-rank": ONE, "FSDP-2": FSDP2, "TP-2": TP2, "FSDP-2-x-TP-2": FSDP2_TP2}
FAST = {
    *(
        (model, "sdpa", "bf16", "FSDP-2")
        for model in ("llama4-debugmodel", "qwen3-debugmodel_moe", "transformers-mixtral")
    ),
    ("gpt_oss-debugmodel", "flex", "fp32", "TP-2"),
}
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


@pytest.mark.parametrize(
    ("model", "attn", "precision", "layout"),
    [
        pytest.param(*cell, marks=[] if cell in FAST else [pytest.mark.slow])
        for cell in [(m, a, p, x) for m in MODELS for a in ("sdpa", "flex") for p in PRECISIONS for x in LAYOUTS]
    ],
)
def test_every_family_in_every_layout(model, attn, precision, layout):
    """With flex attention as a GPU has it: with the elementwise operators of our own."""
    cell = Cell(LAYOUTS[layout], precision=PRECISIONS[precision], attn=attn, **MODELS[model])
    check(dataclasses.replace(cell, fused_layers=attn == "flex"))


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(Recompute(every=1), marks=pytest.mark.slow),
        Recompute(by_op=True),
        pytest.param(Recompute(budget=Budget(0.0)), marks=pytest.mark.slow),
    ],
    ids=["full", "op", "budget"],
)
@pytest.mark.parametrize("model", slow_but("gpt_oss-debugmodel", MODELS))
def test_with_recomputation_and_accumulation(model, recompute):
    check(Cell(FSDP2, precision=BF16, num_microbatches=2, recompute=recompute, **MODELS[model]))


@pytest.mark.parametrize("model", slow_but("deepseek_v3-debugmodel", WITH_EXPERTS))
@pytest.mark.parametrize("layout", ["FSDP-2", pytest.param("FSDP-2-x-TP-2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("auxiliary", slow_but(AUXILIARY["over-the-batch"], AUXILIARY.values()), ids=AUXILIARY)
def test_with_auxiliary_losses(model, layout, auxiliary):
    check(Cell(LAYOUTS[layout], auxiliary=auxiliary, recompute=Recompute(every=1), **MODELS[model]))


# --- the plain module -----------------------------------------------------------------------------------------------


def differences_from_plain(cell: Cell) -> list[str]:
    graph = {n: x.to_local() if hasattr(x, "to_local") else x for n, x in train(cell, build_graph(cell)).items()}
    return bits_that_differ(train(cell, build_plain(cell)), graph)


@pytest.mark.parametrize("model", slow_but("qwen3-debugmodel", MODELS))
def test_one_rank_is_the_plain_module(model):
    assert run_on(1, differences_from_plain, Cell(**MODELS[model])) == [[]]


def whole_graph(cell: Cell) -> Seen:
    return gathered(cell, train(cell, build_graph(cell)))


def check_against_plain(cell: Cell) -> None:
    for found in run_on(cell.dims.num_ranks, whole_graph, cell):
        assert off_one_rank(cell, found) == []


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[] if (model, layout) in TO_PLAIN else [pytest.mark.slow])
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


@pytest.mark.parametrize("dims", slow_but(TP2, [FSDP2, TP2]), ids=["FSDP-2", "TP-2"])
def test_a_loss_of_each_sequence_is_the_same_in_every_layout(dims):
    auxiliary = AUXILIARY["over-each-sequence"]
    check_against_plain(Cell(dims, precision=FP64, auxiliary=auxiliary, **MODELS["deepseek_v3-debugmodel"]))


def test_a_loss_over_the_batch_is_the_same_under_data_parallel():
    auxiliary = AUXILIARY["over-the-batch"]
    check_against_plain(Cell(FSDP2, precision=FP64, auxiliary=auxiliary, **MODELS["qwen3-debugmodel_moe"]))


# --- loads ------------------------------------------------------------------------------------------------------------


def loads(cell: Cell) -> dict[str, Tensor]:
    return {name: x for name, x in train(cell, build_graph(cell)).items() if name.endswith(".load")}


@pytest.mark.parametrize("dims", slow_but(TP2, [ONE, FSDP2, TP2]), ids=["one-rank", "FSDP-2", "TP-2"])
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
        ("llama4", "chunk", "flex"),
        pytest.param("gpt_oss", "window", "flex", marks=pytest.mark.slow),
        pytest.param("llama4", "chunk", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_a_mask_off_by_one_is_seen_in_the_first_loss(model, size, attn):
    tiny = {"window": 7, "chunk": 8}[size]
    cells = [Cell(family=model, attn=attn, changes=((size, n),)) for n in (tiny, tiny - 1)]
    (different,) = run_on(1, differences_with, *cells)
    assert "step 1: loss" in different


def differences_after(cell: Cell, edit) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell, edit)))


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
def test_a_dropped_gradient_of_the_sinks_is_seen(attn):
    (different,) = run_on(1, differences_after, Cell(family="gpt_oss", attn=attn), faults.drop_gradients_of_sinks)
    assert different[0] == "step 1: gradient of layers.0.attention.sinks"


def differences_with_a_leaking_bias(cell: Cell) -> list[str]:
    expected, right = eager(cell), moe.Router.scores
    with patched(moe.Router, "scores", lambda self, logits: right(self, logits) + self.bias_E):
        return bits_that_differ(expected, train(cell, build_graph(cell)))


def test_a_correction_bias_that_leaks_into_the_weights_is_seen():
    """In the second step: the bias begins at zero."""
    (different,) = run_on(1, differences_with_a_leaking_bias, Cell(**MODELS["deepseek_v3-debugmodel"]))
    assert different[0].startswith("step 2: ")
