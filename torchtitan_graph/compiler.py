"""THE ordered list of passes, and its execution."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.changes import Measured, PassTable, Written
from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.liveness import in_one_part
from torchtitan_graph.capture.uncollected import uncollected
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.show import dump
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import copy_graph
from torchtitan_graph.graph.hierarchy import call_hierarchy
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard, Storage
from torchtitan_graph.parallel.verify import BrokenPromise, Given, Numbers, verify_pass
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.cleanup_update import cleanup_update
from torchtitan_graph.passes.compile_regions import Regions, compile_regions
from torchtitan_graph.passes.fill_waits import fill_waits
from torchtitan_graph.passes.gather_each_call import gather_each_call
from torchtitan_graph.passes.merge_equal import merge_equal
from torchtitan_graph.passes.mixed_precision import mixed_precision
from torchtitan_graph.passes.offload_activations import offload_activations
from torchtitan_graph.passes.overlap_collectives import overlap_collectives
from torchtitan_graph.passes.overlap_context import overlap_context
from torchtitan_graph.passes.overlap_copies import overlap_copies
from torchtitan_graph.passes.overlap_products import Ring, overlap_products
from torchtitan_graph.passes.recompute_ahead import recompute_ahead
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.rest_on_host import rest_on_host
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_budget import tag_budget
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.passes.tag_offload import tag_offload
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.passes.tag_resharding import tag_resharding
from torchtitan_graph.patience import refuse_unwritable
from torchtitan_graph.torch_private.tracing import inputs_of


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """The inputs of all passes, decided before the graph exists.

    blocks   the model's blocks, by their names
    buckets  names of parameters that are gathered, and whose gradients are reduced, together
    packs_all  whether gradients that nothing in the graph reduces are packed into buckets, too
    context  the modules that gather over the sequence, by their names
    offload  the modules whose activations are in the host's memory till backward, by their names
    costs    the cost model of nodes and collectives, by which collectives are placed
    part_of  in a pipeline's stage, the part that a node will run in: placement raises no part's peak
    ring     the ranks of tensor parallelism, if their communication is to be cut into parts
    compiles compile regions; else they are only cut out, where nothing is to run
    """

    storages: Mapping[str, Storage]
    blocks: Container[str]
    buckets: Sequence[Sequence[str]]
    packs_all: bool = False
    recompute: Recompute = Recompute()
    reshard: Reshard = Reshard()
    regions: Regions = dataclasses.field(default_factory=dict)
    context: Container[str] = ()
    offload: Collection[str] = ()
    costs: Costs = Costs()
    part_of: Callable[[Node], str] = in_one_part
    ring: Ring | None = None
    compiles: bool = True


class Pass(NamedTuple):
    """A pass in the list.

    run       function of a graph, which returns it edited, or another, to run in its place
    exact     keeps numbers bitwise; else up to rounding
    required  can't be left out: the other passes, or the layout of live parameters, depend on it
    cut       in a pipeline's stage it runs on each part, after the cut; the others on the whole
    option    for a user's pass, the entry of `compile.extra_passes` that names it
    """

    name: str
    run: Callable[[GraphModule], GraphModule]
    exact: bool = True
    required: bool = False
    cut: bool = False
    option: str = ""


class Extra(NamedTuple):
    """A user's pass, and the name of the pass that it follows."""

    after: str
    own: Pass


