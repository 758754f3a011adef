"""Graphs that were stored are, node for node, those that a rank traces; and which ranks have the same."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from matrix import BF16, CPU, SEED, Cell, assemble, bits_that_differ, build_graph, fake_layout, layout_of, train
from torch.fx import GraphModule

from pool import run_on
from torchtitan_graph.capture.trace import make_fx_capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.formats.as_data import traced_from_data
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.steps import build_steps, rewrite_steps
from torchtitan_graph.steps.precompiled import Rewritten, Writer, open_precompiled, ranks_to_trace, steps_to_data


def cell(layers: int = 1, *changes: tuple[str, object], **given: Any) -> Cell:
    return Cell(changes=(("num_layers", layers), *changes), **given)


DIMS = ParallelDims
LOSSES = AuxiliaryLoss(load_balance=0.1, by_sequence=False, router_z=0.01)
WORLDS = {
    "EP, one layer": cell(family="qwen3", flavor="debugmodel_moe", dims=DIMS(dp_shard=2, ep=2), auxiliary=LOSSES),
    "PP": cell(2, dims=DIMS(pp=2), num_microbatches=4),
}
SLOW = {
    "TP, flex": cell(dims=DIMS(tp=2), attn="flex"),
    "HSDP, bf16": cell(dims=DIMS(dp_replicate=2, dp_shard=2), precision=BF16, cpu_offload=True),
    "EP": cell(2, family="qwen3", flavor="debugmodel_moe", dims=DIMS(dp_shard=2, ep=2), auxiliary=LOSSES),
    "CP and TP, flex": cell(family="gpt_oss", dims=DIMS(cp=2, tp=2), attn="flex"),
    "FSDP 4": cell(dims=DIMS(dp_shard=4)),
    "EP, experts once, in pairs": cell(
        2,
        family="qwen3",
        flavor="debugmodel_moe",
        dims=DIMS(dp_shard=2, ep=2),
        num_microbatches=4,
        once="experts",
        pairs=True,
    ),  # fmt: skip
    "FSDP, within segments": cell(4, family="llama4", dims=DIMS(dp_shard=2), attn="varlen"),
    "FSDP and TP": cell(dims=DIMS(dp_shard=2, tp=2)),
    "DDP": cell(dims=DIMS(dp_replicate=2)),
    "TP, logits gathered": cell(dims=DIMS(tp=2), loss_parallel=False),
    "HSDP, CP and TP": cell(family="gpt_oss", dims=DIMS(dp_replicate=2, dp_shard=2, cp=2, tp=2), attn="flex"),
    "EP over TP": cell(2, family="qwen3", flavor="debugmodel_moe", dims=DIMS(dp_shard=2, tp=2, ep=2)),
    "CP, EP and expert TP": cell(family="gpt_oss", dims=DIMS(dp_shard=2, cp=2, tp=2, ep=2, etp=2), precision=BF16),
    "HSDP and EP": cell(3, family="deepseek_v3", dims=DIMS(dp_replicate=2, dp_shard=2, ep=2)),
    "llama4, FSDP and EP": cell(4, family="llama4", dims=DIMS(dp_shard=4, ep=2)),
    "PP, FSDP and TP": cell(2, dims=DIMS(pp=2, dp_shard=2, tp=2), num_microbatches=2),
    "PP interleaved, FSDP": cell(
        4,
        dims=DIMS(pp=2, dp_shard=2),
        num_microbatches=2,
        pipeline=(("pipeline_parallel_schedule", "Interleaved1F1B"),),
    ),
    "PP and EP": cell(
        4, family="qwen3", flavor="debugmodel_moe", dims=DIMS(pp=2, dp_shard=2, ep=2), num_microbatches=2
    ),
}


def rewritten(cell: Cell) -> tuple[dict[int, Rewritten], Any]:
    options = cell.options("graph")
    options = dataclasses.replace(options, eval_rows=options.rows)
    capture = partial(make_fx_capture, call_hierarchy=True)
    return rewrite_steps(assemble(cell, options, capture))


def lines(gm: GraphModule) -> list[Any]:
    """Give all that is known of a graph's nodes."""
    found: list[Any] = []
    for node in gm.graph.nodes:
        held = getattr(gm, str(node.target)) if node.op == "get_attr" else None
        if isinstance(held, GraphModule):
            held = lines(held)
        elif isinstance(held, torch.Tensor):
            held = (held.dtype, held.device, tuple(held.shape), held.tolist())
        values, spec = pytree.tree_flatten(node.meta.get("val"))
        layouts = [
            (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device, x.untyped_storage().nbytes())
            if isinstance(x, torch.Tensor)
            else x
            for x in values
        ]
        types = [type(x) for x in pytree.tree_leaves((node.args, node.kwargs))]
        origin = [node.meta.get(key) for key in (*meta.KEYS, *meta.HIERARCHIES, "custom")]
        target = node.target if node.op == "call_function" else str(node.target)
        found.append(
            (node.op, node.name, target, repr(node.args), repr(node.kwargs), types, layouts, str(spec), origin, held)
        )
    return found


