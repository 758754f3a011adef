"""Quantisation by torch's own operators, for comparison."""

import torch
from torch import Tensor

from torchtitan_graph.quantize.products import largest, quantize, scale_for


def quantized(x: Tensor, dtype: torch.dtype, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise by the tensor's own scale, or its rows'; return the scale too."""
    scale = scale_for(largest(x, by_row), dtype)
    return quantize(x, scale, dtype), scale
