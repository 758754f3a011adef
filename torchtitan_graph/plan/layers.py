"""A model with few of its layers, whose figures tell those of all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

from torch import nn

from torchtitan_graph.graph.alike import description
from torchtitan_graph.models.layers.decoder import AheadBlock, Decoder
from torchtitan_graph.parallel.recompute import Recompute


def depths(model: Decoder, recompute: Recompute) -> tuple[int, int, float] | None:
    """Give two numbers of layers, and where on the line between them all layers are: 0 is the first, 1 the second. None
    where the model has no more layers than that.

    Layers come in periods of alike ones, after some that are none (DeepSeek's first are dense); both numbers end with a
    whole period, as the model does. What is recomputed, every second layer say, makes periods longer.
    """
    kinds = [(_kind(block), _named(name, block, recompute)) for name, block in model.blocks.items()]
    if any(isinstance(block, AheadBlock) for block in model.blocks.values()):
        return None  # they come after all others, which a beginning of the layers leaves out
    first, period = _periods(kinds, max(1, recompute.every))
    few = first + period * (2 if first + period < 2 else 1)
    more = few + period
    return (few, more, (len(kinds) - few) / period) if more < len(kinds) else None


def _kind(block: nn.Module) -> Hashable:
    shapes = tuple((name, p.shape) for name, p in itertools.chain(block.named_parameters(), block.named_buffers()))
    return description(block, type(block).forward, ()), shapes


def _named(name: str, block: nn.Module, recompute: Recompute) -> Hashable:
    """Give what is said of a block's modules by name."""
    return tuple(recompute.named(f"{name}.{inner}".rstrip(".")) for inner, _ in block.named_modules())


def _periods(kinds: Sequence[Hashable], every: int) -> tuple[int, int]:
    """Give how many layers come first, and how many then repeat to the end: the fewest that both are."""
    n = len(kinds)
    best = n, 1
    for period in range(1, n + 1):
        first = next(i for i in range(n, -1, -1) if i == 0 or i <= n - period and kinds[i - 1] != kinds[i - 1 + period])
        whole = math.lcm(period, every)
        first += (n - first) % whole
        best = min(best, (first, whole), key=lambda found: (sum(found), found[1]))
    return best


def keep_layers(model: Decoder, number: int) -> None:
    """Leave of a model its first layers, and what is outside of layers."""
    names = model.modules_in_order
    model.keep([*names[: 1 + number], *names[1 + len(model.blocks) :]])
