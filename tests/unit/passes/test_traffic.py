"""What a graph sends, against what its layout must send at least."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import Toy, blocks, trace_toy

from torchtitan_graph.analysis.traffic import traffic
from torchtitan_graph.check.matrix import NUM_ROWS, SEQ_LEN, Cell, build_model
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import CP, DP_REPLICATE, EP, EXPERT_FSDP, FSDP, TP, Layout, ParallelDims
from torchtitan_graph.parallel.storage import Precision, buckets, plan_storage
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.steps import Assembly, build_graphs


@pytest.mark.parametrize("bucketed", [False, True])
def test_hybrid_sharding_sends_its_minimum(layout_of, bucketed: bool) -> None:
    with torch.device("meta"):
        model = Toy()
    layout = layout_of(dp_replicate=2, dp_shard=4)
    storages = plan_storage(model, layout, Precision())
    gm = shard_params(trace_toy(model), storages)
    if bucketed:
        gm = bucket_collectives(gm, buckets(model, blocks()))
    shards = 4 * sum(storage.padded_shape.numel() for storage in storages.values())
    found = traffic(gm, layout.axes_by_group)
    assert {key: sent.num_bytes for key, sent in found.items()} == {
        (FSDP, "all_gather_into_tensor"): 3 * shards,  # nothing is gathered again here
        (FSDP, "reduce_scatter_tensor"): 3 * shards,
        (DP_REPLICATE, "all_reduce"): shards,
    }
    known = {name: axis for name, axis in layout.axes_by_group.items() if axis[0] == FSDP}
    assert {axis for axis, _ in traffic(gm, known)} == {FSDP}  # a group that is not an axis: of a user's pass


# --- of whole models, by axis ----------------------------------------------------------------------------------------

D, T, FP32 = 64, NUM_ROWS * SEQ_LEN, 4
EVEN: dict[str, Any] = {"vocab_size": 512, "ffn_dim": 128}  # nothing is padded


def sent_by(cell: Cell, layout: Layout) -> dict[str, dict[str, int]]:
    """Give the bytes that a rank receives in a microbatch by axis and kind; but for a pipeline, those of a step."""
    model = build_model(cell)
    train = build_graphs(Assembly(model, load_family(cell.family), layout, cell.options("graph"))).train
    parts = train.values() if isinstance(train, dict) else ()
    graphs = [part.gm for stage in parts for part in stage.parts.by_name.values()] or [train.gm]
    found: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for gm in graphs:
        for (axis, kind), sent in traffic(gm, layout.axes_by_group).items():
            found[axis][kind] = found[axis].get(kind, 0) + sent.num_bytes
    return found


def num_bytes(cell: Cell, matching: Callable[[str], bool] = lambda name: True) -> int:
    return FP32 * sum(p.numel() for name, p in build_model(cell).named_parameters() if matching(name))


def test_shards_are_gathered_twice_in_blocks_and_once_outside(layout_of) -> None:
    """Once for forward is the minimum; blocks free what they gathered, and gather it again for backward."""
    cell = Cell(ParallelDims(dp_shard=4), **EVEN)
    found, received = sent_by(cell, layout_of(dp_shard=4)), num_bytes(cell) * 3 // 4
    again = num_bytes(cell, lambda name: name.startswith("layers.")) * 3 // 4
    assert found == {FSDP: {"all_gather_into_tensor": received + again, "reduce_scatter_tensor": received}}


def test_tensor_parallel_sends_two_gathers_and_two_sums_a_block_and_direction(layout_of) -> None:
    """Besides, a sum for the gradient of each norm, and for the loss three numbers a token of each other rank: the
    largest logit, the logarithm of the sum of exponentials, the target's logit. The embedding sums and the output
    gathers, backward the opposite."""
    cell = Cell(ParallelDims(tp=4), num_microbatches=2, changes=(("num_kv_heads", 4),), **EVEN)
    found = sent_by(cell, layout_of(tp=4))
    activations = T // 2 * D * FP32 * 3 // 4
    assert found == {
        TP: {
            "all_gather_into_tensor": (3 * 4 + 2) * activations + 3 * 3 * (T // 2) * FP32,
            "reduce_scatter_tensor": (3 * 4 + 2) * activations,
            "all_reduce": 7 * D * FP32 * 2 * 3 // 4,
        }
    }


@pytest.mark.parametrize(
    ("family", "width"),
    [
        ("llama3", 2 * 2 * 16),  # keys and values of two heads
        pytest.param("deepseek_v3", 24 + 8, marks=pytest.mark.slow),  # a latent and a rotated key
    ],
)
def test_context_parallel_gathers_keys_and_values_once_a_block(layout_of, family: str, width: int) -> None:
    """As a ring would: each rank must see the others' once, and in backward get the others' gradients of its own."""
    cell = Cell(ParallelDims(dp_shard=2, cp=4), family=family, **EVEN)
    of_rank = T // 2 * width * FP32 * 3 // 4
    found = sent_by(cell, layout_of(dp_shard=2, cp=4))
    assert found[CP] == {"all_gather_into_tensor": 3 * of_rank, "reduce_scatter_tensor": 3 * of_rank}


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(dp_shard=4, ep=2),
        pytest.param(ParallelDims(dp_shard=2, tp=2, ep=2, etp=2), marks=pytest.mark.slow),
    ],
)
def test_expert_parallel_sends_each_row_there_and_back(layout_of, dims: ParallelDims) -> None:
    """In each direction, on the mean of all routings. A token both of whose experts lie on one rank travels twice,
    more than it must: each copy comes back as a row of its own, and is weighed where it came from. Each rank also says
    once how many rows it sends to each expert."""
    cell = Cell(dims, family="deepseek_v3", changes=(("moe_ffn_dim", 32),), **EVEN)
    found = sent_by(cell, layout_of(**dataclasses.asdict(dims)))
    num_layers, num_experts, rows = 2, 6, T // dims.data * 2  # the first layer is dense; each token has two experts
    assert found[EP] == {
        "exchange": num_layers * (4 * rows * D + 2 * rows) * FP32 // 2,  # a row's score, its gradient
        "all_to_all_single": num_layers * num_experts * 8 // 2,
    }
    if dims.tp == 1:
        received = num_bytes(cell, lambda name: ".experts." in name) // 2 // 2  # half are here, on two ranks
        assert found[EXPERT_FSDP] == {"all_gather_into_tensor": 2 * received, "reduce_scatter_tensor": received}


@pytest.mark.parametrize(("schedule", "borders"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_a_pipeline_sends_activations_across_the_borders_of_its_ranks_and_weights_once_a_step(
    layout_of, schedule: str, borders: int
) -> None:
    cell = Cell(
        ParallelDims(pp=2, dp_shard=2),
        num_microbatches=4,
        pipeline=(("pipeline_parallel_schedule", schedule),),
        **EVEN | {"changes": (("num_layers", 4),)},
    )
    layout, plan = layout_of(pp=2, dp_shard=2), cell.schedule()
    assert plan is not None
    for actions in plan.actions:  # forward one way, backward the other
        received = [action for action in actions if action.kind.startswith("RECV")]
        assert len(received) == borders * cell.num_microbatches
    names = [name for number in plan.stages_of(0) for name in plan.stages[number]]
    here = num_bytes(cell, lambda name: name.startswith(tuple(f"{each}." for each in names))) // 2
    assert sent_by(cell, layout) == {FSDP: {"all_gather_into_tensor": here, "reduce_scatter_tensor": here}}
