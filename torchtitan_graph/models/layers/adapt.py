"""What of a model is trained: parameters frozen by name, and low-rank adapters added to its linear layers."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

from torch import Tensor, nn

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.log import logger
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.lora import LoRALinear, adapter_parameters, add_to_stack, packed_weights
from torchtitan_graph.models.layers.moe import Experts
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.ops.packed import BLOCK, wide_shape
from torchtitan_graph.parallel.layout import EP, TP, ParallelDims
from torchtitan_graph.parallel.parallelize import pattern_matches
from torchtitan_graph.parallel.plan import Plan, tensor_roles

_FREEZE, _TARGETS, _BASE = "model.freeze", "model.lora.targets", "model.lora.base"


def adapt(model: Decoder, family: ModuleType, options: job.Model) -> None:
    """Freeze the parameters of `model.freeze`, or add the adapters of `[model.lora]` and freeze all else. The model is
    on meta.

    Raises:
        UserError: as `freeze` and `add_adapters`.
    """
    if options.freeze:
        freeze(model, options.freeze)
    if options.lora.rank:
        weights = add_adapters(model, family, options.lora)
        number = sum(model.get_parameter(name).numel() for name in adapter_parameters(model))
        added = f"{len(weights)} weights have adapters of rank {options.lora.rank}, {number:,} parameters"
        packed = f", these weights in {options.lora.base}" if options.lora.base else ""
        logger.info(f"model.lora: {added}; all else is frozen{packed}")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Make parameters take no gradients: those whose names, or whose modules' names, match one of the patterns.

    Raises:
        UserError: a pattern matches nothing, all would be frozen, or a tied parameter by one of its names only.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    every = [name for each in names.values() for name in each]
    frozen = set().union(*(find(_FREEZE, pattern, every, "parameter or module") for pattern in patterns))
    for parameter, own in names.items():
        if not frozen.isdisjoint(own):
            if rest := [name for name in own if name not in frozen]:
                there = next(name for name in own if name in frozen)
                raise UserError(
                    f"{_FREEZE} = {list(patterns)!r}: {there} is tied to {', '.join(rest)}, and both are one parameter;"
                    " name both, or neither"
                )
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names):
        raise UserError(f"{_FREEZE} = {list(patterns)!r}: matches every parameter, so there is nothing to train")
    number = sum(p.numel() for p in names if not p.requires_grad)
    logger.info(f"{_FREEZE}: {number:,} of {sum(p.numel() for p in names):,} parameters are frozen")


def find(option: str, pattern: str, names: Collection[str], kind: str) -> set[str]:
    """Return the names that a pattern matches: whole, or the beginning of a name up to one of its dots.

    Raises:
        UserError: there are none; it has the nearest name.
    """
    found = {name for name in names if any(fnmatch.fnmatchcase(each, pattern) for each in beginnings(name))}
    if not found:
        known = list(dict.fromkeys(each for name in names for each in reversed(beginnings(name))))
        near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.0)
        raise UserError(
            f"{option} = {pattern!r}: matches no {kind}; the nearest name is {near[0]}; * stands for any part of a name"
        )
    return found


def beginnings(name: str) -> list[str]:
    """Return a name and the names of all that it is inside of, outermost first: what a pattern may match."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def add_adapters(model: Decoder, family: ModuleType, options: job.Lora) -> list[str]:
    """Add an adapter to each weight of `targets`, give it its roles in the model's plan, and freeze all else; return
    the names of those weights.

    Raises:
        UserError: a pattern matches no linear layer of a block and no stack of experts, or one of another class.
    """
    rank = options.rank
    scale = options.alpha / (rank**0.5 if options.rslora else rank)
    layers, stacks = _linear_layers(model), _stacks(model)
    candidates = [*layers, *stacks]
    if not candidates:
        raise UserError(f"model.lora.rank = {rank}: the blocks of this model have no linear layer; set it to 0")
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in candidates)
    kind = f"linear layer of a block ({', '.join(leaves)})"
    chosen = set().union(*(find(_TARGETS, pattern, candidates, kind) for pattern in options.targets))
    if narrow := [n for n in layers if n in chosen and rank > min(layers[n].weight.shape)]:
        sizes = [f"{name} is {' x '.join(map(str, layers[name].weight.shape))}" for name in narrow]
        raise UserError(f"model.lora.rank = {rank}: {listed(sizes, 3)}, which has no such rank; lower it")
    if options.base:
        linear = {name: layer.weight for name, layer in layers.items()}
        every = linear | {name: model.get_parameter(name) for name in stacks}
        _check_packable(model, options.base, {name: x for name, x in every.items() if name in chosen})
    model.requires_grad_(False)
    new = {layers[name]: LoRALinear(layers[name], rank, scale, options.base) for name in layers if name in chosen}
    for name, old in [*model.named_modules(remove_duplicate=False)]:  # a layer may have several names
        if old in new:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, new[old])  # type: ignore[index]
    for name in (name for name in stacks if name in chosen):
        owner, _, leaf = name.rpartition(".")
        add_to_stack(model.get_submodule(owner), leaf, rank, scale, options.base, is_transposed=stacks[name])
    weights = [f"{name}.weight" if name in layers else name for name in candidates if name in chosen]
    model.PLAN = {**plan_of(family, model), **_roles(plan_of(family, model), model, weights)}  # type: ignore[assignment]
    model.lora = options
    return weights


