"""Attention on CUDA takes grouped keys and values as they are: nothing repeats them, where a kernel has groups."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from test_kernels import FLAVORS, HEADS

from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.graph.edit import value


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    yield
    torch.use_deterministic_algorithms(False)


def heads(cell: Cell) -> set[tuple[str, int, int]]:
    """Give each attention of a step, and how many heads of queries and of keys it is given."""
    train = matrix.final_graphs(cell)[1].train
    assert isinstance(train, TracedResult)
    found = [n for n in train.gm.graph.nodes if "flex_attention" in str(n.target) or "_scaled_dot" in str(n.target)]
    forward = [n for n in found if n.op == "call_function" and "backward" not in str(n.target)]
    return {(str(n.target), value(n.args[0]).shape[1], value(n.args[1]).shape[1]) for n in forward}


def of_config(family: str, flavor: str) -> tuple[int, int]:
    config = matrix.build_model(Cell(family=family, flavor=flavor)).config
    return config.num_heads, getattr(config, "num_kv_heads", config.num_heads)


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_flex_attention_repeats_no_keys(family: str, flavor: str) -> None:
    cell = Cell(family=family, flavor=flavor, attn="flex", precision=BF16, changes=HEADS, disabled=("compile_regions",))
    assert {(queries, keys) for _, queries, keys in heads(cell)} == {of_config(family, flavor)}


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_sdpa_repeats_keys_where_no_fused_kernel_shares_them(family: str, flavor: str) -> None:
    """Or where each head has a sink; and no kernel that holds every score is taken, which has no operator of its own.
    The search sees a repetition: that of fp32."""
    cell = Cell(family=family, flavor=flavor, precision=BF16, changes=HEADS)
    all_heads, key_heads = of_config(family, flavor)
    shared = all_heads if family == "gpt_oss" else key_heads
    assert heads(cell) == {("aten._scaled_dot_product_cudnn_attention.default", all_heads, shared)}
    repeated = {("aten._scaled_dot_product_efficient_attention.default", all_heads, all_heads)}
    assert heads(dataclasses.replace(cell, precision=FP32)) == repeated
    torch.use_deterministic_algorithms(True)
    assert heads(cell) == repeated
