"""Checks of a pass, on tiny models of every family, in many layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.analysis.traffic import traffic
from torchtitan_graph.capture.state import local_part
from torchtitan_graph.check.case import case_file, find_pass
from torchtitan_graph.check.family import LAYOUTS, MORE_LAYOUTS, TIMEOUT_S, skip_unless_planned
from torchtitan_graph.check.matrix import BF16, FP32, NUM_ROWS, SEQ_LEN, Cell, build_model, layout_of, trace, train
from torchtitan_graph.check.outcome import (
    PassFailure,
    apply,
    collectives,
    distance,
    first_difference,
    outcome_on_random,
    same_bits,
    tolerance,
)
from torchtitan_graph.check.pool import PoolFailed, run_on
from torchtitan_graph.check.runner import Check, Failed
from torchtitan_graph.check.shrink import shrink
from torchtitan_graph.compiler import Extra, Inspection, Pass, passes, run_passes
from torchtitan_graph.config.job import ExtraPass
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.steps import Assembly, build_graphs, build_steps
from torchtitan_graph.torch_private.distributed import fake_process_group

# For these only graphs are built: nothing runs.
LARGE_LAYOUTS = {
    "HSDP 2 x 4": ParallelDims(dp_replicate=2, dp_shard=4),
    "FSDP 4 x TP 2, EP 2": ParallelDims(dp_shard=4, tp=2, ep=2),
    "PP 2 x FSDP 2 x TP 2": ParallelDims(pp=2, dp_shard=2, tp=2),
}
NUM_STEPS = 2
_MIB = 2**20


class Wanted(NamedTuple):
    """The scope of a check: the pass as `compile.extra_passes` names it, the families and attention implementations.

    graphs_only  nothing is trained: seconds instead of minutes
    full         four processes too
    folder       for a small graph on which the pass fails
    """

    entry: ExtraPass
    families: Sequence[tuple[str, str]]
    attns: Sequence[str]
    graphs_only: bool
    full: bool
    folder: Path


def checks(wanted: Wanted) -> Iterator[Check]:
    """Yield the checks: the graphs of all families, then their numbers."""
    changed: list[bool] = []
    cells = [Cell(family=family, flavor=flavor, attn=a) for family, flavor in wanted.families for a in wanted.attns]
    of_graphs: dict[tuple[Cell, str], str] = {}
    for cell in cells:
        for layout, dims in (LAYOUTS | MORE_LAYOUTS | LARGE_LAYOUTS).items():
            here = _laid_out(cell, dims, BF16)
            of_graphs[cell, layout] = title = f"{_name(cell)}, {layout}: the graphs of all ranks"
            yield Check(title, partial(check_graphs, here, wanted, changed))
    yield Check("the pass changes some graph", partial(check_changed, changed))
    for cell in cells if not wanted.graphs_only else ():
        for layout, dims in (LAYOUTS | MORE_LAYOUTS if wanted.full else LAYOUTS).items():
            for precision, word in ((FP32, "fp32"), (BF16, "bf16"))[dims.num_ranks > 1 :]:
                title = f"{_name(cell)}, {layout}, {word}: {NUM_STEPS} steps with and without it"
                here = _laid_out(cell, dims, precision)
                yield Check(title, partial(check_numbers, here, wanted), of_graphs[cell, layout])


def _name(cell: Cell) -> str:
    return f"{cell.family} {cell.flavor}{f' {cell.attn}' * (cell.attn != 'sdpa')}"


def _laid_out(cell: Cell, dims: ParallelDims, precision: Any) -> Cell:
    return dataclasses.replace(
        cell, dims=dims, precision=precision, num_microbatches=dims.pp, num_steps=NUM_STEPS, vocab_size=0
    )


def check_changed(changed: list[bool]) -> None:
    if not any(changed):
        raise Failed("it changes no graph: do the nodes exist that it looks for, and is --after its place?")


# --- graphs, one rank at a time ---------------------------------------------------------------------------------------


class _Change(NamedTuple):
    """The effect of the pass on one graph: whether the graph trains, and its measures before and after."""

    trains: bool
    before: tuple[int, int, int]  # nodes, bytes at the peak, bytes received
    after: tuple[int, int, int]
    is_changed: bool
    sent: list[str]


def check_graphs(cell: Cell, wanted: Wanted, changed: list[bool]) -> str:
    """Build the graphs of a job's ranks, one rank after the other, and check the effect of the pass on each."""
    skip_unless_planned(cell)
    per_stage = cell.dims.num_ranks // cell.dims.pp
    ranks = sorted({0, per_stage - 1, cell.dims.num_ranks - 1})  # all of two
    by_rank = {rank: _changes(cell, wanted, rank) for rank in ranks}
    for rank, changes in by_rank.items():
        first = min(r for r in by_rank if r // per_stage == rank // per_stage)
        for one, other in zip(by_rank[first], changes, strict=True):
            if said := first_difference({first: one.sent, rank: other.sent}):
                _fail(cell, wanted, PassFailure("order", f"rank {rank} sends in another order: {said}"))
    everything = [change for changes in by_rank.values() for change in changes]
    changed.append(any(change.is_changed for change in everything))
    return _summary([change for change in by_rank[0] if change.trains])


def _summary(changes: Sequence[_Change]) -> str:
    """Return the changes in the graphs of rank 0's training as text."""
    words = []
    for i, (word, unit) in enumerate((("nodes", 1), ("peak", _MIB), ("received", _MIB))):
        before, after = (sum(getattr(c, when)[i] for c in changes) / unit for when in ("before", "after"))
        if before != after:
            words.append(f"{word} {before:g} -> {after:g}" if unit == 1 else f"{word} {before:.3f} -> {after:.3f} MiB")
    return ", ".join(words)


def _changes(cell: Cell, wanted: Wanted, rank: int) -> list[_Change]:
    """Build one rank's graphs; return the changes by the pass, in order."""
    own, found = find_pass(wanted.entry), list[_Change]()
    with fake_process_group(cell.dims.num_ranks, rank):
        layout = cell.dims.layout("cpu")
        watched = own._replace(run=lambda gm: _watch(cell, wanted, own, gm, layout, found))
        options = dataclasses.replace(cell.options("graph"), extra=[Extra(wanted.entry.after, watched)])
        options = dataclasses.replace(options, eval_rows=(NUM_ROWS, SEQ_LEN))
        build_graphs(Assembly(build_model(cell), load_family(cell.family), layout, options))
    return found


def _watch(cell: Cell, wanted: Wanted, own: Pass, gm: GraphModule, layout: Layout, found: list[_Change]) -> GraphModule:
    after = apply(own, gm)
    if isinstance(after, PassFailure):
        small = shrink(gm, lambda part: _is(apply(own, part), after.kind))
        _fail(cell, wanted, after, None if small is None else case_file(own, small, after))
    assert isinstance(after, GraphModule)
    axes = {name: axis for name, (axis, _) in layout.axes_by_group.items()}
    trains = any(slot.kind == "grad" for slot in signature_of(gm).outputs)
    numbers = [_measure(each, layout) for each in (gm, after)]
    is_changed = _text(gm) != _text(after)
    found.append(_Change(trains, numbers[0], numbers[1], is_changed, collectives(after, axes)))
    return after


def _is(outcome: object, kind: str) -> bool:
    return isinstance(outcome, PassFailure) and outcome.kind == kind


def _measure(gm: GraphModule, layout: Layout) -> tuple[int, int, int]:
    received = sum(each.num_bytes for each in traffic(gm, layout.axes_by_group).values())
    return len(gm.graph.nodes), peak_memory(gm).num_bytes, received


def _text(gm: GraphModule) -> list[tuple]:
    return [(n.name, str(n.target), str(n.args), str(n.kwargs), n.meta.get("tag")) for n in gm.graph.nodes]


# --- numbers, on real ranks -------------------------------------------------------------------------------------------


def check_numbers(cell: Cell, wanted: Wanted) -> str:
    """Train with and without the pass, and compare all results."""
    skip_unless_planned(cell)
    results = run_on(cell.dims.num_ranks, differences, cell, wanted.entry, timeout=TIMEOUT_S)
    different: list[str] = next((names for names, _ in results if names), [])
    if different:
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        _fail(cell, wanted, PassFailure("numbers", f"other numbers: {', '.join(different[:3])}{more}"))
    worst = max(distance for _, distance in results)
    return "" if wanted.entry.exact else f"off by at most {worst:.1e} of a tensor's norm"


def differences(cell: Cell, entry: ExtraPass) -> tuple[list[str], float]:
    """Return the names of results that the pass changes, and the largest difference relative to a tensor's norm.

    An optimizer amplifies rounding errors: for a pass that is not exact, only the first step is compared.
    """
    own = find_pass(entry)
    cell = cell if own.exact else dataclasses.replace(cell, num_steps=1)
    expected, found = (_trained(cell, extra) for extra in ([], [Extra(entry.after, own)]))
    if not own.exact:
        expected, found = ({k: x for k, x in seen.items() if k.startswith("step")} for seen in (expected, found))
    off = {name: distance(x, found[name]) for name, x in expected.items() if not same_bits(x, found[name])}
    far = [name for name, gap in off.items() if own.exact or not gap <= tolerance(cell.precision.compute)]
    return [f"{name} ({off[name]:.1e} of its norm)" for name in far], max(off.values(), default=0.0)


def _trained(cell: Cell, extra: Sequence[Extra]) -> dict[str, Tensor]:
    options = dataclasses.replace(cell.options("graph"), extra=extra)
    steps = build_steps(Assembly(build_model(cell), load_family(cell.family), layout_of(cell.dims), options))
    initialize(steps.model, 0)
    return {name: local_part(x) for name, x in train(cell, steps).items()}


# --- minimization of failures -----------------------------------------------------------------------------------------


def _fail(cell: Cell, wanted: Wanted, failure: PassFailure, text: str | None = None) -> None:
    """Raise a failure with its text, and the file of a small graph that reproduces it."""
    if text is None and cell.dims.num_ranks <= 2 and cell.dims.pp == 1 and failure.kind in ("order", "numbers"):
        try:
            text = run_on(cell.dims.num_ranks, small_case, cell, wanted.entry, failure.kind, timeout=TIMEOUT_S)[0]
        except PoolFailed:
            text = None  # a part of the graph may hang or die where the whole does not
    if text is None:
        raise Failed(f"{failure.said}\nno smaller graph shows it by itself")
    wanted.folder.mkdir(parents=True, exist_ok=True)
    file = wanted.folder / f"{wanted.entry.pass_}.{cell.family}.{failure.kind}.py"
    file.write_text(text)
    (head,) = [line for line in text.splitlines() if line.endswith("THIS_FILE.")]
    raise Failed(f"{failure.said}\na small graph on which it shows: {file}\n{head.replace('THIS_FILE.', str(file))}")


def small_case(cell: Cell, entry: ExtraPass, kind: str) -> str | None:
    """Return a small graph on which the pass fails, as a file's content; all ranks of the cell together."""
    own, traced = find_pass(entry), trace(cell)
    ordered = passes(traced.plan)
    place = [each.name for each in ordered].index(entry.after) + 1
    gm = run_passes(traced.train.gm, ordered[:place], (), torch.device("cpu"), Inspection())
    small = shrink(gm, lambda part: _is(outcome_on_random(own, part), kind))
    if small is None:
        return None
    failure = outcome_on_random(own, small)
    assert failure is not None
    return case_file(own, small, failure)
