"""What a graph sends, against what its layout must send at least."""

import pytest
import torch
from toy import Toy, blocks, trace_toy

from torchtitan_graph.graph.traffic import traffic
from torchtitan_graph.parallel.layout import DP_REPLICATE, FSDP
from torchtitan_graph.parallel.storage import Precision, buckets, plan_storage
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.shard_params import shard_params


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
