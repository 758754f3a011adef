"""Padding is no token: experts neither count nor compute it, so the same rows give the same numbers however they are
divided into microbatches and over ranks; and the graph equals eager with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from matrix import (
    FP64,
    FSDP2,
    ONE,
    TP2,
    Cell,
    Seen,
    bits_that_differ,
    build_eager,
    build_graph,
    build_plain,
    far_apart,
    gathered,
    global_rows,
    patched,
    train,
)
from torch import Tensor

from pool import run_on
from torchtitan_graph.capture import step as steps
from torchtitan_graph.check.matrix import NUM_ROWS, SEQ_LEN
from torchtitan_graph.data.batch import IGNORE_INDEX, PADDING, Batch
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.parallel.dispatch import Exchange
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.quantize.products import Recipe

OF_ROWS = AuxiliaryLoss(load_balance=0.1, by_sequence=True, router_z=0.01)
OF_BATCH = AuxiliaryLoss(load_balance=0.1, router_z=0.01)
TWO_LAYERS = (("num_layers", 2),)
DEEPSEEK, LLAMA, GPT_OSS = ({"family": name, "changes": TWO_LAYERS} for name in ("deepseek_v3", "llama4", "gpt_oss"))
AHEAD = {"family": "deepseek_v3", "changes": (("num_layers", 2), ("num_mtp_layers", 2))}
QWEN = {"family": "qwen3", "flavor": "debugmodel_moe", "changes": TWO_LAYERS}
WRAPPED = {"family": "transformers", "flavor": "qwen2_moe", "changes": TWO_LAYERS}
CP2, EP2, PP2 = ParallelDims(cp=2), ParallelDims(dp_shard=2, ep=2), ParallelDims(pp=2)
TP2_EP2 = ParallelDims(tp=2, ep=2)
BY_MACHINE = ParallelDims(dp_shard=2, ep=2, ep_near=1)

# The fraction of each row that is tokens, one after the other; one row is padding alone.
FULL = (1.0, 0.6, 0.0, 0.35)


def padded(cell: Cell, data_rank: int, step: int) -> tuple[list[Batch], Tensor]:
    """Return this rank's microbatches of rows with padding, and the number of targets of all ranks."""
    rows, places_L = global_rows(cell.vocab_size, step), torch.arange(SEQ_LEN)
    ends_B1 = torch.tensor([[round(SEQ_LEN * FULL[(row + step) % len(FULL)])] for row in range(NUM_ROWS)])
    is_padding_BL = places_L >= ends_B1
    batch = Batch(
        torch.where(is_padding_BL, 1, rows.tokens_BL),
        torch.where(is_padding_BL, IGNORE_INDEX, rows.labels_BL),
        torch.where(is_padding_BL, places_L - ends_B1, rows.positions_BL),
        torch.where(is_padding_BL, PADDING, rows.documents_BL),
    )
    parts = [Batch(*each) for each in zip(*(x.chunk(cell.num_parts) for x in batch), strict=True)]
    return parts[data_rank :: cell.dims.data], (batch.labels_BL != IGNORE_INDEX).sum()


def compared(cell: Cell, plain: Seen) -> tuple[list[str], list[str]]:
    """Name what differs between graph and eager, and between the graph on all ranks and a plain loop on one."""
    graph = train(cell, build_graph(cell), padded)
    different = bits_that_differ(train(cell, build_eager(cell), padded), graph) if cell.dims.pp == 1 else []
    if not plain:
        return different, []
    whole = gathered(cell, graph)
    exact = {name for name in plain if name.endswith(".load") or name.startswith("buffer")}
    unequal = [name for name in exact if not torch.equal(whole[name], plain[name])]
    return different, unequal + far_apart(
        *({n: x for n, x in s.items() if n not in exact} for s in (plain, whole)), 1e-12
    )


def plain_of(cell: Cell) -> Seen:
    """Return the results of a plain loop on one rank, with all rows in one microbatch."""
    return train(cell, build_plain(cell), padded)


def run(cell: Cell) -> list[tuple[list[str], list[str]]]:
    cell = dataclasses.replace(cell, num_steps=2)
    plain: Seen = {}
    if cell.precision is FP64:
        (plain,) = run_on(1, plain_of, dataclasses.replace(cell, dims=ONE, num_microbatches=1, pipeline=()))
    return run_on(cell.dims.num_ranks, compared, cell, plain, timeout=300)


def of(family: dict[str, Any], dims: ParallelDims = ONE, auxiliary: AuxiliaryLoss = OF_ROWS, **more: Any) -> Cell:
    return Cell(dims, FP64, auxiliary=auxiliary, **family, **more)


@pytest.mark.parametrize(
    "cell",
    [
        of(DEEPSEEK, num_microbatches=2),
        of(AHEAD, FSDP2),
        of(QWEN, EP2, OF_BATCH),
        of(WRAPPED, num_microbatches=4),
    ],
    ids=["deepseek-accumulate-2", "ahead-fsdp2", "qwen3-ep2", "wrapped-accumulate-4"],
)
def test_padded_rows_give_the_same_numbers(cell: Cell) -> None:
    assert run(cell) == [([], [])] * cell.dims.num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("auxiliary", [OF_ROWS, OF_BATCH], ids=["rows", "batch"])
@pytest.mark.parametrize("dims", [FSDP2, TP2, CP2, EP2, PP2, TP2_EP2, BY_MACHINE], ids=str)
@pytest.mark.parametrize("family", [DEEPSEEK, QWEN, GPT_OSS, LLAMA, WRAPPED], ids=lambda x: x["family"])
def test_every_layout_with_padding(family: dict[str, Any], dims: ParallelDims, auxiliary: AuxiliaryLoss) -> None:
    many = {"num_microbatches": 2} if dims.pp == 2 and auxiliary is OF_ROWS else {}
    if dims.pp == 2 and auxiliary is OF_BATCH:
        pytest.skip("a pipeline has several microbatches, and shares of a batch are a microbatch's own")
    cell = of(family, dims, auxiliary, **many)
    assert run(cell) == [([], [])] * cell.dims.num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        of(AHEAD, num_microbatches=2, loss_chunks=4),
        of(AHEAD, TP2),
        of(QWEN, EP2, early_scores=True),
        of(QWEN, BY_MACHINE, exchange=Exchange(exact=False)),
        Cell(EP2, float8=Recipe(), auxiliary=OF_ROWS, **QWEN),
        Cell(float8=Recipe("rowwise"), auxiliary=OF_ROWS, **QWEN),
    ],
    ids=["ahead-chunks", "ahead-tp2", "early-scores", "sums-by-machine", "float8-ep2", "float8-rows"],
)
def test_other_ways_with_padding(cell: Cell) -> None:
    assert run(cell) == [([], [])] * cell.dims.num_ranks


def counted(cell: Cell, plain: Seen) -> tuple[list[str], list[str]]:
    with patched(steps, "real_of", lambda batch: steps.Real.of(batch.documents_BL >= PADDING)):
        return compared(cell, plain)


def test_padding_that_counts_is_found() -> None:
    cell = dataclasses.replace(of(DEEPSEEK), num_steps=2)
    (plain,) = run_on(1, plain_of, cell)
    ((same, found),) = run_on(1, counted, cell, plain)
    assert not same and any("loss" in n for n in found) and any(n.endswith(".load") for n in found)
