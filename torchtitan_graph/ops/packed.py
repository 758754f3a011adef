"""Frozen weights in 4 or 8 bits: numbers packed in blocks along a row, each with its own scale.

Note [Packed weights]
A packed weight (..., F, D) is bytes (..., F, D / 64 * n): for each 64 numbers of a row their codes, then the scale that
the codes are multiplied by, in fp32. A block lies together, so rows and columns of blocks are cut, gathered and stored
as any other tensor's, and every layout has the same codes.

nf4      4 bits a number, two in a byte, the first in the high ones: the nearest of 16 levels, quantiles of the normal
         distribution between -1 and 1 (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), times the block's
         largest magnitude. The levels and the rounding are those of bitsandbytes, without its second quantisation, of
         the scales. n = 36
float8   float8_e4m3fn, scaled so that the block's largest magnitude is the format's. n = 68
"""

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import operator

BLOCK = 64  # numbers that share a scale
_SCALE_BYTES = 4
_CODE_BYTES = {"nf4": BLOCK // 2, "float8": BLOCK}
PACKINGS = tuple(_CODE_BYTES)
_E4M3 = torch.float8_e4m3fn
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# A number takes the higher of two levels if it is above the threshold between them.
_THRESHOLDS = (
    *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984),
    *(-0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668),
    *(0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
)


def bytes_of_block(packing: str) -> int:
    """Return the bytes of 64 numbers, with their scale."""
    return _CODE_BYTES[packing] + _SCALE_BYTES


def packed_shape(shape: torch.Size, packing: str) -> torch.Size:
    """Return the shape of the bytes of a weight; its rows' length is a multiple of BLOCK."""
    assert shape[-1] % BLOCK == 0, shape
    return torch.Size([*shape[:-1], shape[-1] // BLOCK * bytes_of_block(packing)])


def wide_shape(shape: torch.Size, packing: str) -> torch.Size:
    """Return the shape of the weight that has such bytes."""
    return torch.Size([*shape[:-1], shape[-1] // bytes_of_block(packing) * BLOCK])


@torch.no_grad()
def pack(wide: Tensor, packing: str) -> Tensor:
    """Return the bytes of a weight (..., D), see Note [Packed weights]."""
    blocks = wide.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    if packing == "nf4":
        scaled = blocks * torch.where(largest > 0, 1 / largest, 0.0)
        codes = torch.bucketize(scaled, torch.tensor(_THRESHOLDS, device=wide.device)).to(torch.uint8)
        codes, scale = codes[..., ::2] << 4 | codes[..., 1::2], largest
    else:
        scale = largest / torch.finfo(_E4M3).max
        scaled = torch.where(largest > 0, blocks / scale, 0.0)
        codes = scaled.to(_E4M3).view(torch.uint8)
    return torch.cat([codes, scale.contiguous().view(torch.uint8)], -1).flatten(-2)


def _fake_unpack(packed: Tensor, packing: str, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(wide_shape(packed.shape, packing), dtype=dtype)


@operator(_fake_unpack)
def unpack(packed: Tensor, packing: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a packed weight: (..., D / 64 * n) bytes -> (..., D) of a dtype. Codes are multiplied by
    their scales in fp32."""
    num_codes = _CODE_BYTES[packing]
    blocks = packed.contiguous().unflatten(-1, (-1, num_codes + _SCALE_BYTES))
    codes, scale = blocks[..., :num_codes], blocks[..., num_codes:].contiguous().view(torch.float32)
    if packing == "nf4":
        levels = torch.tensor(_LEVELS, device=packed.device)
        pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], -1)  # of each byte
        numbers = pairs[codes.int()].flatten(-2)
    else:
        numbers = codes.contiguous().view(_E4M3).float()
    return numbers.mul_(scale).to(dtype).flatten(-2)
