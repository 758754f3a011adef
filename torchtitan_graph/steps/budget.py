"""The memory budget of a training step: search, refusal, log and drawing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from torchtitan_graph import device as devices
from torchtitan_graph.config import job
from torchtitan_graph.device import GIB
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.edit import copy_graph
from torchtitan_graph.log import logger
from torchtitan_graph.optim import AVERAGE_DTYPE, state_of
from torchtitan_graph.parallel.recompute import Budget
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.passes.tag_budget import Curve
from torchtitan_graph.patience import refuse_unwritable

PARAMETERS, QUANTISED, OPTIMIZER, INPUTS = "parameters", "quantised weights", "optimizer state", "batch and masks"
AVERAGE = "moving average of the weights"
EARLIER = "gradients of earlier microbatches"
_MIB = 2**20
_TRIES = 5  # bisections of the share of activations that stages keep: to a 32nd of the savings
_GIB = "activation_checkpoint.memory_budget_gib"
_LESS = (
    "give as much, or take a smaller training.local_batch_size or training.seq_len, more processes, or a higher"
    " parallelism.tensor_parallel_degree"
)


def at_rest(
    storages: Mapping[str, Storage],
    model: nn.Module,
    optimizer: job.Optimizer,
    *,
    accumulates: bool,
    on_host: bool = False,
) -> dict[str, int]:
    """Return the bytes that a rank holds from step to step, and between a step's microbatches, by purpose.

    Args:
        model, optimizer: what is stepped, and what steps it; the state of a user's class is not known, nor counted.
        accumulates: gradients of earlier microbatches are held while the next one runs.
        on_host: count the host's memory, not the device's.
    """
    here = {name: each for name, each in storages.items() if each.on_host == on_host}
    if not here:
        return {}
    there = [*here.values()]
    trained = trained_bytes(there)
    quantised = sum(_num_bytes(each) for each in there if each.precision.storage.itemsize == 1)
    held = {PARAMETERS: sum(map(_num_bytes, there)) - quantised}
    if quantised:
        held[QUANTISED] = quantised
    if accumulates:
        held[EARLIER] = trained
    if (kept := state_of_stored(here, model, optimizer)) is not None:
        held[OPTIMIZER] = sum(_state_bytes(here[name], *each) for name, each in kept.items())
    if optimizer.ema_decay is not None:
        held[AVERAGE] = sum(AVERAGE_DTYPE.itemsize * s.padded_shape.numel() for s in there if s.is_trained)
    return held


def state_of_stored(
    storages: Mapping[str, Storage], model: nn.Module, optimizer: job.Optimizer
) -> dict[str, tuple[int, torch.dtype | None]] | None:
    """Return `optim.state_of` for trained parameters that are stored. In a pipeline they may have the names of a stage
    equal to the model's own."""
    found = state_of(model, optimizer)
    if found is None:
        return None
    by_name = {_in_any_block(name): each for name, each in found.items()} | found
    names = [name for name, each in storages.items() if each.is_trained]
    return {name: by_name[name if name in by_name else _in_any_block(name)] for name in names}


