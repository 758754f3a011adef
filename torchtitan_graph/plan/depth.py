"""Kinds of a model's layers, and models cut to few layers, whose figures extrapolate to all."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from torchtitan_graph.capture.alike import description
from torchtitan_graph.graph.blocks import number_of
from torchtitan_graph.models.layers.decoder import AheadBlock, Decoder
from torchtitan_graph.passes.compile_regions import region_of
from torchtitan_graph.steps import StepOptions


def kind_of(name: str, model: Decoder, options: StepOptions) -> Hashable:
    """Return a key that is equal for blocks with equal parts of a step's graph: their structure, and the options for
    them. A module that is not a block is a kind of its own."""
    if name not in model.blocks:
        return name
    block, recompute = model.blocks[name], options.recompute
    named = {
        "offload": options.offload,
        "save": recompute.saved,
        "again": recompute.again,
        "float8": options.float8.layers if options.float8 is not None else (),
    }
    inside = [f"{name}.{inner}".rstrip(".") for inner, _ in block.named_modules()]
    said = tuple((what, tuple(m[len(name) :] for m in inside if m in names)) for what, names in named.items())
    regions = tuple((region_of(m, list(options.regions)) or "").removeprefix(name) for m in inside)
    tensors = itertools.chain(block.named_parameters(), block.named_buffers())
    sizes = tuple((key, x.shape, x.dtype, x.requires_grad) for key, x in tensors)
    return description(block, block.forward, ()), sizes, recompute.whole_block(number_of(name)), said, regions


def depths(model: Decoder, options: StepOptions) -> tuple[int, int, float] | None:
    """Return two numbers of layers, and the position of all layers on the line between them: 0 is the first, 1 the
    second. None where the model has no more layers than that.

    Layers come in periods of alike ones, after some that are none (DeepSeek's first are dense); both numbers end with a
    whole period, as the model does. Options for single layers, such as to recompute every second one, make periods
    longer.
    """
    kinds = [kind_of(name, model, options) for name in model.blocks]
    if any(isinstance(block, AheadBlock) for block in model.blocks.values()):
        return None  # they come after all others, which a prefix of the layers leaves out
    first, period = _periods(kinds)
    few = first + period * (2 if first + period < 2 else 1)
    more = few + period
    return (few, more, (len(kinds) - few) / period) if more < len(kinds) else None


def _periods(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """Return the layers before the first period, and the period that repeats to the end, with the smallest sum."""
    n = len(kinds)
    best = n, 1
    for period in range(1, n + 1):
        first = next(i for i in range(n, -1, -1) if i == 0 or i <= n - period and kinds[i - 1] != kinds[i - 1 + period])
        first += (n - first) % period
        best = min(best, (first, period), key=lambda found: (sum(found), found[1]))
    return best


def keep_layers(model: Decoder, number: int) -> None:
    """Drop all layers of a model but the first ones; modules outside of layers stay."""
    names = model.modules_in_order
    model.keep([*names[: 1 + number], *names[1 + len(model.blocks) :]])
