from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Destroy the process group of `matrix.fake_layout`."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
