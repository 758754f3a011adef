from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.torch_private.distributed import init_fake_process_group


@pytest.fixture
def layout_of() -> Iterator[Callable[..., Layout]]:
    """Give `layout_of(dp_shard=4, ...)`: the layout of ranks of which only this one is there; nothing is sent."""

    def make(**degrees: int) -> Layout:
        dims = ParallelDims(**degrees)
        init_fake_process_group(dims.num_ranks)
        return dims.layout("cpu")

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
