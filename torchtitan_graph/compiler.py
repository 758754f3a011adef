"""THE ordered list of passes, and how it is run."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import itertools
import re
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchtitan_graph.config import job
from torchtitan_graph.config.option import nearest
from torchtitan_graph.config.own import find_own
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.changes import PassTable
from torchtitan_graph.graph.cost import Costs
from torchtitan_graph.graph.liveness import in_one_part
from torchtitan_graph.graph.show import dump
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.graph.torch_private import inductor_options
from torchtitan_graph.graph.uncollected import uncollected
from torchtitan_graph.log import logger
from torchtitan_graph.models.layers.feed_forward import SwiGLU
from torchtitan_graph.models.layers.rope import Rotation
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard, Storage
from torchtitan_graph.parallel.verify import verify_pass
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.cleanup_update import cleanup_update
from torchtitan_graph.passes.compile_regions import FLEX, LOSS, WHOLE, Regions, compile_regions, region_of
from torchtitan_graph.passes.fill_waits import fill_waits
from torchtitan_graph.passes.merge_equal import merge_equal
from torchtitan_graph.passes.mixed_precision import mixed_precision
from torchtitan_graph.passes.offload_activations import offload_activations
from torchtitan_graph.passes.overlap_collectives import overlap_collectives
from torchtitan_graph.passes.overlap_context import overlap_context
from torchtitan_graph.passes.overlap_copies import overlap_copies
from torchtitan_graph.passes.overlap_products import Ring, overlap_products
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.rest_on_host import rest_on_host
from torchtitan_graph.passes.reuse_logits import reuse_logits
from torchtitan_graph.passes.reuse_sharded_logits import reuse_sharded_logits
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_budget import tag_budget
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.passes.tag_offload import tag_offload
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.passes.tag_resharding import tag_resharding


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """All that passes are told: what was decided before the graph was there.

    blocks   the model's blocks, by their names
    buckets  which parameters are gathered, and whose gradients are reduced, together
    context  the modules that gather over the sequence, by their names
    offload  the modules whose activations lie in the host's memory till backward, by their names
    costs    how long nodes and collectives take: by it collectives are placed
    part_of  of a pipeline's stage, the part that a node will run in: each holds no more at its peak for their placing
    ring     the ranks of tensor parallelism, if what they send is to be cut into parts
    """

    storages: Mapping[str, Storage]
    blocks: Container[str]
    buckets: Sequence[Sequence[str]]
    recompute: Recompute = Recompute()
    reshard: Reshard = Reshard()
    regions: Regions = dataclasses.field(default_factory=dict)
    context: Container[str] = ()
    offload: Collection[str] = ()
    costs: Costs = Costs()
    part_of: Callable[[Node], str] = in_one_part
    ring: Ring | None = None


class Pass(NamedTuple):
    """A pass, as the list holds it.

    run       takes a graph and gives one, the same edited or another; what it gives is what runs
    exact     keeps numbers bitwise; else up to rounding
    required  can't be left out: the others, or the layout that live parameters are bound in, rest on it
    cut       of a pipeline's stage it runs on each part, after the cut; the others on the whole
    option    of a user's pass, the entry of `compile.extra_passes` that names it
    """

    name: str
    run: Callable[[GraphModule], GraphModule]
    exact: bool = True
    required: bool = False
    cut: bool = False
    option: str = ""


class Extra(NamedTuple):
    """A pass of the user's, and the name of the pass that it follows."""

    after: str
    own: Pass