def _in_any_block(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _state_bytes(storage: Storage, number: int, dtype: torch.dtype | None) -> int:
    return number * storage.padded_shape.numel() * (dtype or storage.precision.storage).itemsize


def trained_bytes(storages: Iterable[Storage]) -> int:
    """Return the bytes of the trainable parameters, which are also those of their gradients."""
    return sum(_num_bytes(each) for each in storages if each.is_trained)


def _num_bytes(storage: Storage) -> int:
    return storage.padded_shape.numel() * storage.precision.storage.itemsize


def meet(
    gib: float,
    rest: Mapping[str, int],
    gm: GraphModule,
    rewritten: Callable[[GraphModule, Budget], GraphModule],
    peak_of: Callable[[GraphModule], int],
) -> GraphModule:
    """Run the passes so that a rank's memory is at most `gib` in all.

    A policy rehearses the graph as the passes up to it left it. Where the final graph's peak is higher, they run again
    with a budget lowered by the difference.

    Args:
        rest: bytes held outside the step, by purpose.
        rewritten: runs the passes on a graph, in place.
        peak_of: returns the peak memory of a step from its final graph, in bytes.

    Raises:
        UserError: even the lowest peak is higher.
    """
    allowed = int(gib * GIB) - sum(rest.values())
    asked, least = allowed, None
    while True:
        made = rewritten(copy_graph(gm), Budget(num_bytes=asked))
        peak, curve = peak_of(made), made.meta.get("curve")
        if peak <= allowed:
            return made
        least = peak if least is None else min(least, peak)
        if curve is None or curve.chosen.peak > asked:
            break
        asked -= peak - allowed
    raise UserError(_too_little(gib, rest, least))


def share(gib: float, rest: Mapping[str, int], peak: Callable[[float], int]) -> float:
    """Return the share of activations, the same for all stages of a rank, whose peak memory is at most `gib` in all.
    All ranks call it together.

    Args:
        rest: bytes held outside the step, by purpose.
        peak: returns a step's peak memory for a share, from 0 to 1.

    Raises:
        UserError: on all ranks, if even the lowest peak of one is higher.
    """
    allowed = int(gib * GIB) - sum(rest.values())
    part, needs = 1.0, peak(1.0)
    if needs > allowed:
        part, needs = 0.0, peak(0.0)
    lacks = torch.tensor(needs - allowed, device=devices.device())
    dist.all_reduce(lacks, dist.ReduceOp.MAX)
    if needs > allowed:
        raise UserError(_too_little(gib, rest, needs))
    if lacks > 0:
        raise UserError(
            f"{_GIB} = {gib:g}: the least that one rank of the pipeline can hold is {gib + lacks.item() / GIB:.3f} GiB;"
            f" {_LESS}"
        )
    low, high = part, 1.0
    for _ in range(_TRIES * (part < 1)):
        part = (low + high) / 2
        low, high = (part, high) if peak(part) <= allowed else (low, part)
    return low


def _too_little(gib: float, rest: Mapping[str, int], least: int) -> str:
    parts = [*rest.items(), ("a step at its peak", least)]
    return (
        f"{_GIB} = {gib:g}: the least that this rank can hold is {sum(size for _, size in parts) / GIB:.3f} GiB:"
        f" {', '.join(f'{size / GIB:.3f} of {name}' for name, size in parts)}; {_LESS}"
    )


def log_budget(gm: GraphModule, graph: str, picture: Path | None) -> None:
    """Log the trade-off of memory for work, if there was a budget, and draw it to a file."""
    curve: Curve | None = gm.meta.get("curve")
    if curve is None:
        return
    logger.info("\n".join([f"{graph}: memory budget", *_lines(curve)]))
    if picture is not None:
        what = f"activation_checkpoint.visualize_memory_budget_pareto = true: {picture}"
        with refuse_unwritable(what, picture):
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_text(draw(curve))


def _lines(curve: Curve) -> list[str]:
    rows = sorted({*curve.points, curve.chosen}, key=lambda point: point.flops)
    return [
        f"  {'kept for backward':>18}{'at its peak':>18}{'operations':>13}",
        *(
            f"  {point.kept / _MIB:14.1f} MiB{point.peak / _MIB:14.1f} MiB{curve.added(point):+13.1%}"
            + "  chosen" * (point == curve.chosen)
            for point in rows
        ),
    ]


def draw(curve: Curve) -> str:
    """Return a drawing of a curve as SVG: the peak, from 0, over the added operations."""
    points = sorted({*curve.points, curve.chosen}, key=lambda point: point.flops)
    most = max(1, *(point.peak for point in points))
    widest = max(0.01, *map(curve.added, points))
    left, right, top, bottom = 90, 600, 30, 330

    def place(added: float, peak: float) -> tuple[float, float]:
        return left + (right - left) * added / widest, bottom - (bottom - top) * peak / most

    corners = [place(curve.added(point), point.peak) for point in points]
    marks = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{7 if point == curve.chosen else 4}"'
        f' fill="{"#d62728" if point == curve.chosen else "#1f77b4"}"><title>{point.peak / _MIB:.1f} MiB, kept'
        f" {point.kept / _MIB:.1f} MiB, {curve.added(point):+.1%} operations</title></circle>"
        for point, (x, y) in zip(points, corners, strict=True)
    ]
    ticks = []
    for part in (0, 0.25, 0.5, 0.75, 1):
        (x, _), (_, y) = place(part * widest, 0), place(0, part * most)
        ticks += [
            f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{part * most / _MIB:.0f} MiB</text>',
            f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{part * widest:+.1%}</text>',
        ]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" font-family="sans-serif" font-size="12">',
            '<rect width="640" height="400" fill="white"/>',
            *ticks,
            f'<polyline points="{way}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
            *marks,
            f'<text x="{left}" y="18">a step at its peak, by operations that are added; red: chosen</text>',
            f'<text x="{(left + right) / 2}" y="375" text-anchor="middle">operations of products and attention</text>',
            "</svg>\n",
        ]
    )
