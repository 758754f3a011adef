"""THE ordered list of passes, and how it is run."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.show import dump
from torchtitan_graph.graph.torch_private import inductor_options
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.parallel.verify import verify_pass
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.compile_regions import FLEX, LOSS, Regions, compile_regions, region_of
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
    regions: Regions | None = None,
) -> list[Pass]:
    """What runs, top to bottom. A pass with nothing to do returns the graph as it is; all but the last keep numbers
    bitwise."""
    return [
        cleanup,
        partial(shard_params, storages=storages),
        partial(mixed_precision, storages=storages),
        partial(memory_policy, recompute=recompute, reshard_after_forward=reshard, reshard_root=reshard_root),
        rematerialize,
        partial(bucket_collectives, buckets=buckets),
        overlap_collectives,
        partial(compile_regions, regions=regions or {}),
    ]


# What the others rest on: values that never change, and the layout that the live parameters are bound in.
REQUIRED = ("cleanup", "shard_params", "mixed_precision")
# What keeps numbers up to rounding only: it does nothing unless asked to, but on a GPU with flex attention.
INEXACT = ("compile_regions",)


def check_disabled(names: Sequence[str]) -> None:
    """Check `compile.disable_passes`.

    Raises:
        UserError: a name that is no pass, or a pass that can't be left out.
    """
    known = [_name(p) for p in passes({}, [], Recompute(), True)]
    optional = [name for name in known if name not in REQUIRED]
    for name in names:
        if name in REQUIRED:
            raise UserError(
                f"compile.disable_passes = {name!r}: this pass can't be left out, the others and the layout of the "
                f"parameters rest on it; legal are {', '.join(optional)}"
            )
        if name not in known:
            near = difflib.get_close_matches(name, optional, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"compile.disable_passes = {name!r}: legal are {', '.join(optional)}{hint}")


def plan_regions(options: job.Compile, model: nn.Module, device: torch.device) -> Regions:
    """Give what `compile_regions` compiles, and Inductor's options there.

    Raises:
        UserError: a pattern that no module's name matches, options of something that is not compiled, or options that
            Inductor does not have.
    """
    chosen = options.components if options.enable else []
    patterns = options.regions if "model" in chosen else []
    for pattern in patterns:
        if not any(region_of(name, [pattern]) for name, _ in model.named_modules()):
            raise UserError(
                f"compile.regions = {pattern!r}: matches no module; legal are names such as "
                f"{', '.join(name for name, _ in itertools.islice(model.named_modules(), 1, 6))}, * for any one part"
            )
    regions: dict[str, dict[str, Any]] = {pattern: {} for pattern in patterns}
    regions |= {name: {} for name in (FLEX, LOSS) if name in chosen}
    if device.type == "cuda":
        regions[FLEX] = {}
    for pattern, *settings in options.region_options:
        if pattern not in regions:
            raise UserError(
                f"compile.region_options = {pattern!r}: is not compiled; compiled are "
                f"{', '.join(regions) or 'none, while compile.enable is false'}"
            )
        regions[pattern] |= inductor_options(settings)
    return regions


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
            verify_pass(name, before, gm, watch.verify_on, device, exact=name not in INEXACT)
            logger.info(f"{watch.graph}: pass {name}: verified")
    return gm


def _name(p: Pass) -> str:
    return (p.func if isinstance(p, partial) else p).__name__