def _check_packable(model: nn.Module, packing: str, weights: Mapping[str, Tensor]) -> None:
    """Raise a UserError unless all weights, by the names of their layers or stacks, can be packed."""
    at, remedy = f"{_BASE} = {packing!r}", "leave it out of model.lora.targets, or model.lora.base at ''"
    for name, weight in weights.items():
        if weight.dim() == 3 and not isinstance(model.get_submodule(name.rpartition(".")[0]), Experts):
            raise UserError(
                f"{at}: {name} is a stack of experts of another library, which is not packed here; {remedy}"
            )
        width = weight.shape[-1]
        if width % BLOCK:
            raise UserError(f"{at}: rows of {name} have {width} numbers, no multiple of {BLOCK}; {remedy}")


def check_packed(model: nn.Module, plan: Plan, dims: ParallelDims) -> None:
    """Check that tensor parallelism cuts packed weights between blocks.

    Raises:
        UserError: it does not, with the layer's name.
    """
    roles, packings = tensor_roles(plan, dims) if dims.tp > 1 else {}, packed_weights(model)
    for name, packing in packings.items():
        parameter = model.get_parameter(name)
        cuts_rows = any(
            pattern_matches(pattern, name) and role == f"shard {parameter.dim() - 1}" for pattern, role in roles.items()
        )
        if cuts_rows and (width := wide_shape(parameter.shape, packing)[-1]) % (dims.tp * BLOCK):
            raise UserError(
                f"parallelism.tensor_parallel_degree = {dims.tp}: cuts the rows of {width} numbers of {name}, which"
                f" {_BASE} = {packing!r} packs in blocks of {BLOCK}, inside a block; choose a degree that divides"
                f" {width // BLOCK}, or leave the layer out of model.lora.targets"
            )


def _linear_layers(model: Decoder) -> dict[str, nn.Linear]:
    """Return the plain linear layers of the blocks; a subclass, such as a router's gate, computes otherwise."""
    return {
        f"{block}.{name}": module
        for block, inside in model.blocks.items()
        for name, module in inside.named_modules()
        if type(module) is nn.Linear
    }


def _stacks(model: Decoder) -> dict[str, bool]:
    """Return the names of the stacks of experts' weights, and whether they are (E, in, out)."""
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            found |= {f"{name}.{leaf}": False for leaf in ("w1", "w2", "w3")}
        elif hasattr(module, "rows"):  # another library's, see layers/of_transformers.py
            leaves = [leaf for leaf, p in module.named_parameters(recurse=False) if p.dim() == 3]
            found |= {f"{name}.{leaf}": bool(module.is_transposed) for leaf in leaves}
    return found


def _roles(plan: Plan, model: nn.Module, weights: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """Return the roles of adapters' matrices, from those of their weights.

    A weight cut by rows has B cut alike, and A on each rank; cut by columns, A is cut alike, and each rank's product
    with B is its term of the sum that the weight's is.
    """
    found: dict[str, Mapping[str, str]] = {}
    for pattern, roles in plan.items():
        example = next((name for name in weights if pattern_matches(pattern, name)), None)
        if example is None:
            continue
        of_A, of_B = dict(roles), dict(roles)
        if TP in roles:
            num_dims = model.get_parameter(example).dim()
            of_A[TP] = roles[TP] if roles[TP] == f"shard {num_dims - 1}" else "replicate"
            of_B[TP] = roles[TP] if roles[TP] == f"shard {num_dims - 2}" else "replicate"
        assert roles.get(EP, "expert") == "expert", roles
        stem, separator = (pattern.removesuffix(".weight"), ".") if pattern.endswith(".weight") else (pattern, "_")
        end = ".weight" if separator == "." else ""
        found |= {f"{stem}{separator}lora_A{end}": of_A, f"{stem}{separator}lora_B{end}": of_B}
    return found