def passes(plan: PassPlan, extra: Sequence[Extra] = ()) -> list[Pass]:
    """Return the passes, in order. A pass with nothing to do returns the graph unchanged."""
    ordered = [
        Pass("cleanup", cleanup, required=True),
        Pass("shard_params", partial(shard_params, storages=plan.storages), required=True),
        Pass("mixed_precision", partial(mixed_precision, storages=plan.storages), required=True),
        Pass("rest_on_host", partial(rest_on_host, storages=plan.storages), required=True),
        Pass("gather_each_call", partial(gather_each_call, blocks=plan.blocks, reshard=plan.reshard)),
        Pass("merge_equal", merge_equal),
        Pass("tag_resharding", partial(tag_resharding, blocks=plan.blocks, reshard=plan.reshard)),
        Pass("tag_recomputation", partial(tag_recomputation, blocks=plan.blocks, recompute=plan.recompute)),
        Pass(
            "tag_budget",
            partial(
                tag_budget,
                blocks=plan.blocks,
                budget=plan.recompute.budget,
                buckets=plan.buckets,
                offload=plan.offload,
            ),
        ),
        Pass("tag_elementwise", partial(tag_elementwise, blocks=plan.blocks)),
        Pass("tag_offload", partial(tag_offload, modules=plan.offload)),
        Pass("rematerialize", rematerialize),
        Pass("offload_activations", partial(offload_activations, blocks=plan.blocks)),
        Pass("bucket_collectives", partial(bucket_collectives, buckets=plan.buckets, packs_all=plan.packs_all)),
        Pass("overlap_context", partial(overlap_context, modules=plan.context)),
        Pass("overlap_collectives", partial(overlap_collectives, costs=plan.costs, part_of=plan.part_of)),
        # Without effect unless enabled.
        Pass("overlap_products", partial(overlap_products, ring=plan.ring, costs=plan.costs), exact=False),
        Pass("fill_waits", partial(fill_waits, blocks=plan.blocks, costs=plan.costs, part_of=plan.part_of)),
        Pass("recompute_ahead", partial(recompute_ahead, costs=plan.costs, part_of=plan.part_of)),
        Pass("overlap_copies", partial(overlap_copies, buckets=plan.buckets)),
        # Without effect unless enabled, except on a GPU with flex attention.
        Pass(
            "compile_regions",
            partial(compile_regions, regions=plan.regions, compiles=plan.compiles),
            exact=not any(options is not None for options in plan.regions.values()),
            cut=True,
        ),
    ]
    return _with_own(ordered, extra)


def update_passes(extra: Sequence[Extra] = ()) -> list[Pass]:
    """Return the passes for the graph of `compile.optimizer_in_graph`."""
    return _with_own([Pass("cleanup_update", cleanup_update, required=True)], extra)


def _with_own(ordered: Sequence[Pass], extra: Sequence[Extra]) -> list[Pass]:
    return [each for ours in ordered for each in (ours, *(own for after, own in extra if after == ours.name))]


