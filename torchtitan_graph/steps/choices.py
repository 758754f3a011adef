"""Options about passes: checked, and resolved to the model's modules and the user's own functions."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtitan_graph.compiler import Extra, Pass, PassPlan, passes, update_passes
from torchtitan_graph.config import job
from torchtitan_graph.config.own import find_own
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.models.layers.feed_forward import SwiGLU
from torchtitan_graph.models.layers.rope import Rotation
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.passes.compile_regions import FLEX, WHOLE, Regions, region_of


def check_disabled(names: Sequence[str]) -> None:
    """Check `compile.disable_passes`.

    Raises:
        UserError: a name that is not a pass, or a pass that can't be left out.
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
            hint = did_you_mean(name, optional)
            raise UserError(f"compile.disable_passes = {name!r}: legal are {', '.join(optional)}{hint}")


def plan_extra(options: job.Compile) -> list[Extra]:
    """Return the passes of `compile.extra_passes`, imported.

    Raises:
        UserError: a name can't be imported or is not a function of a graph, or a pass to follow does not exist
            or is left out.
    """
    entries = enumerate(options.extra_passes, 1)
    where = "compile.extra_passes, entry"
    return [find_extra(each, options, f"{where} {i}: pass", f"{where} {i}: after") for i, each in entries]


def find_extra(entry: job.ExtraPass, options: job.Compile, of_pass: str, of_after: str) -> Extra:
    """Return a user's pass, imported; `of_pass` and `of_after` are its options in messages.

    Raises:
        UserError: as `plan_extra`.
    """
    of_update = update_passes() if options.optimizer_in_graph else []
    known = {each.name: each for each in (*passes(PassPlan({}, (), ())), *of_update)}
    legal = [name for name in known if name not in options.disable_passes]
    if entry.after not in legal:
        why = "compile.disable_passes leaves it out; " if entry.after in known else ""
        hint = did_you_mean(entry.after, legal)
        raise UserError(f"{of_after} = {entry.after!r}: {why}legal are {', '.join(legal)}{hint}")
    run, option = find_own(of_pass, entry.pass_), f"{of_pass} = {entry.pass_!r}"
    try:
        inspect.signature(run).bind(None)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{option}: can't be called with a graph alone: {error}; name a function that takes a GraphModule and gives"
            " one"
        ) from error
    return Extra(entry.after, Pass(entry.pass_, run, entry.exact, cut=known[entry.after].cut, option=option))


# Modules that an operator of elementwise.py can replace.
ELEMENTWISE: Mapping[str, type[nn.Module]] = {"swiglu": SwiGLU, "rope": Rotation}
# Names in compile.fusions: modules of these classes, each compiled alone.
FUSIONS: Mapping[str, type[nn.Module]] = {"rms_norm": nn.RMSNorm, **ELEMENTWISE}


def needed_regions(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the regions always compiled: flex attention on CUDA, which holds every score when uncompiled."""
    return {FLEX: {}} if device.type == "cuda" else {}


def plan_regions(options: job.Compile, model: nn.Module, device: torch.device) -> Regions:
    """Return the regions for `compile_regions`.

    Raises:
        UserError: a pattern that no module's name matches, or a fusion that the model has no use for.
    """
    patterns = options.regions if options.codegen == "blocks" else []
    for pattern in patterns:
        if not any(region_of(name, [pattern]) for name, _ in model.named_modules()):
            raise UserError(
                f"compile.regions = {pattern!r}: matches no module; legal are names such as "
                f"{', '.join(name for name, _ in itertools.islice(model.named_modules(), 1, 6))}, * for any one part"
            )
    fused = [_modules_of(name, model) for name in options.fusions]
    regions: dict[str, dict[str, Any]] = {pattern: {} for pattern in itertools.chain(patterns, *fused)}
    regions |= {WHOLE: {}} if options.codegen == "whole" else {}
    regions |= needed_regions(device)
    blocks = getattr(model, "blocks", {}) if options.dedupe_layers else {}
    alike = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in blocks)
    return regions | dict.fromkeys(alike)


def _modules_of(fusion: str, model: nn.Module) -> list[str]:
    """Return the regions of a fusion: patterns of module names, few however many layers there are."""
    if fusion not in FUSIONS:
        hint = did_you_mean(fusion, FUSIONS)
        raise UserError(f"compile.fusions = {fusion!r}: legal are {', '.join(FUSIONS)}{hint}")
    kind = FUSIONS[fusion]
    names = (name for name, module in model.named_modules() if isinstance(module, kind))
    patterns = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    if not patterns:
        raise UserError(f"compile.fusions = {fusion!r}: the model has no module {kind.__name__}; leave it out")
    return patterns


def plan_saved(
    saved: Sequence[str], again: Sequence[str], model: nn.Module, blocks: Container[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules whose results are kept for backward, and those whose results are recomputed there.

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
    raise UserError(
        f"{option} = {pattern!r}: matches no module of a block; legal are names such as {', '.join(inside[:4])}, * for"
        f" any one part{did_you_mean(pattern, dict.fromkeys(alike))}"
    )


def plan_offload(
    patterns: Sequence[str], model: nn.Module, blocks: Container[str], last: Container[str]
) -> tuple[str, ...]:
    """Return the modules whose activations are offloaded to the host's memory till backward.

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