def passes(plan: PassPlan, extra: Sequence[Extra] = ()) -> list[Pass]:
    """What runs, top to bottom. A pass with nothing to do returns the graph as it is."""
    ordered = [
        Pass("cleanup", cleanup, required=True),
        Pass("shard_params", partial(shard_params, storages=plan.storages), required=True),
        Pass("mixed_precision", partial(mixed_precision, storages=plan.storages), required=True),
        Pass("rest_on_host", partial(rest_on_host, storages=plan.storages), required=True),
        Pass("merge_equal", merge_equal),
        Pass("reuse_logits", reuse_logits),
        Pass("reuse_sharded_logits", reuse_sharded_logits),
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
        Pass("bucket_collectives", partial(bucket_collectives, buckets=plan.buckets)),
        Pass("overlap_context", partial(overlap_context, modules=plan.context)),
        Pass("overlap_collectives", partial(overlap_collectives, costs=plan.costs, part_of=plan.part_of)),
        # Does nothing unless asked to.
        Pass("overlap_products", partial(overlap_products, ring=plan.ring, costs=plan.costs), exact=False),
        Pass("fill_waits", partial(fill_waits, blocks=plan.blocks, costs=plan.costs, part_of=plan.part_of)),
        Pass("overlap_copies", partial(overlap_copies, buckets=plan.buckets)),
        # Does nothing unless asked to, but on a GPU with flex attention.
        Pass("compile_regions", partial(compile_regions, regions=plan.regions), exact=False, cut=True),
    ]
    return _with_own(ordered, extra)


def update_passes(extra: Sequence[Extra] = ()) -> list[Pass]:
    """What runs on the graph of `compile.optimizer_in_graph`."""
    return _with_own([Pass("cleanup_update", cleanup_update, required=True)], extra)


def _with_own(ordered: Sequence[Pass], extra: Sequence[Extra]) -> list[Pass]:
    return [each for ours in ordered for each in (ours, *(own for after, own in extra if after == ours.name))]


def check_disabled(names: Sequence[str]) -> None:
    """Check `compile.disable_passes`.

    Raises:
        UserError: a name that is no pass, or a pass that can't be left out.
    """
    known = {each.name: each for each in passes(PassPlan({}, (), ()))}
    optional = [name for name, each in known.items() if not each.required]
    for name in names:
        if name in known and known[name].required:
            raise UserError(
                f"compile.disable_passes = {name!r}: this pass can't be left out, the others and the layout of the "
                f"parameters rest on it; legal are {', '.join(optional)}"
            )
        if name not in known:
            near = difflib.get_close_matches(name, optional, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"compile.disable_passes = {name!r}: legal are {', '.join(optional)}{hint}")


def plan_extra(options: job.Compile) -> list[Extra]:
    """Find the passes of `compile.extra_passes`.

    Raises:
        UserError: a name that can't be imported or is no function of a graph, or a pass to follow that does not exist
            or is left out.
    """
    of_update = update_passes() if options.optimizer_in_graph else []
    known = {each.name: each for each in (*passes(PassPlan({}, (), ())), *of_update)}
    legal = [name for name in known if name not in options.disable_passes]
    found = []
    for number, entry in enumerate(options.extra_passes, 1):
        where = f"compile.extra_passes, entry {number}"
        if entry.after not in legal:
            near = nearest(entry.after, legal)
            why = "compile.disable_passes leaves it out; " if entry.after in known else ""
            hint = f"; did you mean {near}?" if near else ""
            raise UserError(f"{where}: after = {entry.after!r}: {why}legal are {', '.join(legal)}{hint}")
        run = find_own(f"{where}: pass", entry.pass_)
        try:
            inspect.signature(run).bind(None)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{where}: pass = {entry.pass_!r}: can't be called with a graph alone: {error}; name a function that "
                "takes a GraphModule and gives one"
            ) from error
        option = f"{where}: pass = {entry.pass_!r}"
        found.append(Extra(entry.after, Pass(entry.pass_, run, entry.exact, cut=known[entry.after].cut, option=option)))
    return found


# What compile.fusions names: modules of these classes, each compiled alone; and the loss.
FUSIONS: Mapping[str, type[nn.Module] | None] = {
    "rms_norm": nn.RMSNorm,
    "swiglu": SwiGLU,
    "rope": Rotation,
    "cross_entropy": None,
}


def needed_regions(device: torch.device) -> dict[str, dict[str, Any]]:
    """Give what is compiled unasked: flex attention on CUDA, which holds every score where it is not."""
    return {FLEX: {}} if device.type == "cuda" else {}


