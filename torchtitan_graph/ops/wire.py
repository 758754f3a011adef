"""Custom operators: rows as they travel between ranks, in their own dtype or in float8.

Note [Rows in float8]
A row's numbers are divided by a scale for each 128 of them, the largest of their magnitudes over e4m3's largest number,
and rounded to e4m3; the fp32 scales travel behind them as bytes of the same row, so that it is one message. Zeros
stay zeros; a number that is not finite makes its 128 not numbers, so that the step is skipped.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.ops.operator import operator

BLOCK = 128  # numbers of a scale
_LEAST = 1e-30  # magnitude that is scaled up to the largest number
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SCALE = torch.float32.itemsize


def _num_bytes(width: int) -> int:
    return width + -width % _SCALE + -(-width // BLOCK) * _SCALE


@operator(lambda x_SD: x_SD.new_empty(x_SD.shape[0], _num_bytes(x_SD.shape[1]), dtype=torch.uint8))
def to_float8_bytes(x_SD: Tensor) -> Tensor:
    """Return rows in float8 with their scales, as bytes. See Note [Rows in float8]."""
    (S, D), pad = x_SD.shape, -x_SD.shape[1] % BLOCK
    if x_SD.is_cuda:
        from torchtitan_graph.ops.float8_kernels import write_bytes

        out_SB = x_SD.new_empty(S, _num_bytes(D), dtype=torch.uint8)
        write_bytes(out_SB, x_SD, D + -D % _SCALE, BLOCK, _LEAST)
        return out_SB
    blocks = F.pad(x_SD.float(), (0, pad)).view(S, (D + pad) // BLOCK, BLOCK)
    scales = blocks.abs().amax(2).clamp(min=_LEAST) / _LARGEST
    numbers = (blocks / scales.unsqueeze(2)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(S, D + pad)[:, :D]
    padded = F.pad(numbers.contiguous().view(torch.uint8), (0, -D % _SCALE))
    scales = scales.clone(memory_format=torch.contiguous_format)  # of one block the stride may be 0
    return torch.cat([padded, scales.view(torch.uint8)], 1)


@operator(lambda bytes_SB, width, dtype: bytes_SB.new_empty(bytes_SB.shape[0], width, dtype=dtype))
def of_float8_bytes(bytes_SB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of such bytes, in a dtype."""
    S, pad = bytes_SB.shape[0], -width % BLOCK
    if bytes_SB.is_cuda:
        from torchtitan_graph.ops.float8_kernels import write_of_bytes

        out_SD = bytes_SB.new_empty(S, width, dtype=dtype)
        write_of_bytes(out_SD, bytes_SB, width + -width % _SCALE, BLOCK)
        return out_SD
    numbers = bytes_SB[:, :width].contiguous().view(torch.float8_e4m3fn).float()
    scales = bytes_SB[:, width + -width % _SCALE :].contiguous().view(torch.float32)
    blocks = F.pad(numbers, (0, pad)).view(S, (width + pad) // BLOCK, BLOCK)
    return (blocks * scales.unsqueeze(2)).view(S, width + pad)[:, :width].to(dtype).contiguous()


@dataclasses.dataclass(frozen=True)
class Wire:
    """How rows travel to experts: `width` numbers in float8, or as they are (0)."""

    width: int = 0

    def packed(self, x: Tensor) -> Tensor:
        """Return rows as they travel."""
        return to_float8_bytes(x) if self.width else x

    def unpacked(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows that have travelled, in their dtype."""
        return of_float8_bytes(rows, self.width, dtype) if self.width else rows
