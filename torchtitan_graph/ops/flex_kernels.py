"""Block sizes of compiled flex attention's GPU kernels, for heads at which torch's own kernels spill registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Heads(NamedTuple):
    capability: tuple[int, int]
    dtype: torch.dtype
    width: int  # of queries and keys


# Values of `kernel_options`; missing ones stay torch's. Each was chosen as the nearest to torch's own that spills next
# to nothing, by tests/gpuless/test_compiled.py, for an A100 (8.0) and an H100 (9.0), and for the heads of released
# models. Products in fp32 use no tensor cores: with torch's block sizes, eight warps can't hold the sums.
_WARPS = {"bwd_num_warps": 8}
_FP32 = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_warps": 8, **_WARPS}
_SMALL = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32}
_LONG = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32}
_BLOCKS = {
    _Heads((8, 0), torch.float32, 64): _FP32,
    _Heads((8, 0), torch.float32, 128): _FP32,
    _Heads((8, 0), torch.float32, 192): _FP32,
    _Heads((8, 0), torch.bfloat16, 64): _SMALL,
    _Heads((8, 0), torch.bfloat16, 128): _WARPS,
    _Heads((8, 0), torch.bfloat16, 192): _SMALL | _WARPS,
    _Heads((9, 0), torch.float32, 64): _FP32,
    _Heads((9, 0), torch.float32, 128): _FP32 | {"fwd_BLOCK_N": 64},
    _Heads((9, 0), torch.float32, 192): _FP32,
    _Heads((9, 0), torch.bfloat16, 64): {"fwd_num_warps": 8},
    _Heads((9, 0), torch.bfloat16, 128): _LONG | _WARPS,
    _Heads((9, 0), torch.bfloat16, 192): _SMALL | _WARPS,
}


def flex_kernel_options(q_BNLH: Tensor, own_blocks: bool = True) -> dict[str, Any]:
    """Return the `kernel_options` of flex attention for these queries, in eager and in a graph.

    Always the training kernel: for rows under 128 tokens torch chooses one for decoding, which refuses groups of heads
    with more queries than a block of the mask. And block sizes of our own, where some are known to be better.
    """
    if not (q_BNLH.device.type == "cuda" and torch.cuda.is_available()):
        return {}  # a dry run for a GPU may have none
    heads = _Heads(torch.cuda.get_device_capability(q_BNLH.device), q_BNLH.dtype, q_BNLH.shape[3])
    return {"BACKEND": "TRITON"} | (_BLOCKS.get(heads, {}) if own_blocks else {})
