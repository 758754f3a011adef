"""Layers that multiply in 8 bits, for models written with them; `model.converters` converts any model's."""

from torchtitan_graph.quantize.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from torchtitan_graph.quantize.products import Recipe
from torchtitan_graph.quantize.state import refresh

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear", "Recipe", "refresh"]
