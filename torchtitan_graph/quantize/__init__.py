"""Layers whose products are of 8-bit numbers, for models that are written with them; `model.converters` puts them into
any."""

from torchtitan_graph.quantize.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from torchtitan_graph.quantize.products import Recipe
from torchtitan_graph.quantize.state import refresh

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear", "Recipe", "refresh"]