def described(step: TracedResult) -> dict[str, Any]:
    """Return all that a step is, but for the classes of the module it was traced from: of a stored step these are not
    compared when it is bound, for the sources are in its fingerprint."""
    found = {field.name: getattr(step, field.name) for field in dataclasses.fields(step) if field.name != "classes"}
    return found | {"gm": lines(step.gm), "signature": signature_of(step.gm)}


def examples(traced: TracedResult) -> list[Any]:
    """Give leaves like those that a step was traced with."""
    tensors = iter([x for x in signature_of(traced.gm).inputs if x.kind == "input"])
    return [
        traced.constants[i]
        if i in traced.constants
        else torch.empty(x.layout.shape, dtype=x.layout.dtype, device="meta")
        for i, x in ((i, None if i in traced.constants else next(tensors)) for i in range(len(traced.names)))
    ]


@pytest.mark.parametrize(
    "name", ["PP", *(pytest.param(name, marks=pytest.mark.slow) for name in (WORLDS | SLOW) if name != "PP")]
)
def test_what_is_stored_is_what_each_rank_traces(name: str) -> None:
    """As data, of one rank of a kind, and read again, node for node."""
    cell = (WORLDS | SLOW)[name]
    kinds = {rank: place for place, rank in ranks_to_trace(cell.dims).items()}
    of_kind: dict[Any, bytes] = {}
    for rank in range(cell.dims.num_ranks):
        layout = fake_layout(cell.dims, rank)
        place = layout.rank("pp"), layout.rank("tp")
        steps, storages = rewritten(cell)
        text = steps_to_data(steps, layout, storages, CPU)
        assert kinds.get(rank, place) == place
        assert text == of_kind.setdefault(place, text), f"rank {rank}"
    assert of_kind.keys() == set(kinds.values())
    for number, training, evaluation, flops, _ in json.loads(of_kind[place]):
        mine = steps[number]
        assert flops == [mine.flops.matmul, dict(mine.flops.attention)]
        for data, traced in ((training, mine.train), (evaluation, mine.evaluate)):
            assert traced is not None
            like = pytree.tree_unflatten(examples(traced), traced.in_spec)[0]
            again = traced_from_data(data, like, {}, layout.groups_by_place, CPU, storages)
            assert described(again) == described(traced)


def compared(cell: Cell, folder: Path) -> list[str]:
    """Name what differs between training on stored graphs and on traced ones, on this rank of a pool."""
    layout, options = layout_of(cell.dims), cell.options("graph")
    steps, storages = rewrite_steps(assemble(cell))
    writer = Writer(folder / str(dist.get_rank()), {})
    writer.add((layout.rank("pp"), layout.rank("tp")), steps_to_data(steps, layout, storages, CPU))
    writer.finish()
    options = dataclasses.replace(options, precompiled=open_precompiled(writer.folder, {}, ""))
    again = build_steps(assemble(cell, options))
    initialize(again.model, SEED)
    return bits_that_differ(train(cell, build_graph(cell)), train(cell, again))


@pytest.mark.parametrize("name", ["PP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("EP", "PP and EP"))])
def test_stored_graphs_train_to_the_same_bits(name: str, tmp_path: Path) -> None:
    cell = dataclasses.replace((WORLDS | SLOW)[name], num_steps=2)
    assert run_on(cell.dims.num_ranks, compared, cell, tmp_path) == [[]] * cell.dims.num_ranks


def test_the_comparison_sees_another_number() -> None:
    """The control: one constant of one operator."""
    found = []
    for eps in (1e-5, 1e-6):
        each = cell(1, ("norm_eps", eps))
        layout = fake_layout(each.dims)
        steps, storages = rewritten(each)
        found.append((lines(steps[0].train.gm), steps_to_data(steps, layout, storages, CPU)))
    (mine, text), (theirs, other) = found
    assert len(mine) == len(theirs) and mine != theirs and text != other
