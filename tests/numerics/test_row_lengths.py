"""One graph for rows of several lengths: in each step bit for bit what eager computes."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from matrix import BF16, FSDP2, NUM_ROWS, ONE_LAYER, Cell, bits_that_differ, build_eager, build_graph, train  # type: ignore[attr-defined]
from torch import Tensor

from pool import run_on
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.quantize.products import Recipe

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="older traces of attention are of one length")
LENGTHS = range(16, 65, 16)
EXPERTS = {"family": "qwen3", "flavor": "debugmodel_moe"}
FEW = {"changes": (("num_layers", 2),), "num_steps": 3}
BLOCKS = range(96, 145, 16)  # rows that end inside a block of a mask, and at its end
CASES = {
    "gpt_oss, whose sinks are padded": Cell(family="gpt_oss", **FEW),
}
SLOW = {
    "llama3 in FSDP 2 with block masks, by Dynamo": Cell(FSDP2, attn="flex", lengths=BLOCKS, capture="dynamo", **FEW),
    "llama3 in TP 2": Cell(ParallelDims(tp=2), **FEW),
    "qwen3 with experts in FSDP 2, bf16, recomputed": Cell(
        FSDP2, **EXPERTS, precision=BF16, num_microbatches=2, recompute=Recompute(every=1), **FEW
    ),
    "llama3 in FSDP 2 x TP 2, tied, bf16": Cell(ParallelDims(dp_shard=2, tp=2), tied=True, precision=BF16),
    "llama3 in DDP 2 with a memory budget": Cell(ParallelDims(dp_replicate=2), recompute=Recompute(budget=Budget(0.5))),
    "llama3 with its activations away": Cell(offload=("layers.*",)),
    "deepseek_v3 with tokens ahead": Cell(
        family="deepseek_v3", changes=(("num_mtp_layers", 1),), auxiliary=AuxiliaryLoss(load_balance=0.1, router_z=0.01)
    ),
    "a transformers mixture with losses": Cell(
        family="transformers",
        flavor="qwen2_moe",
        changes=(("num_layers", 1),),
        auxiliary=AuxiliaryLoss(0.1, True, 0.01),
    ),
    "qwen3 with experts by machine": Cell(ParallelDims(dp_shard=2, ep=2, ep_near=1), **EXPERTS, num_steps=2),
    "llama3 in float8": Cell(precision=BF16, float8=Recipe(), ffn_dim=128),
    "llama4": Cell(family="llama4"),
    "deepseek_v3 in EP 2": Cell(ParallelDims(dp_shard=2, ep=2), family="deepseek_v3"),
    "deepseek_v3 in EP 2, by Dynamo": Cell(ParallelDims(dp_shard=2, ep=2), family="deepseek_v3", capture="dynamo"),
    "llama4 within segments": Cell(family="llama4", attn="varlen", num_microbatches=2),
    "gpt_oss with block masks": Cell(family="gpt_oss", attn="flex", lengths=BLOCKS),
    "llama4 with block masks, by Dynamo": Cell(family="llama4", attn="flex", lengths=BLOCKS, capture="dynamo"),
    "llama3 in FSDP 2 x TP 2, tied, bf16, by Dynamo": Cell(
        ParallelDims(dp_shard=2, tp=2), tied=True, precision=BF16, capture="dynamo"
    ),
    "qwen3 with experts, recomputed, by Dynamo": Cell(
        **EXPERTS, precision=BF16, num_microbatches=2, recompute=Recompute(every=1), capture="dynamo"
    ),
}


def batches(cell: Cell, data_rank: int, step: int) -> tuple[list[Batch], Tensor]:
    """Make microbatches of lengths of their own: on each rank others, none that was traced in the first step."""
    found = []
    assert cell.lengths is not None
    for i in range(cell.num_microbatches):
        for rank in range(cell.dims.data):
            generator = torch.Generator().manual_seed(100 * step + 10 * i + rank)
            length = cell.lengths[(step + i + rank) % len(cell.lengths)]
            tokens_BL = torch.randint(cell.vocab_size, (NUM_ROWS // cell.num_parts, length), generator=generator)
            documents_BL = (torch.arange(length) >= length // 3).long().expand_as(tokens_BL).contiguous()
            positions_BL = torch.arange(length) - documents_BL * (length // 3)
            labels_BL = tokens_BL.roll(-1, 1).masked_fill(documents_BL != documents_BL.roll(-1, 1), IGNORE_INDEX)
            found.append(Batch(tokens_BL, labels_BL, positions_BL.contiguous(), documents_BL))
    num_tokens = torch.tensor(sum(int((x.labels_BL != IGNORE_INDEX).sum()) for x in found))
    return found[data_rank :: cell.dims.data], num_tokens


def differences(cell: Cell) -> list[str]:
    cell = dataclasses.replace(cell, lengths=cell.lengths or LENGTHS)
    return bits_that_differ(train(cell, build_eager(cell), batches), train(cell, build_graph(cell), batches))


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_graph_equals_eager_at_every_length(name: str) -> None:
    cell = (CASES | SLOW)[name]
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


def refusal(rope: Callable[[Tensor], Tensor]) -> str:
    """Say how a model that has other rotary tables is refused."""
    model = load_family("llama3").Model
    own = model.rope
    model.rope = lambda self, positions_BL: own(self, rope(positions_BL))
    try:
        build_graph(Cell(lengths=LENGTHS, **ONE_LAYER))
    except UserError as error:
        return str(error)
    finally:
        model.rope = own
    return "not refused"


def of_one_length(positions_BL: Tensor) -> Tensor:
    return positions_BL + torch.zeros(64, dtype=torch.int64, device=positions_BL.device)


def of_halves(positions_BL: Tensor) -> Tensor:
    return positions_BL.unflatten(1, (-1, 32)).flatten(1)


def of_long_rows(positions_BL: Tensor) -> Tensor:
    return positions_BL + 1 if positions_BL.shape[1] > 40 else positions_BL


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (of_one_length, "WHERE is to be dynamic, but the traced function takes it for 64 (test_row_lengths.py:"),
        (of_halves, "Eq(Mod(WHERE, 32), 0) (test_row_lengths.py:"),
        (of_long_rows, "WHERE may be 16, as declared, but the trace holds only where WHERE > 40 (test_row_lengths.py:"),
    ],
)
def test_a_model_that_needs_other_lengths_is_refused(rope: Callable[[Tensor], Tensor], words: str) -> None:
    (found,) = run_on(1, refusal, rope)
    assert words.replace("WHERE", "batch.tokens_BL.shape[1]") in found
    assert found.startswith("training.dynamic_seq_len = true: rows have 16 to 64 tokens, a multiple of 16. ")
    assert found.endswith("Change that line of the model, or set the option to false")
