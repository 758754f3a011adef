"""Block-quantized weights of DeepSeek's and gpt_oss's releases, read as dequantized tensors.

- fp8: `X.weight` in float8_e4m3fn, and `X.weight_scale_inv`, an fp32 factor for each block of 128 x 128.
- MXFP4: `X_blocks` (E, rows, groups, 16) in uint8, each two fp4 numbers, the low four bits first; `X_scales`
  (E, rows, groups) in uint8, the exponents of two, biased by 127, of groups of 32 numbers. The dequantized tensor is
  transposed: `X` (E, groups * 32, rows). https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.hf.files import Folder, Ranges

FP8_BLOCK, MXFP4_GROUP = 128, 32
# The sixteen numbers of fp4 e2m1: a sign bit, two of exponent, one of mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class DequantizedFolder:
    """A `Folder` whose quantized tensors are read as fp32, slice by slice; the others unchanged."""

    def __init__(self, folder: Folder):
        """Wrap a folder, and check its quantized tensors.

        Raises:
            UserError: there are not as many scales as blocks of 128 x 128, so the blocks have another size.
        """
        self.path = folder.path
        self._folder = folder
        names = folder.names()
        self._fp8 = {name for name in names if folder.dtype(name) == "F8_E4M3" and f"{name}_scale_inv" in names}
        blocks = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
        self._mxfp4 = {name for name in blocks if f"{name}_scales" in names}
        parts = {f"{name}_scale_inv" for name in self._fp8}
        parts |= {name + suffix for name in self._mxfp4 for suffix in ("_blocks", "_scales")}
        self._plain = names - self._fp8 - parts
        for name in sorted(self._fp8):
            shape, scales = folder.shape(name), folder.shape(f"{name}_scale_inv")
            if len(shape) != 2 or scales != tuple(-(-size // FP8_BLOCK) for size in shape):
                raise _misfit(folder, name, shape, scales, {"F8_E4M3"})
        for name in sorted(self._mxfp4):
            shape, scales = folder.shape(f"{name}_blocks"), folder.shape(f"{name}_scales")
            kinds = {folder.dtype(name + suffix) for suffix in ("_blocks", "_scales")}
            if len(shape) != 4 or shape != (*scales, MXFP4_GROUP // 2) or kinds != {"U8"}:
                raise _misfit(folder, name, shape, scales, kinds)

    def quantized(self) -> set[str]:
        """Return the names of the tensors that are quantized in the files."""
        return self._fp8 | self._mxfp4

    def names(self) -> set[str]:
        return self._plain | self.quantized()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._mxfp4:
            return self._folder.shape(name)
        experts, rows, groups, _ = self._folder.shape(f"{name}_blocks")
        return experts, groups * MXFP4_GROUP, rows

    def dtype(self, name: str) -> str:
        return "F32" if name in self.quantized() else self._folder.dtype(name)

    def read(self, name: str, ranges: Ranges) -> Tensor:
        if name in self._fp8:
            return self._read_fp8(name, ranges)
        if name in self._mxfp4:
            return self._read_mxfp4(name, ranges)
        return self._folder.read(name, ranges)

    def _read_fp8(self, name: str, ranges: Ranges) -> Tensor:
        scale_name = f"{name}_scale_inv"
        scale = self._folder.read(scale_name, [(0, size) for size in self._folder.shape(scale_name)])
        rows, columns = (torch.arange(*r) // FP8_BLOCK for r in ranges)
        return self._folder.read(name, ranges).float() * scale.float()[rows][:, columns]

    def _read_mxfp4(self, name: str, ranges: Ranges) -> Tensor:
        experts, (begin, end), rows = ranges
        groups = (begin // MXFP4_GROUP, -(-end // MXFP4_GROUP))
        blocks = self._folder.read(f"{name}_blocks", [experts, rows, groups, (0, MXFP4_GROUP // 2)])
        scales = self._folder.read(f"{name}_scales", [experts, rows, groups])
        first = groups[0] * MXFP4_GROUP
        return dequantize_mxfp4(blocks, scales)[:, begin - first : end - first]


def _misfit(folder: Folder, name: str, shape: tuple[int, ...], scales: tuple[int, ...], dtypes: set[str]) -> UserError:
    return UserError(
        f"{folder.path}: {name} of shape {list(shape)!s:.100} and dtype {', '.join(sorted(dtypes))} has scales of shape"
        f" {list(scales)!s:.100}: blocks are of 128 x 128 numbers in F8_E4M3, or of 32 (16 bytes, U8) in MXFP4"
    )


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 numbers (E, groups * 32, rows) of blocks (E, rows, groups, 16) and scales (E, rows, groups)."""
    table = torch.tensor(FP4)
    numbers = torch.stack((table[(blocks & 0xF).int()], table[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(-2).transpose(-1, -2)
