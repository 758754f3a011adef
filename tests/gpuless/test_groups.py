"""Flex attention on CUDA takes grouped keys and values as they are: nothing repeats them."""

import pytest
import torch
import torch.distributed as dist
from test_kernels import FLAVORS, HEADS

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, Cell
from torchtitan_graph.graph.edit import value
from torchtitan_graph.graph.traced import TracedResult


def heads(family: str, flavor: str, attn: str) -> set[tuple[int, int]]:
    """Give how many heads of queries and of keys each attention of a step is given."""
    cell = Cell(family=family, flavor=flavor, attn=attn, precision=BF16, changes=HEADS, disabled=("compile_regions",))
    train = matrix.final_graphs(cell)[1].train
    assert isinstance(train, TracedResult)
    found = [n for n in train.gm.graph.nodes if "flex_attention" in str(n.target) or "_scaled_dot" in str(n.target)]
    forward = [n for n in found if n.op == "call_function" and "backward" not in str(n.target)]
    return {(value(n.args[0]).shape[1], value(n.args[1]).shape[1]) for n in forward}


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_keys_are_not_repeated(family: str, flavor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    config = matrix.build_model(Cell(family=family, flavor=flavor)).config
    expected = {(config.num_heads, getattr(config, "num_kv_heads", config.num_heads))}
    assert heads(family, flavor, "flex") == expected
    if expected != {(config.num_heads, config.num_heads)}:  # the search sees a repetition: sdpa's
        assert heads(family, flavor, "sdpa") == {(config.num_heads, config.num_heads)}