Look = Callable[[str, str, float, GraphModule, Measured | None], None]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Options for observing passes while they run.

    graph     name of the graph in the log and in profiles, also in its `meta["name"]`
    dump_to   folder for the readable graph after each pass, numbered
    dump_only the passes after which, by name, if not after each; "traced" is before any
    say       function that gets the table: the log
    look      function called before any pass ("traced") and after each, with the graph's name, the pass's, its seconds,
              the graph, and its row of the table
    verify_on the numbers that each pass is checked on
    costs     the cost model of nodes and collectives: with it the log has a table, not a line
    """

    graph: str = "training step"
    dump_to: Path | None = None
    verify_on: Numbers | None = None
    costs: Costs | None = None
    dump_only: Sequence[str] = ()
    say: Callable[[str], None] = logger.info
    look: Look | None = None

    def dump(self, gm: GraphModule, number: int, name: str) -> None:
        """Write the graph, if this pass is to be dumped."""
        if self.dump_to is not None and (not self.dump_only or name in self.dump_only):
            with refuse_unwritable(f"debug.dump_graphs = true: {self.dump_to}", self.dump_to):
                dump(gm, self.dump_to, number, name)


@uncollected()
def run_passes(
    gm: GraphModule, ordered: Sequence[Pass], disabled: Sequence[str], device: torch.device, watch: Inspection
) -> GraphModule:
    """Run the passes in order, each on the previous one's result; log their time and changes.

    Raises:
        RuntimeError: a pass returns no graph, or an unsound one, or breaks its promise; for a user's pass it is a
            UserError.
    """
    watch.dump(gm, 0, "traced")
    # Measuring takes as long as the passes: only for a log that somebody reads.
    costs = watch.costs if logger.isEnabledFor(logging.INFO) or watch.look is not None else None
    table = PassTable(gm, costs) if costs is not None else None
    if watch.look is not None:
        watch.look(watch.graph, "traced", 0.0, gm, table.measured if table is not None else None)
    num_nodes, in_all, given = len(gm.graph.nodes), 0.0, None
    has_places = any(map(call_hierarchy, gm.graph.nodes))
    for number, each in enumerate((p for p in ordered if p.name not in disabled), start=1):
        before, written = (copy_graph(gm), Written(gm)) if watch.verify_on is not None else (gm, None)
        begin = time.perf_counter()
        with meta.made_by(each.name):
            gm = each.run(gm)
            if has_places:
                meta.fill_places(gm)
        _check_graph(each, gm, watch.graph)
        seconds = time.perf_counter() - begin
        in_all += seconds
        if table is not None:
            table.add(each.name, seconds, gm)
        watch.dump(gm, number, each.name)
        if watch.look is not None:
            watch.look(watch.graph, each.name, seconds, gm, table.measured if table is not None else None)
        if watch.verify_on is not None and written is not None:
            gm.recompile()  # a pass may have skipped it: training's code is made from the graph
            is_changed = written.holds_more or not written.is_still_in(gm)
            given = _verify(each, before, gm, watch.verify_on, device, is_changed, given)
            logger.info(f"{watch.graph}: pass {each.name}: verified")
    gm.meta["name"] = watch.graph
    if table is not None:
        watch.say("\n".join([f"{watch.graph}: passes", *table.lines()]))
        if summary := table.communication():
            watch.say(f"{watch.graph}: {summary}")
    else:
        watch.say(f"{watch.graph}: passes: {num_nodes} -> {len(gm.graph.nodes)} nodes, {in_all:.2f} s")
    return gm


def _verify(
    each: Pass,
    before: GraphModule,
    after: GraphModule,
    numbers: Numbers,
    device: torch.device,
    is_changed: bool,
    given: Given | None,
) -> Given:
    try:
        return verify_pass(each.name, before, after, numbers, device, each.exact, is_changed, given)
    except BrokenPromise as error:
        if not each.option:
            raise
        raise UserError(
            f"{each.option}: {error}. Correct it: python -m torchtitan_graph.check_pass {each.name} shows it on a small"
            " graph. A pass that may round has exact = false in its entry"
        ) from error


def _check_graph(each: Pass, gm: GraphModule, graph: str) -> None:
    """Raise for a graph that can't be run, while the pass that made it is known."""
    if problem := find_problem(gm, is_ours=not each.option):
        if each.option:
            raise UserError(f"{each.option}: {problem}, of the {graph}; give back the graph, edited by graph/edit.py")
        raise RuntimeError(f"pass {each.name} {problem}")


def find_problem(gm: GraphModule, is_ours: bool = False) -> str | None:
    """Return what is wrong with a pass's result, None if nothing is. For our own passes only the order of the nodes is
    checked: FX's `lint` takes a fifth of the time of all passes."""
    if not isinstance(gm, GraphModule) or "signature" not in gm.meta:
        return f"gives {type(gm).__name__}, not a graph with its meta['signature']"
    try:
        _check_order(gm) if is_ours else gm.graph.lint()
    except RuntimeError as error:
        return f"gives a graph that can't run: {error}"
    outputs = gm.graph.output_node().args[0]
    said, found = signature_of(gm), (len(gm.graph.find_nodes(op="placeholder")), len(outputs))  # type: ignore[arg-type]
    if found != tuple(sum(slot.layout.num_tensors for slot in slots) for slots in (said.inputs, said.outputs)):
        return "gives a graph with other inputs or outputs than its meta['signature'] says"
    unknown = next((n for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta), None)
    return f"gives a graph with a node, {unknown}, whose value's shape is not in its meta['val']" if unknown else None


def _check_order(gm: GraphModule) -> None:
    seen: set[Node] = set()
    for node in gm.graph.nodes:
        if not seen.issuperset(inputs_of(node)):
            raise RuntimeError(f"{node} reads what comes later, or is in no graph")
        seen.add(node)