def plan_regions(options: job.Compile, model: nn.Module, device: torch.device) -> Regions:
    """Give what `compile_regions` compiles, and Inductor's options there.

    Raises:
        UserError: a pattern that no module's name matches, a fusion that the model has no use for, options of something
            that is not compiled, or options that Inductor does not have.
    """
    codegen = options.codegen or ("blocks" if options.enable else "off")
    chosen = options.components if codegen != "off" else []
    is_whole = codegen == "whole"
    patterns = options.regions if "model" in chosen and not is_whole else []
    for pattern in patterns:
        if not any(region_of(name, [pattern]) for name, _ in model.named_modules()):
            raise UserError(
                f"compile.regions = {pattern!r}: matches no module; legal are names such as "
                f"{', '.join(name for name, _ in itertools.islice(model.named_modules(), 1, 6))}, * for any one part"
            )
    fused = {name: _modules_of(name, model) for name in options.fusions}
    regions: dict[str, dict[str, Any]] = {pattern: {} for pattern in itertools.chain(patterns, *fused.values())}
    regions |= {WHOLE: {}} if is_whole else {LOSS: {}} if LOSS in chosen else {}
    regions |= {FLEX: {}} if FLEX in chosen else {}
    regions |= needed_regions(device)
    for pattern, *settings in options.region_options:
        known = {name: [name] for name in regions} | fused
        if pattern not in known:
            raise UserError(
                f"compile.region_options = {pattern!r}: is not compiled; compiled are "
                f"{', '.join(known) or 'none, while compile.codegen is off'}"
            )
        for region in known[pattern]:
            regions[region] |= inductor_options(settings)
    return regions


def _modules_of(fusion: str, model: nn.Module) -> list[str]:
    """Give the regions of a fusion: patterns of module names, few however many layers there are."""
    if fusion not in FUSIONS:
        near = nearest(fusion, list(FUSIONS))
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"compile.fusions = {fusion!r}: legal are {', '.join(FUSIONS)}{hint}")
    if (kind := FUSIONS[fusion]) is None:
        return [LOSS]
    names = (name for name, module in model.named_modules() if isinstance(module, kind))
    patterns = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    if not patterns:
        raise UserError(f"compile.fusions = {fusion!r}: the model has no module {kind.__name__}; leave it out")
    return patterns


