"""Attention within documents, `attn = "varlen"`: the graph is eager FSDP2, bit for bit, and every layout one rank."""

import dataclasses
from typing import Any

import matrix
import pytest
from matrix import BF16, FP32, FP64, FSDP2, ONE, TP2, Cell, bits_that_differ, build_eager, build_graph, far_apart, train

from pool import run_on
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

VARLEN = Cell(attn="varlen")
CP2 = ParallelDims(cp=2)
FAMILIES = {
    "llama3": {},
    "qwen3": {"family": "qwen3", "flavor": "debugmodel_moe"},
    "deepseek_v3": {"family": "deepseek_v3"},
    "llama4": {"family": "llama4"},
    "gpt_oss": {"family": "gpt_oss"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate-2": {"num_microbatches": 2},
    "recompute-full": {"recompute": Recompute(every=1)},
    "recompute-op": {"recompute": Recompute(by_op=True)},
    "dynamo": {"capture": "dynamo"},
}


def differences(cell: Cell) -> list[str]:
    return bits_that_differ(train(cell, build_eager(cell)), train(cell, build_graph(cell)))


def check(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            dataclasses.replace(VARLEN, dims=dims, precision=precision, **FAMILIES[family]),
            id=f"{family}-{layout}-{word}",
            marks=pytest.mark.slow,
        )
        for family in FAMILIES
        for layout, dims in {"one": ONE, "FSDP-2": FSDP2, "TP-2": TP2, "CP-2": CP2}.items()
        for word, precision in {"fp32": FP32, "bf16": BF16}.items()
    ],
)
def test_the_graph_is_eager(cell: Cell) -> None:
    check(cell)


def test_the_graph_of_two_layers_is_eager() -> None:
    check(Cell(FSDP2, BF16, "llama4", attn="varlen", changes=(("num_layers", 2),), num_steps=2))


def test_windows_sinks_and_parts_of_rows() -> None:
    cell = Cell(CP2, FP64, "gpt_oss", attn="varlen", changes=(("num_layers", 2),), num_steps=2)
    check(cell)
    assert run_on(2, far_from_sdpa, cell) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str) -> None:
    check(dataclasses.replace(VARLEN, dims=FSDP2, precision=BF16, **VARIANTS[variant]))


def far_from_sdpa(cell: Cell) -> list[str]:
    """Compare with dense masks, on the same ranks."""
    sdpa = train(dataclasses.replace(cell, attn="sdpa"), build_graph(dataclasses.replace(cell, attn="sdpa")))
    return far_apart(sdpa, train(cell, build_graph(cell)), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "dims", [ONE, FSDP2, TP2, CP2, ParallelDims(pp=2)], ids=["one", "FSDP-2", "TP-2", "CP-2", "PP-2"]
)
def test_numbers_are_those_of_sdpa(family: str, dims: ParallelDims) -> None:
    cell = dataclasses.replace(VARLEN, dims=dims, precision=FP64, num_microbatches=dims.pp, **FAMILIES[family])
    assert run_on(dims.num_ranks, far_from_sdpa, cell) == [[]] * dims.num_ranks


def shifted(cell: Cell, data_rank: int, step: int) -> Any:
    batches, num_tokens = matrix.microbatches(cell, data_rank, step)
    return [Batch(*batch[:3], batch.documents_BL.roll(1, dims=1)) for batch in batches], num_tokens


def differences_where_shifted(cell: Cell) -> list[str]:
    return bits_that_differ(train(cell, build_eager(cell)), train(cell, build_graph(cell), data=shifted))


@pytest.mark.slow
def test_documents_that_are_shifted_by_one_are_found() -> None:
    (found,) = run_on(1, differences_where_shifted, VARLEN)
    assert "step 1: loss" in found
