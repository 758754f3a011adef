"""THE ordered list of passes, and how it is run."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.graph.show import dump
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.parallel.verify import verify_pass
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.memory_policy import memory_policy
from torchtitan_graph.passes.mixed_precision import mixed_precision
from torchtitan_graph.passes.overlap_collectives import overlap_collectives
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.shard_params import shard_params

Pass = Callable[[GraphModule], GraphModule]


def passes(
    storages: Mapping[str, Storage],
    buckets: Sequence[Sequence[str]],
    recompute: Recompute,
    reshard: bool,
    reshard_root: bool = False,
) -> list[Pass]:
    """What runs, top to bottom. A pass with nothing to do returns the graph as it is; all keep numbers bitwise."""
    return [
        cleanup,
        partial(shard_params, storages=storages),
        partial(mixed_precision, storages=storages),
        partial(memory_policy, recompute=recompute, reshard_after_forward=reshard, reshard_root=reshard_root),
        rematerialize,
        partial(bucket_collectives, buckets=buckets),
        overlap_collectives,
    ]


# What the others rest on: values that never change, and the layout that the live parameters are bound in.
REQUIRED = ("cleanup", "shard_params", "mixed_precision")


def check_disabled(names: Sequence[str]) -> None:
    """Check `compile.disable_passes`.

    Raises:
        ValueError: a name that is no pass, or a pass that can't be left out.
    """
    known = [_name(p) for p in passes({}, [], Recompute(), True)]
    optional = [name for name in known if name not in REQUIRED]
    for name in names:
        if name in REQUIRED:
            raise ValueError(
                f"compile.disable_passes = {name!r}: this pass can't be left out, the others and the layout of the "
                f"parameters rest on it; legal are {', '.join(optional)}"
            )
        if name not in known:
            near = difflib.get_close_matches(name, optional, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"compile.disable_passes = {name!r}: legal are {', '.join(optional)}{hint}")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What to watch while passes run.

    graph     what the log calls the graph
    dump_to   folder for the readable graph after each pass, numbered
    verify_on the graph's inputs that are not parameters: each pass is checked on them
    """

    graph: str = "training step"
    dump_to: Path | None = None
    verify_on: list[Tensor] | None = None


def run_passes(
    gm: GraphModule, ordered: Sequence[Pass], disabled: Sequence[str], device: torch.device, watch: Inspection
) -> GraphModule:
    """Run the passes in order; log each one's time and what it changed."""
    if watch.dump_to is not None:
        dump(gm, watch.dump_to, 0, "traced")
    for number, each in enumerate((p for p in ordered if _name(p) not in disabled), start=1):
        name, before = _name(each), copy.deepcopy(gm) if watch.verify_on is not None else gm
        num_nodes, begin = len(gm.graph.nodes), time.perf_counter()
        gm = each(gm)
        gm.graph.lint()
        seconds, nodes = time.perf_counter() - begin, f"{num_nodes} -> {len(gm.graph.nodes)} nodes"
        logger.info(f"{watch.graph}: pass {name}: {nodes}, {seconds:.2f} s")
        if watch.dump_to is not None:
            dump(gm, watch.dump_to, number, name)
        if watch.verify_on is not None:
            verify_pass(name, before, gm, watch.verify_on, device)
            logger.info(f"{watch.graph}: pass {name}: verified")
    return gm


def _name(p: Pass) -> str:
    return (p.func if isinstance(p, partial) else p).__name__
