"""Rotary position embedding (Su et al. 2021), halves rotated: the layout of Hugging Face's Llama weights."""

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency scaling: slow waves are stretched by `factor`, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __call__(self, frequencies_H: Tensor) -> Tensor:
        wavelengths_H = 2 * math.pi / frequencies_H
        # 1 where the wave turns often within the original context (keep), 0 where it turns seldom (stretch).
        keep_H = (self.original_context / wavelengths_H - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        keep_H = keep_H.clamp(0.0, 1.0)
        return frequencies_H * (keep_H + (1 - keep_H) / self.factor)


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None, device: torch.device) -> Tensor:
    """Give the angle per position, in radians, of each of the H/2 pairs of a head, in fp32."""
    exponents_H = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies_H = 1.0 / theta**exponents_H
    return frequencies_H if scaling is None else scaling(frequencies_H)


def rope_cos_sin(
    positions_BL: Tensor, head_dim: int, theta: float, scaling: Llama3Scaling | None
) -> tuple[Tensor, Tensor]:
    """Give cosine and sine, each (B, L, 1, H/2) in fp32, of every position's angles.

    They are computed from the positions in every step: the model needs no buffer that would have to be sized,
    sharded or saved, and the cost is that of one layer's elementwise operator.
    """
    frequencies_H = rope_frequencies(head_dim, theta, scaling, positions_BL.device)
    angles_BLH = positions_BL.unsqueeze(-1).float() * frequencies_H
    return angles_BLH.cos().unsqueeze(2), angles_BLH.sin().unsqueeze(2)


def apply_rope(x_BLNH: Tensor, cos_BL1H: Tensor, sin_BL1H: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of every head in fp32 (fp64 stays fp64); give the dtype of `x_BLNH`."""
    first, second = x_BLNH.to(torch.promote_types(x_BLNH.dtype, torch.float32)).chunk(2, dim=-1)
    rotated = torch.cat((first * cos_BL1H - second * sin_BL1H, second * cos_BL1H + first * sin_BL1H), dim=-1)
    return rotated.type_as(x_BLNH)