def plan_saved(
    saved: Sequence[str], again: Sequence[str], model: nn.Module, blocks: Container[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Give the modules whose results are kept for backward, and those whose results are computed again there.

    Args:
        saved, again: `activation_checkpoint.save` and `.recompute`.

    Raises:
        UserError: a pattern that matches no module of a block, or only modules that the other names as well.
    """
    kept = {name for each in saved for name in _modules_of_blocks("activation_checkpoint.save", each, model, blocks)}
    computed: set[str] = set()
    for pattern in again:
        matching = _modules_of_blocks("activation_checkpoint.recompute", pattern, model, blocks)
        if kept.issuperset(matching):
            raise UserError(
                f"activation_checkpoint.recompute = {pattern!r}: activation_checkpoint.save names the same modules, and"
                " goes before it; leave the pattern out of one of them"
            )
        computed.update(matching)
    return frozenset(kept), frozenset(computed - kept)


def _modules_of_blocks(option: str, pattern: str, model: nn.Module, blocks: Container[str]) -> list[str]:
    inside = [name for name, _ in model.named_modules() if block_of(name, blocks)]
    if matching := [name for name in inside if region_of(name, [pattern]) == name]:
        return matching
    alike = [".".join("*" if "*" in pattern and part.isdigit() else part for part in x.split(".")) for x in inside]
    near = nearest(pattern, dict.fromkeys(alike))
    raise UserError(
        f"{option} = {pattern!r}: matches no module of a block; legal are names such as {', '.join(inside[:4])}, * for"
        f" any one part{f'; did you mean {near}?' if near else ''}"
    )


def plan_offload(
    patterns: Sequence[str], model: nn.Module, blocks: Container[str], last: Container[str]
) -> tuple[str, ...]:
    """Give the modules whose activations lie in the host's memory till backward.

    Args:
        patterns: `activation_checkpoint.offload`.
        last: the blocks whose backward comes first: of the model, or of each stage.

    Raises:
        UserError: a pattern that matches no module of a block, or only of those.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = _modules_of_blocks("activation_checkpoint.offload", pattern, model, blocks)
        movable = [name for name in matching if block_of(name, blocks) not in last]
        if not movable:
            raise UserError(
                f"activation_checkpoint.offload = {pattern!r}: matches only in {block_of(matching[0], blocks)}, "
                "behind which no other block runs before backward reads its activations; name modules of earlier blocks"
            )
        found |= dict.fromkeys(movable)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What to watch while passes run.

    graph     what the log calls the graph
    dump_to   folder for the readable graph after each pass, numbered
    dump_only the passes after which, by name, if not after each; "traced" is before any
    verify_on the graph's inputs that are not parameters: each pass is checked on them
    costs     how long nodes and collectives take: with it the log has a table, not a line
    """

    graph: str = "training step"
    dump_to: Path | None = None
    verify_on: list[Tensor] | None = None
    costs: Costs | None = None
    dump_only: Sequence[str] = ()

    def dump(self, gm: GraphModule, number: int, name: str) -> None:
        """Write the graph, if it is one to be looked at."""
        if self.dump_to is not None and (not self.dump_only or name in self.dump_only):
            dump(gm, self.dump_to, number, name)


@uncollected()
def run_passes(
    gm: GraphModule, ordered: Sequence[Pass], disabled: Sequence[str], device: torch.device, watch: Inspection
) -> GraphModule:
    """Run the passes in order, each on what the one before gave; log what they took and changed.

    Raises:
        RuntimeError: a pass gives no graph, or not a sound one; of a user's pass it is a UserError.
    """
    watch.dump(gm, 0, "traced")
    table = PassTable(gm, watch.costs) if watch.costs is not None else None
    num_nodes, in_all = len(gm.graph.nodes), 0.0
    for number, each in enumerate((p for p in ordered if p.name not in disabled), start=1):
        before = copy.deepcopy(gm) if watch.verify_on is not None else gm
        begin = time.perf_counter()
        gm = each.run(gm)
        _check_graph(each, gm, watch.graph)
        seconds = time.perf_counter() - begin
        in_all += seconds
        if table is not None:
            table.add(each.name, seconds, gm)
        watch.dump(gm, number, each.name)
        if watch.verify_on is not None:
            gm.recompile()  # a pass may have left it out: what runs in training is made from the graph
            verify_pass(each.name, before, gm, watch.verify_on, device, exact=each.exact)
            logger.info(f"{watch.graph}: pass {each.name}: verified")
    if table is not None:
        logger.info("\n".join([f"{watch.graph}: passes", *table.lines()]))
        if told := table.communication():
            logger.info(f"{watch.graph}: {told}")
    else:
        logger.info(f"{watch.graph}: passes: {num_nodes} -> {len(gm.graph.nodes)} nodes, {in_all:.2f} s")
    return gm


def _check_graph(each: Pass, gm: GraphModule, graph: str) -> None:
    """Refuse what can't be run, while the pass that made it is known."""
    if problem := find_problem(gm, is_ours=not each.option):
        if each.option:
            raise UserError(f"{each.option}: {problem}, of the {graph}; give back the graph, edited by graph/edit.py")
        raise RuntimeError(f"pass {each.name} {problem}")


def find_problem(gm: GraphModule, is_ours: bool = False) -> str | None:
    """Say what is wrong with the graph that a pass gives. Of our own passes only the order of the nodes is looked at:
    FX's `lint` takes a fifth of the time of all passes."""
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
        if not seen.issuperset(node.all_input_nodes):
            raise RuntimeError(f"{node} reads what comes later, or is in no graph")
        seen.add(node)
