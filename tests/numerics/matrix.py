"""The layouts that tests run, each traced once; the rest of the matrix is what users of `python -m
torchtitan_graph.check` run too."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan_graph.capture.trace import Capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import *  # noqa: F403
from torchtitan_graph.graph.edit import copy_graph
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard
from torchtitan_graph.torch_private.distributed import init_fake_process_group

ONE, FSDP2, FSDP4 = ParallelDims(), ParallelDims(dp_shard=2), ParallelDims(dp_shard=4)
DDP2, HSDP = ParallelDims(dp_replicate=2), ParallelDims(dp_replicate=2, dp_shard=2)
TP2, FSDP2_TP2 = ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)
CPU = DEVICE  # noqa: F405
# Of a cell whose subject lies in one block: a third of the time. With more, blocks are stamped and gathers prefetched.
ONE_LAYER: dict[str, Any] = {"changes": (("num_layers", 1),)}
LAYOUTS = {
    "one-rank": ONE,
    "FSDP-2": FSDP2,
    "DDP-2": DDP2,
    "TP-2": TP2,
    "FSDP-4": FSDP4,
    "HSDP-2x2": HSDP,
    "FSDP-2-x-TP-2": FSDP2_TP2,
}

# Options that passes, a schedule or training read, and a trace does not.
AFTER_TRACING = dict.fromkeys(
    ["recompute", "offload", "cpu_offload", "reshard", "async_tp", "disabled", "codegen", "fusions", "dedupe"]
    + ["pipeline", "num_steps"]
)
_traces: dict[Any, TracedResult] = {}


def trace_once(cell: Cell, *others: object) -> Capture:  # noqa: F405
    """Return a capture whose result is a copy of the trace of an earlier cell, if only options of passes differ."""
    captured, count, schedule = CAPTURES[cell.capture], itertools.count(), cell.schedule()  # noqa: F405
    if cell.capture != "make_fx" or cell.lengths is not None:
        return captured  # Dynamo's guards are on the model that was traced
    stages = () if schedule is None else (schedule.stages, schedule.rank_of)  # a rank traces its own in order
    traced_for = dataclasses.replace(cell, **AFTER_TRACING), stages, *others  # type: ignore[arg-type]

    def capture(*args: Any, **kwargs: Any) -> Callable[..., TracedResult]:
        key = traced_for, next(count)

        def trace(*arguments: Any, **named: Any) -> TracedResult:
            if key not in _traces:
                while len(_traces) >= 32:
                    _traces.pop(next(iter(_traces)))
                _traces[key] = captured(*args, **kwargs)(*arguments, **named)
            return dataclasses.replace(_traces[key], gm=copy_graph(_traces[key].gm))

        return trace

    return capture


@contextlib.contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of what is traced: inside, no trace from outside is used, and none is kept."""
    with mock.patch.object(target, name, value), mock.patch.dict(_traces, clear=True):
        yield


def build_graph(cell: Cell, edit: Callable[..., Any] | None = None) -> Steps:  # noqa: F405
    return matrix.build_graph(cell, edit, trace_once(cell))


def final_graphs(cell: Cell) -> tuple[Decoder, Graphs]:  # noqa: F405
    return matrix.final_graphs(cell, trace_once(cell))


def trace(cell: Cell) -> Traced:  # noqa: F405
    return matrix.trace(cell, trace_once(cell, "with numbers"))


def fake_layout(dims: ParallelDims, rank: int = 0) -> Layout:
    """Return the layout that a rank sees, in a world where nothing is sent. Ranks have other names for groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
    layout_of.cache_clear()  # noqa: F405
    _traces.clear()  # with the groups' names
    init_fake_process_group(dims.num_ranks, rank)
    for _ in range(rank):
        dist.new_group()
    return layout_of(dims)  # noqa: F405


def eager(cell: Cell) -> Seen:  # noqa: F405
    """Train the eager reference; what a process has seen of a cell it does not train again."""
    return _eager(dataclasses.replace(cell, disabled=()))


@functools.lru_cache(maxsize=16)
def _eager(cell: Cell) -> Seen:  # noqa: F405
    return train(cell, build_eager(cell))  # noqa: F405


def off_one_rank(cell: Cell, found: Seen) -> list[str]:  # noqa: F405
    """Name what is not, in fp64, what a plain module sees that does the same on one rank."""
    expected = _plain(dataclasses.replace(cell, dims=ONE, recompute=Recompute(), reshard=Reshard(), pipeline=()))
    # What has no scale, a load that may be zero or a bias that begins so, is equal.
    exact = {name for name in expected if name.endswith(".load") or name.startswith("buffer")}
    exact |= {name for name, x in expected.items() if not x.is_floating_point()}  # packed weights
    wrong = [name for name in exact if not torch.equal(found[name], expected[name])]
    floats = [{n: x for n, x in seen.items() if n not in exact} for seen in (expected, found)]
    return wrong + far_apart(*floats, 1e-12)  # noqa: F405


@functools.lru_cache(maxsize=16)
def _plain(cell: Cell) -> Seen:  # noqa: F405
    return train(cell, build_plain(cell))  # noqa: F405
