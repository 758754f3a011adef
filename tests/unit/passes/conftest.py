from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_graph.graph.torch_private import init_fake_process_group
from torchtitan_graph.parallel.mesh import ParallelDims


@pytest.fixture
def mesh_of() -> Iterator[Callable[..., DeviceMesh]]:
    """Give `mesh_of(dp_shard=4, ...)`: the mesh of ranks of which only this one is there; nothing is sent."""

    def make(**degrees: int) -> DeviceMesh:
        dims = ParallelDims(**degrees)
        init_fake_process_group(dims.num_ranks)
        return dims.mesh("cpu")

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
