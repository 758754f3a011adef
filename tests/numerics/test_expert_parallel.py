"""Experts that several ranks share: the graph is FSDP2's, bit for bit, and every layout computes what one rank does.

A wrong dispatch is wrong in both modes: only the comparison with one rank finds it.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import (
    BF16,
    FP64,
    ONE,
    ONE_LAYER,
    TP2,
    Cell,
    Seen,
    bits_that_differ,
    build_eager,
    build_graph,
    build_plain,
    far_apart,
    final_graphs,
    gathered,
    optimizing,
    patched,
    train,
)
from test_verify_passes import outcome
from torch import Tensor

from pool import run_on
from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.config import job
from torchtitan_graph.models.layers.moe import AuxiliaryLoss, Router
from torchtitan_graph.ops.exchange import exchange, turned_order
from torchtitan_graph.ops.experts import grouped_mm
from torchtitan_graph.parallel import dispatch
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.parallel.recompute import Budget, Recompute

TWO_LAYERS = (("num_layers", 2),)
QWEN = {"family": "qwen3", "flavor": "debugmodel_moe", "changes": TWO_LAYERS}
DEEPSEEK, LLAMA, GPT_OSS = ({"family": name, "changes": TWO_LAYERS} for name in ("deepseek_v3", "llama4", "gpt_oss"))
EP2, TP2_EP2 = ParallelDims(dp_shard=2, ep=2), ParallelDims(tp=2, ep=2)
EP2_FSDP2, HSDP_EP2 = ParallelDims(dp_shard=4, ep=2), ParallelDims(dp_replicate=2, dp_shard=2, ep=2)
FSDP2_TP2_EP4, EP2_ETP2 = ParallelDims(dp_shard=2, tp=2, ep=4), ParallelDims(dp_shard=2, tp=2, ep=2, etp=2)
FULL, BY_OP = {"recompute": Recompute(every=1)}, {"recompute": Recompute(by_op=True)}
OVER_BATCH = {"auxiliary": AuxiliaryLoss(load_balance=0.1, router_z=0.01)}
OVER_ROWS = {"auxiliary": AuxiliaryLoss(load_balance=0.1, by_sequence=True)}
# A rank's experts don't divide over the ranks that share them: they are cut on their second dim, or unevenly.
FEW = {"changes": (*TWO_LAYERS, ("num_experts", 2), ("ffn_dim", 12), ("moe_ffn_dim", 12))}
UNEVEN = {"changes": (*TWO_LAYERS, ("moe_ffn_dim", 13), ("ffn_dim", 13))}
MANY = {"changes": (*TWO_LAYERS, ("num_experts", 8))}


def _first_experts(router: Router, scores_TE: Tensor, is_token_BL: Tensor | None) -> Tensor:
    return torch.arange(router.config.top_k).expand(len(scores_TE), -1).contiguous()


TWISTS: dict[str, tuple[Any, str, Any]] = {
    "one rank gets all rows": (Router, "_choose", _first_experts),
    "rows not regrouped": (dispatch, "turned_order", lambda rows, counts_RE: turned_order(rows, counts_RE.flip(0))),
    "loads of a part of each row": (Layout, "routing_groups", property(lambda layout: layout.data_groups)),
}


def twisted(twist: str) -> contextlib.AbstractContextManager:
    return patched(*TWISTS[twist]) if twist else contextlib.nullcontext()


def compared(cell: Cell, plain: Seen, twist: str) -> tuple[list[str], list[str]]:
    """Name what differs between graph and eager, and between the graph on all ranks and one rank."""
    with twisted(twist):
        eager, graph = train(cell, build_eager(cell)), train(cell, build_graph(cell))
    whole = gathered(cell, graph) if plain else {}
    # What has no scale, a load that may be zero or a bias that begins so, is equal.
    exact = {name for name in plain if name.endswith(".load") or name.startswith("buffer")}
    unequal = [name for name in exact if not torch.equal(whole[name], plain[name])]
    floats = [{n: x for n, x in seen.items() if n not in exact} for seen in (plain, whole)]
    return bits_that_differ(eager, graph), unequal + far_apart(*floats, 1e-12)


def run(cell: Cell, twist: str = "", plain_twist: str = "") -> tuple[list[str], list[str]]:
    cell = dataclasses.replace(cell, num_steps=3)  # correction biases move the choice from the second on
    plain: Seen = {}
    if cell.precision is FP64:
        one = dataclasses.replace(cell, dims=ONE)
        with twisted(plain_twist):
            plain = train(one, build_plain(one))
    results = run_on(cell.dims.num_ranks, compared, cell, plain, twist, timeout=300)
    return tuple(sorted({name for result in results for name in result[i]}) for i in (0, 1))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "cell",
    [
        *(
            pytest.param(cell, marks=pytest.mark.slow)
            for cell in (
                Cell(TP2_EP2, FP64, **DEEPSEEK, **OVER_ROWS),
                Cell(EP2_ETP2, FP64, **GPT_OSS),
                Cell(ParallelDims(cp=2, ep=2), FP64, **DEEPSEEK, **OVER_ROWS),
                Cell(EP2, BF16, num_microbatches=2, **GPT_OSS, **BY_OP),
                Cell(EP2_FSDP2, FP64, **QWEN | FEW),
                Cell(TP2_EP2, FP64, **QWEN, **OVER_BATCH),
                Cell(ParallelDims(cp=2, tp=2, ep=4), FP64, **QWEN | MANY, **OVER_BATCH),
                Cell(ParallelDims(dp_shard=2, cp=2, ep=2), FP64, **GPT_OSS, **BY_OP),
                Cell(TP2_EP2, FP64, **LLAMA),
                Cell(TP2_EP2, FP64, **GPT_OSS, **FULL),
                Cell(EP2, FP64, **LLAMA, **OVER_BATCH),
                Cell(EP2, FP64, **DEEPSEEK, **BY_OP, num_microbatches=2),
                Cell(EP2_FSDP2, FP64, **DEEPSEEK, **FULL),
                Cell(EP2_FSDP2, BF16, **GPT_OSS),
                Cell(EP2_FSDP2, FP64, **QWEN | UNEVEN),
                Cell(HSDP_EP2, FP64, **QWEN),
                Cell(HSDP_EP2, BF16, **DEEPSEEK),
                Cell(FSDP2_TP2_EP4, FP64, **QWEN | MANY, **OVER_BATCH),
                Cell(FSDP2_TP2_EP4, BF16, **LLAMA | MANY, attn="flex"),
                Cell(EP2_ETP2, FP64, **DEEPSEEK, **OVER_ROWS),
                Cell(EP2_ETP2, BF16, **LLAMA),
                Cell(ParallelDims(dp_shard=4, ep=4), FP64, **QWEN | MANY),
                Cell(EP2, BF16, **DEEPSEEK, recompute=Recompute(budget=Budget(0.0))),
            )
        ),
    ],
    ids=lambda cell: f"{cell.family}-{cell.dims.fsdp}x{cell.dims.tp}-ep-{cell.dims.ep}",
)
def test_every_layout(cell):
    assert run(cell) == ([], [])


def differences_and_calls(cell: Cell) -> tuple[list[str], int, int]:
    """Name what differs from eager; count products of experts, and exchanges."""
    graphs = final_graphs(cell)[1].train
    targets = [node.target for node in graphs.gm.graph.nodes]
    counts = (targets.count(op) for op in (grouped_mm, exchange))
    return bits_that_differ(train(cell, build_eager(cell)), train(cell, build_graph(cell))), *counts


@pytest.mark.slow
def test_experts_alone_may_be_computed_again_and_nothing_is_sent_again():
    experts = frozenset(f"layers.{i}.moe.experts" for i in range(2))
    cell = Cell(EP2, BF16, **QWEN, num_steps=2)
    kept = run_on(2, differences_and_calls, cell)[0]
    again = run_on(2, differences_and_calls, dataclasses.replace(cell, recompute=Recompute(again=experts)))[0]
    assert kept == ([], 12, 12) and again == ([], 18, 12)


def test_a_rank_that_gets_no_row():
    twist = "one rank gets all rows"
    assert run(Cell(EP2, FP64, **QWEN | ONE_LAYER, **FULL), twist, plain_twist=twist) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [Cell(TP2_EP2, BF16, **DEEPSEEK, **FULL), Cell(EP2_FSDP2, BF16, **QWEN | FEW)],
    ids=["TP-2-EP-2", "EP-2-x-FSDP-2"],
)
def test_every_pass_keeps_its_promise(cell):
    assert run_on(cell.dims.num_ranks, outcome, cell) == [""] * cell.dims.num_ranks


def far_from_plain(cell: Cell, plain: Seen) -> list[str]:
    return far_apart(plain, gathered(cell, train(cell, build_eager(cell))), 1e-12)


@pytest.mark.slow
def test_an_auxiliary_loss_counts_once_where_tensor_parallel_splits_each_expert():
    """Every rank of tensor parallel computes the whole auxiliary loss, and their gradients are added."""
    cell = Cell(TP2, FP64, num_steps=1, **QWEN, **OVER_BATCH)
    one = dataclasses.replace(cell, dims=ONE)
    assert run_on(2, far_from_plain, cell, train(one, build_plain(one))) == [[]] * 2


# --- checkpoints ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "one rank": ONE,
    "FSDP 4": ParallelDims(dp_shard=4),
    "TP 2 x EP 2": TP2_EP2,
    "EP 2 x FSDP 2": EP2_FSDP2,
    "EP 2 x FSDP 2 x TP 2": EP2_ETP2,
}


def with_state(layout: str) -> tuple[dict[str, Tensor], Callable[[Path], Checkpointer]]:
    """Give a model and its optimizer, with numbers that are the same in every layout."""
    model = build_eager(Cell(LAYOUTS[layout], vocab_size=510, **GPT_OSS)).model
    optimizer, schedule = optimizing(model)
    tensors: dict[str, Tensor] = {}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        state = optimizer.state[parameter]
        with torch.no_grad():
            for tensor, factor in ((state["exp_avg"], 2.0), (state["exp_avg_sq"], 3.0)):
                tensor.copy_(parameter * factor + i)
        tensors |= {name: parameter, f"{name}.1": state["exp_avg"], f"{name}.2": state["exp_avg_sq"]}
    where = job.Checkpoint(enable=True)
    return tensors, lambda folder: Checkpointer(folder, where, model, optimizer, schedule)


def save_from(layout: str, folder: Path) -> None:
    _, checkpointer = with_state(layout)
    checkpointer(folder).save(1, {})


def load_into(layout: str, folder: Path) -> list[str]:
    tensors, checkpointer = with_state(layout)
    before = {name: x.detach().clone() for name, x in tensors.items()}
    with torch.no_grad():
        for x in tensors.values():
            x.zero_()
    checkpointer(folder).load()
    return bits_that_differ(before, {name: x.detach() for name, x in tensors.items()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("EP 2 x FSDP 2", "TP 2 x EP 2"),
        ("EP 2 x FSDP 2", "one rank"),
        ("FSDP 4", "EP 2 x FSDP 2"),
        ("TP 2 x EP 2", "EP 2 x FSDP 2 x TP 2"),
    ],
)
def test_a_layout_reads_what_another_saved(saved, loaded, tmp_path):
    """With experts' biases; every pair of layouts, and the data, is in e2e/test_resume_matrix.py."""
    run_on(LAYOUTS[saved].num_ranks, save_from, saved, tmp_path)
    assert run_on(LAYOUTS[loaded].num_ranks, load_into, loaded, tmp_path) == [[]] * LAYOUTS[loaded].num_ranks


# --- the checks can fail ----------------------------------------------------------------------------------------------


def test_rows_grouped_wrongly_are_seen_beside_one_rank_alone():
    different, far = run(Cell(EP2, FP64, **QWEN | ONE_LAYER), "rows not regrouped")
    assert different == [] and any(name.startswith("step 1: loss") for name in far)


@pytest.mark.slow
def test_loads_that_lack_a_part_of_each_row_are_seen_beside_one_rank_alone():
    different, far = run(Cell(TP2_EP2, FP64, **DEEPSEEK), "loads of a part of each row")
    assert different == [] and "step 1: layers.1.moe.load" in far
