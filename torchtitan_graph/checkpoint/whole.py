"""Check that the ranks' boxes together cover each tensor of a checkpoint once, in any distribution over ranks."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan_graph.parallel.chunk import Chunk


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Part(NamedTuple):
    """A rank's part of a tensor: a box, perhaps an empty one, of a tensor of `shape`."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


class Held(NamedTuple):
    """All ranks' parts of a tensor. More than one shape or dtype is a contradiction."""

    boxes: frozenset[Box]
    shapes: frozenset[tuple[int, ...]]
    dtypes: frozenset[torch.dtype]


def held_by_all(chunks: Mapping[str, Chunk], group: dist.ProcessGroup | None) -> dict[str, Held]:
    """Return on rank 0 all ranks' parts, by name; on the others nothing. All ranks together."""
    mine = parts_of(chunks)
    if not dist.is_initialized():
        return unite([mine])
    by_rank: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, by_rank, dst=0, group=group)
    return unite(by_rank or [])


def parts_of(chunks: Mapping[str, Chunk]) -> dict[str, Part]:
    """Return this rank's parts, by name."""
    return {
        name: Part(Box(chunk.offsets, tuple(chunk.local.shape)), chunk.shape, chunk.local.dtype)
        for name, chunk in chunks.items()
    }


def unite(by_rank: Iterable[Mapping[str, Part]]) -> dict[str, Held]:
    """Return the ranks' parts together, by name."""
    parts: dict[str, list[Part]] = {}
    for of_rank in by_rank:
        for name, part in of_rank.items():
            parts.setdefault(name, []).append(part)
    return {name: Held(*map(frozenset, zip(*of_ranks, strict=True))) for name, of_ranks in parts.items()}


def find_gaps(held: Mapping[str, Held]) -> list[str]:
    """Return messages, a line each, of tensors that the ranks' boxes don't cover exactly once."""
    problems = []
    for name, (boxes, shapes, dtypes) in held.items():
        if len(shapes) > 1 or len(dtypes) > 1:
            kinds = sorted(map(str, [*map(list, shapes), *dtypes]))
            problems.append(f"{name}: the ranks disagree on its shape or dtype: {', '.join(kinds)}")
        elif not make_up(boxes, *shapes):
            total, num_held = math.prod(*shapes), sum(math.prod(box.sizes) for box in boxes)
            problems.append(f"{name}: all ranks' parts together are {num_held} of {total} numbers")
    return problems


def make_up(boxes: Collection[Box], shape: tuple[int, ...]) -> bool:
    """Return whether the boxes cover every number of a tensor once."""
    together = frozenset(boxes)
    return len(together) == len(boxes) and _make_up(together, shape)


@functools.lru_cache(maxsize=256)  # many tensors are sharded alike
def _make_up(boxes: frozenset[Box], shape: tuple[int, ...]) -> bool:
    """Return whether the boxes cover every number once.

    They do if each number is in as many boxes as in the whole tensor, one. That count is determined by its differences
    along all dims together, and these are not zero only at corners of boxes, where each box adds 1 or -1.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [*((1, box) for box in boxes), (-1, Box((0,) * len(shape), shape))]:
        for ends in itertools.product((0, 1), repeat=len(shape)):
            corner = tuple(o + end * size for o, end, size in zip(box.offsets, ends, box.sizes, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())
