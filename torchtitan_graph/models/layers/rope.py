"""Rotary position embedding (Su et al. 2021) and its scalings to longer contexts."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from torchtitan_graph.ops.elementwise import rotate


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (https://arxiv.org/abs/2306.15595): every wavelength is multiplied by `factor`."""

    factor: float
    magnitude = 1.0

    def __call__(self, frequencies_H: Tensor, theta: float) -> Tensor:
        return frequencies_H / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency scaling: long wavelengths are multiplied by `factor`, short ones kept, others blended."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    magnitude = 1.0

    def __call__(self, frequencies_H: Tensor, theta: float) -> Tensor:
        # Number of periods within the original context.
        turns_H = self.original_context * frequencies_H / (2 * math.pi)
        if self.low_freq_factor >= self.high_freq_factor:
            keep_H = (turns_H >= self.low_freq_factor).to(frequencies_H)
        else:
            keep_H = (turns_H - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep_H = keep_H.clamp(0.0, 1.0)  # 1 for short wavelengths (keep), 0 for long ones (stretch)
        return frequencies_H * (keep_H + (1 - keep_H) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): pairs that turn more than `beta_fast` times within the original context
    are kept, those that turn less than `beta_slow` times stretched by `factor`, those between blended by their index.

    truncate   round the numbers of the first and the last blended pair outwards to integers
    magnitude  multiplies cosine and sine: attention's logits then change by its square
    """

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 4096
    truncate: bool = True
    magnitude: float = 1.0

    def __call__(self, frequencies_H: Tensor, theta: float) -> Tensor:
        width = 2 * len(frequencies_H)
        first, last = (self._pair(turns, width, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs_H = torch.arange(len(frequencies_H), device=frequencies_H.device, dtype=torch.float32)
        stretch_H = ((pairs_H - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
        return frequencies_H * (1 - stretch_H) + frequencies_H / self.factor * stretch_H

    def _pair(self, turns: float, width: int, theta: float) -> float:
        """Return the index of the pair (fractional) that turns this often within the original context."""
        return width * math.log(self.original_context / (2 * math.pi * turns)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's correction of attention's temperature for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling


def rope_frequencies(head_dim: int, theta: float, scaling: Scaling | None, device: torch.device) -> Tensor:
    """Return the angle per position, in radians, of each of the H/2 pairs of a head, in fp32."""
    exponents_H = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies_H = 1.0 / theta**exponents_H
    return frequencies_H if scaling is None else scaling(frequencies_H, theta)


def rope_cos_sin(
    positions_BL: Tensor, head_dim: int, theta: float, scaling: Scaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each (B, L, 1, H/2) in fp32, of every position's angles.

    They are computed from the positions in every step: the model needs no buffer that would have to be sized,
    sharded or saved, and the cost is that of one layer's elementwise operator.
    """
    frequencies_H = rope_frequencies(head_dim, theta, scaling, positions_BL.device)
    angles_BLH = positions_BL.unsqueeze(-1).float() * frequencies_H
    cos, sin = angles_BLH.cos().unsqueeze(2), angles_BLH.sin().unsqueeze(2)
    if scaling is None or scaling.magnitude == 1.0:
        return cos, sin
    return cos * scaling.magnitude, sin * scaling.magnitude


def apply_rope(x_BLNH: Tensor, cos_BL1H: Tensor, sin_BL1H: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of every head in fp32 (fp64 stays fp64); return them in the dtype of `x_BLNH`.

    Pair i is features (i, i + H/2), as Hugging Face's Llama lays its weights out; or, interleaved, (2i, 2i + 1).
    """
    x = x_BLNH.to(torch.promote_types(x_BLNH.dtype, torch.float32))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    turned = (first * cos_BL1H - second * sin_BL1H, second * cos_BL1H + first * sin_BL1H)
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return rotated.type_as(x_BLNH)


class Rotation(nn.Module):
    """`apply_rope` as a module, so that it has a name in the graph.

    is_fused  computed by one operator, see elementwise.py
    """

    is_fused = False

    def __init__(self, *, interleaved: bool = False):
        super().__init__()
        self.interleaved = interleaved

    def forward(self, x_BLNH: Tensor, cos_BL1H: Tensor, sin_BL1H: Tensor) -> Tensor:
        if self.is_fused and not (cos_BL1H.requires_grad or sin_BL1H.requires_grad):
            return rotate(x_BLNH, cos_BL1H, sin_BL1H, self.interleaved, False)
        return apply_rope(x_BLNH, cos_BL1H, sin_BL1H, interleaved=self.interleaved)
