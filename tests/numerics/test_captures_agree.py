"""A step that Dynamo captured trains as one that the tracer did, bit for bit, in every family and layout."""

import dataclasses

import pytest
import torch
from matrix import BF16, FSDP2, FSDP2_TP2, ONE, TP2, Cell, bits_that_differ, build_graph, microbatches, train

from pool import run_on
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import family_names, load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo captures steps from torch 2.13 on")
TOTALS = torch.ones(2, dtype=torch.int64)
EXPERTS = {"family": "qwen3", "flavor": "debugmodel_moe"}
OWN = [name for name in family_names() if name != "transformers"]  # which Dynamo can't trace
FAST = {
    "two layers in PP 2, tied": Cell(
        ParallelDims(pp=2), num_microbatches=2, tied=True, changes=(("num_layers", 2),), num_steps=2
    ),
}
SLOW = (
    {
        "llama3 in PP 2, tied": Cell(ParallelDims(pp=2), num_microbatches=2, tied=True),
        "llama4 in TP 2": Cell(TP2, family="llama4"),
        "gpt_oss with flex attention": Cell(family="gpt_oss", attn="flex"),
        "deepseek_v3 in FSDP 2, bf16, recomputed": Cell(
            FSDP2, family="deepseek_v3", precision=BF16, num_microbatches=2, recompute=Recompute(every=1)
        ),
        "qwen3 with experts in EP 2": Cell(ParallelDims(dp_shard=2, ep=2), **EXPERTS),
        "llama3 in CP 2": Cell(ParallelDims(cp=2)),
        "llama3 in FSDP 2 x TP 2, tied, bf16": Cell(FSDP2_TP2, tied=True, precision=BF16),
    }
    | {
        f"{family} in PP 2, bf16": Cell(ParallelDims(pp=2), family=family, precision=BF16, num_microbatches=2)
        for family in OWN
    }
    | {
        f"{family} {flavor} in {layout}, {attn}": Cell(dims, family=family, flavor=flavor, attn=attn)
        for family in OWN
        for flavor in load_family(family).FLAVORS
        if flavor.startswith("debugmodel")
        for layout, dims in {"one rank": ONE, "FSDP 2": FSDP2, "TP 2": TP2}.items()
        for attn in ("sdpa", "flex")
    }
)


def differences(cell: Cell) -> list[str]:
    both = [train(cell, build_graph(dataclasses.replace(cell, capture=capture))) for capture in ("make_fx", "dynamo")]
    return bits_that_differ(*both)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_captures_agree(name: str) -> None:
    cell = (FAST | SLOW)[name]
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


def words_of_a_stage(cell: Cell) -> str:
    """Change what the first stage rests on, and run it."""
    steps = build_graph(cell)
    stages, (batches, num_tokens) = steps.step.stages, microbatches(cell, 0, 1)  # type: ignore[union-attr]
    if 0 not in stages:
        return ""
    steps.model.get_submodule("layers.0").attention_norm.eps = 0.5
    stages[0].begin()
    try:
        stages[0].forward(0, lambda: steps._inputs(batches[0], None, num_tokens, TOTALS), None)
    except UserError as error:
        return str(error)
    return "nothing"


def test_a_stage_checks_what_it_rests_on() -> None:
    said, _ = run_on(2, words_of_a_stage, dataclasses.replace(FAST["two layers in PP 2, tied"], capture="dynamo"))
    assert "the graph depends on model.layers.0.attention_norm.eps == 1e-05 (" in said and "it is 0.5 now" in said
