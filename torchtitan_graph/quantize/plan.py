"""Which layers of a model multiply in float8, and how: what the configuration says, for this model and device."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from torchtitan_graph.config import JobConfig
from torchtitan_graph.config.option import nearest
from torchtitan_graph.config.quantize import EXPERTS, converts_experts, converts_linears, not_together
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models.layers.moe import Experts
from torchtitan_graph.parallel.layout import TP
from torchtitan_graph.parallel.parallelize import parameter_roles
from torchtitan_graph.parallel.plan import SPLIT_DIM, Plan
from torchtitan_graph.quantize.layers import kept_weights
from torchtitan_graph.quantize.products import DELAYED, E4M3, E5M2, ROWWISE, TENSORWISE, Recipe
from torchtitan_graph.quantize.state import Float8

MULTIPLE = 16  # of which the kernels want both sizes of a matrix to be
_FILTER, _FQNS = "quantize.linear.float8.filter_fqns", "quantize.grouped_mm.float8.fqns"


def plan_float8(config: JobConfig, model: nn.Module, device: torch.device) -> Float8 | None:
    """Find the layers to convert, or none where model.converters does not say so.

    Raises:
        UserError: a part of a name that no such layer has, none that is left, sizes that the kernels can't take, a
            layer that delayed scaling can't follow, a GPU without float8, or what the model's own float8 layers are not
            built with.
    """
    layers: dict[str, Recipe] = {}
    own = next(iter(kept_weights(model)), None)
    if own and (problems := not_together(config, f"the model's own float8 layer {own}", "or take a model without it")):
        raise UserError("\n".join(problems))
    if converts_linears(config.model.converters):
        layers |= _plan_linears(config, model, device)
    if converts_experts(config.model.converters):
        layers |= _plan_experts(config, model, device)
    return Float8(layers) if layers else None


def _plan_linears(config: JobConfig, model: nn.Module, device: torch.device) -> dict[str, Recipe]:
    """Find the linear layers. Those of a class of their own, such as a router's gate, stay as they are."""
    options = config.quantize.linear.float8
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    _check_parts(_FILTER, options.filter_fqns, linears, "linear layer's")
    names = [
        name
        for name, m in linears.items()
        if type(m) is nn.Linear and not any(part in name for part in options.filter_fqns)
    ]
    if not names:
        raise UserError(f"{_FILTER} = {options.filter_fqns!r}: leaves no linear layer; remove model.converters instead")
    for name in names:
        if any(size % MULTIPLE for size in linears[name].weight.shape):
            raise UserError(
                f"model.converters = ['float8']: {name} is {' x '.join(map(str, linears[name].weight.shape))}, and"
                f" both sizes must be multiples of {MULTIPLE}; name it in {_FILTER}"
            )
    scaling = options.recipe_name or TENSORWISE
    if scaling == DELAYED and config.model.num_mtp_layers and "output" in names:
        raise UserError(
            f"quantize.linear.float8.recipe_name = {scaling!r}: with model.num_mtp_layers the layer output is called"
            f" several times, and one history can't follow them; name output in {_FILTER}"
        )
    if device.type == "cuda" and not options.emulate and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"model.converters = ['float8']: {torch.cuda.get_device_name(device)} does not multiply in float8; set"
            " quantize.linear.float8.emulate = true, which is slow, or remove the converter"
        )
    logger.info(f"float8: {len(names)} linear layers, {scaling}; as they were: {len(linears) - len(names)}")
    is_dry = config.comm.mode == "fake_backend" and config.comm.fake_device != "CPU"
    recipe = _recipe(scaling, options.gradient_format, options.emulate)
    return dict.fromkeys(names, recipe._replace(is_traced_for_gpu=is_dry))


def _plan_experts(config: JobConfig, model: nn.Module, device: torch.device) -> dict[str, Recipe]:
    options = config.quantize.grouped_mm.float8
    experts = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
    asked = f"model.converters = [{EXPERTS!r}]"
    if not experts:
        raise UserError(f"{asked}: {config.model.name} has no experts in this flavour; remove it")
    if not options.fqns:
        raise UserError(f"{asked}: {_FQNS} names no experts; set it to ['experts'] for all, or remove the converter")
    _check_parts(_FQNS, options.fqns, experts, "experts'")
    if device.type == "cuda" and not options.emulate:
        raise UserError(
            f"{asked}: experts' products in float8 are emulated alone, on a GPU too; set"
            " quantize.grouped_mm.float8.emulate = true, which is slow, or remove the converter"
        )
    names = [name for name in experts if any(part in name for part in options.fqns)]
    scaling = options.recipe_name or ROWWISE
    logger.info(f"float8: experts of {len(names)} layers, {scaling}; as they were: {len(experts) - len(names)}")
    return dict.fromkeys(names, _recipe(scaling, options.gradient_format, options.emulate))


def _recipe(scaling: str, gradient: str | None, emulate: bool) -> Recipe:
    recipe = Recipe(scaling, emulate=emulate)
    formats = {"e4m3": E4M3, "e5m2": E5M2, None: E4M3 if recipe.by_row else E5M2}
    return recipe._replace(gradient=formats[gradient])


def _check_parts(option: str, parts: Sequence[str], names: Collection[str], whose: str) -> None:
    for part in parts:
        if not any(part in name for name in names):
            near = nearest(part, [*names, *(name.rpartition(".")[2] for name in names)])
            hint = f"; did you mean {near}?" if near else f"; they are such as {', '.join([*names][:4])}"
            raise UserError(f"{option} = {part!r}: is in no {whose} name{hint}")


def check_cut(float8: Float8, model: nn.Module, plan: Plan, degree: int) -> None:
    """Check that tensor parallelism leaves each rank parts of linear layers that the kernels can take.

    Raises:
        UserError: a part of another size, or a layer whose logits are sharded over the vocabulary.
    """
    roles = parameter_roles(model, plan)
    linears = [name for name in float8.layers if isinstance(model.get_submodule(name), nn.Linear)]
    for name in linears if degree > 1 else ():
        role = roles.get(f"{name}.weight", {}).get(TP) or plan.get(name, {}).get(TP, "")
        cut = f"parallelism.tensor_parallel_degree = {degree}: model.converters = ['float8']"
        if role == "vocabulary":
            raise UserError(f"{cut} is not built for {name}, sharded over the vocabulary; name it in {_FILTER}")
        size = model.get_parameter(f"{name}.weight").shape[SPLIT_DIM[role]] if role in SPLIT_DIM else 0
        if size // degree % MULTIPLE:
            raise UserError(
                f"{cut}: cuts the {size} rows or columns of {name} into parts of {size // degree}, which must be"
                f" multiples of {MULTIPLE}; choose another degree, or name it in {_FILTER}"
            )
