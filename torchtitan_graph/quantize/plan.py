"""The layers of a model that multiply in float8, and their recipes, from the configuration, for this model and
device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from torchtitan_graph.config import JobConfig
from torchtitan_graph.config.job import OPTIONS, Problem, lines
from torchtitan_graph.config.quantize import (
    EXPERTS,
    EXPERTS_MX,
    LINEARS,
    LINEARS_MX,
    converts_linears,
    converts_to_mx,
    not_together,
    tokens_problems,
)
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.log import logger
from torchtitan_graph.models.layers.moe import Experts
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.parallel.layout import TP
from torchtitan_graph.parallel.parallelize import parameter_roles
from torchtitan_graph.parallel.plan import SPLIT_DIM, Plan
from torchtitan_graph.quantize.layers import Kept, Linear, kept_weights
from torchtitan_graph.quantize.products import (
    DELAYED,
    E4M3,
    E5M2,
    MX,
    ROWWISE,
    TENSORWISE,
    Recipe,
    multiple_for,
    takes_kernel,
)
from torchtitan_graph.quantize.state import Float8

_FILTER = "quantize.linear.float8.filter_fqns"
_FILTER_MX = "quantize.linear.mx.filter_fqns"


def plan_float8(config: JobConfig, model: nn.Module, target: Target) -> Float8 | None:
    """Return the layers to convert; None without such model.converters.

    Raises:
        UserError: a part of a name that no such layer has, no layer left, sizes that the kernels don't support, a layer
            that delayed scaling does not support, a GPU without float8, or a float8 layer of the model's own with any
            of these (except sizes: such a layer is not built).
    """
    layers: dict[str, Recipe] = {}
    _plan_own(config, model, target)
    if converts_linears(config.model.converters):
        layers |= _plan_linears(config, model, target)
    if converts_to_mx(config.model.converters):
        layers |= _plan_mx(config, model, target)
    if EXPERTS in config.model.converters:
        of_float8 = config.quantize.grouped_mm.float8
        recipe = _recipe(of_float8.recipe_name or ROWWISE, of_float8.gradient_format, of_float8.emulate)
        layers |= _plan_experts(config, model, target, EXPERTS, of_float8.fqns, recipe)
    if EXPERTS_MX in config.model.converters:
        of_mx = config.quantize.grouped_mm.mx
        recipe = _recipe(of_mx.recipe_name, None, of_mx.emulate)
        layers |= _plan_experts(config, model, target, EXPERTS_MX, of_mx.fqns, recipe)
    return Float8(layers) if layers else None


def _plan_own(config: JobConfig, model: nn.Module, target: Target) -> None:
    """Check the model's own layers as the converters' are; in a dry run for a GPU they use its products."""
    own = {name: kept for name, (kept, _) in kept_weights(model).items()}
    if not own:
        return
    what, without = f"the model's own float8 layer {next(iter(own))}", "take a model without it"
    problems = [*not_together(config, what, f"or {without}")]
    linears = {name: kept for name, kept in own.items() if isinstance(kept, Linear)}
    if linears:
        is_mx = any(kept.recipe.by_block for kept in linears.values())
        problems += [Problem(key, f"{why} ({what})") for key, why in tokens_problems(config, is_mx, without)]
    if problems:
        raise UserError("\n".join(lines(config, problems)))
    asked = f"model.name = {config.model.name!r}: its own float8 layer"
    delayed = [name for name, kept in own.items() if kept.recipe.scaling == DELAYED]
    _check_called_once(model, delayed, f"{asked}s are of recipe {DELAYED}", "call a layer in one place")
    for name, kept in own.items():
        _check_gpu(target, f"{asked} {name}", kept)
        kept.recipe = kept.recipe._replace(is_traced_for_gpu=target.is_gpu)


def _check_gpu(target: Target, asked: str, kept: Kept) -> None:
    """Raise a UserError for a layer of the model's own that this device, or a dry run's, can't multiply."""
    if kept.recipe.emulate or not target.is_gpu:
        return
    instead, recipe = "give its recipe emulate=True, which is slow", kept.recipe
    if isinstance(kept, Linear) and recipe.by_block:
        raise UserError(f"{asked}: linear layers' products in MX formats are emulated alone, on a GPU too; {instead}")
    if not isinstance(kept, Linear) and (not recipe.by_row or recipe.gradient != E4M3):
        raise UserError(f"{asked}: a GPU's products of experts scale by rows, and are of e4m3; {instead}")
    device = target.device
    if not (_multiplies_linears(device) if isinstance(kept, Linear) else _multiplies_groups(device, recipe)):
        raise UserError(f"{asked}: {torch.cuda.get_device_name(device)} does not multiply it in float8; {instead}")


def _multiplies_linears(device: torch.device) -> bool:
    """Return whether a GPU has kernels of linear layers in float8. What is no GPU of this process is not asked."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _multiplies_groups(device: torch.device, recipe: Recipe) -> bool:
    """Return whether a GPU has the kernels of a recipe's products of groups of rows; as above."""
    if device.type != "cuda":
        return True
    major, _ = torch.cuda.get_device_capability(device)  # torch's kernels are of these two alone
    return major == 10 if recipe.by_block else major in (9, 10)


def _plan_linears(config: JobConfig, model: nn.Module, target: Target) -> dict[str, Recipe]:
    options = config.quantize.linear.float8
    scaling = options.recipe_name or TENSORWISE
    recipe = _recipe(scaling, options.gradient_format, options.emulate)._replace(is_traced_for_gpu=target.is_gpu)
    names = _find_linears(model, recipe, options.filter_fqns)
    if scaling == DELAYED:
        _check_called_once(model, names, _delayed(_FILTER), f"name it in {_FILTER}")
    if scaling == DELAYED and config.model.num_mtp_layers and "output" in names:
        raise UserError(
            f"quantize.linear.float8.recipe_name = {scaling!r}: with model.num_mtp_layers the layer output is called"
            f" several times, and one history can't follow them; name output in {_FILTER}"
        )
    device = target.device
    if not options.emulate and not _multiplies_linears(device):
        raise UserError(
            f"model.converters = ['float8']: {torch.cuda.get_device_name(device)} does not multiply in float8; set"
            " quantize.linear.float8.emulate = true, which is slow, or remove the converter"
        )
    return dict.fromkeys(names, recipe)


def _plan_mx(config: JobConfig, model: nn.Module, target: Target) -> dict[str, Recipe]:
    if target.is_gpu:
        logger.warning(
            "model.converters = ['mx']: products in MX formats are emulated in fp32 on a GPU too, which is slower than"
            " bfloat16; use model.converters = ['float8'] for speed"
        )
    recipe = Recipe(MX, E4M3, emulate=True)
    return dict.fromkeys(_find_linears(model, recipe, config.quantize.linear.mx.filter_fqns), recipe)


def _find_linears(model: nn.Module, recipe: Recipe, filtered: Sequence[str]) -> list[str]:
    """Return the linear layers to convert. Subclasses, such as a router's gate, stay unchanged."""
    option, converter, multiple = _words_of(recipe)
    chosen = [part for part in filtered if part not in OPTIONS[option].default]
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    _check_parts(option, chosen, linears, "linear layer's")
    names = [name for name, m in linears.items() if type(m) is nn.Linear and not any(part in name for part in filtered)]
    if not names:
        raise UserError(f"{option} = {filtered!r}: leaves no linear layer; remove model.converters instead")
    shapes = {name: linears[name].weight.shape for name in names}
    if odd := [f"{name} is {F} x {D}" for name, (F, D) in shapes.items() if F % multiple or D % multiple]:
        raise UserError(
            f"model.converters = [{converter!r}]: {listed(odd, 4)}, and both sizes must be multiples of {multiple}; "
            f"name such layers in {option}"
        )
    logger.info(f"{converter}: {len(names)} linear layers, {recipe.scaling}; as they were: {len(linears) - len(names)}")
    return names


def _words_of(recipe: Recipe) -> tuple[str, str, int]:
    """Return the option that filters the linear layers of a recipe, their converter, and the multiple that their sizes
    must be of."""
    option, converter = (_FILTER_MX, LINEARS_MX[0]) if recipe.by_block else (_FILTER, LINEARS[0])
    return option, converter, multiple_for(recipe)


def _plan_experts(
    config: JobConfig, model: nn.Module, target: Target, table: str, fqns: Sequence[str], recipe: Recipe
) -> dict[str, Recipe]:
    """Return the experts to convert, by parts of their names, as a table of the options asks."""
    experts = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
    asked, option = f"model.converters = [{table!r}]", f"{table}.fqns"
    if not experts:
        raise UserError(f"{asked}: {config.model.name} has no experts in this flavour; remove it")
    if not fqns:
        raise UserError(f"{asked}: {option} names no experts; set it to ['experts'] for all, or remove the converter")
    _check_parts(option, fqns, experts, "experts'")
    names = [name for name in experts if any(part in name for part in fqns)]
    if recipe.scaling == DELAYED:
        _check_called_once(model, names, _delayed(option), f"leave it out of {option}")
    kind, kept = table.rpartition(".")[2], len(experts) - len(names)
    logger.info(f"{kind}: experts of {len(names)} layers, {recipe.scaling}; as they were: {kept}")
    recipe = recipe._replace(is_traced_for_gpu=target.is_gpu)
    if takes_kernel(target.device, recipe):
        _check_kernel_of_groups(recipe, target, table)
    return dict.fromkeys(names, recipe)


def _check_kernel_of_groups(recipe: Recipe, target: Target, table: str) -> None:
    """Raise a UserError for a recipe that a GPU's products of groups of rows do not support."""
    instead, device = f"or set {table}.emulate = true, which is slow", target.device
    if not recipe.by_row:
        raise UserError(
            f"{table}.recipe_name = {recipe.scaling!r}: a GPU's products of experts scale by rows; set it to"
            f" {ROWWISE!r}, {instead}"
        )
    if recipe.gradient != E4M3:
        raise UserError(
            f"{table}.gradient_format = 'e5m2': a GPU's products of experts are of e4m3; remove it, {instead}"
        )
    format_, capability = ("MXFP8", "10") if recipe.by_block else ("float8", "9 or 10")
    if not _multiplies_groups(device, recipe):
        raise UserError(
            f"model.converters = [{table!r}]: {torch.cuda.get_device_name(device)} has no products of experts in"
            f" {format_}, which want compute capability {capability}; remove the converter, {instead}"
        )
    if device.type != "cuda" and recipe.by_block and not any(name in target.rates.name for name in ("B200", "B300")):
        logger.warning(
            f"model.converters = [{table!r}]: {target.rates.name} is taken to multiply in MXFP8, as GPUs of compute"
            f" capability 10 do, such as B200; for others use model.converters = [{EXPERTS!r}]"
        )


def _delayed(option: str) -> str:
    return f"{option.rpartition('.')[0]}.recipe_name = {DELAYED!r}"


def _check_called_once(model: nn.Module, names: Collection[str], asked: str, instead: str) -> None:
    """Raise a UserError for a layer with several names: delayed scaling would add its calls' magnitudes in one slot."""
    first = {m: name for name, m in model.named_modules()}
    for name, m in model.named_modules(remove_duplicate=False):
        if first[m] in names and first[m] != name:
            raise UserError(
                f"{asked}: {first[m]} is {name} too, and one history can't"
                f" follow both; {instead}, or choose another recipe"
            )


def _recipe(scaling: str, gradient: str | None, emulate: bool) -> Recipe:
    recipe = Recipe(scaling, emulate=emulate)
    formats = {"e4m3": E4M3, "e5m2": E5M2, None: E4M3 if recipe.by_row else E5M2}
    return recipe._replace(gradient=formats[gradient])


def _check_parts(option: str, parts: Sequence[str], names: Collection[str], whose: str) -> None:
    for part in parts:
        if not any(part in name for name in names):
            known = [*names, *(name.rpartition(".")[2] for name in names)]
            hint = did_you_mean(part, known, f"; they are such as {', '.join([*names][:4])}")
            raise UserError(f"{option} = {part!r}: is in no {whose} name{hint}")


def check_cut(float8: Float8 | None, model: nn.Module, plan: Plan, degree: int) -> None:
    """Check that the kernels support tensor parallelism's shards of linear layers, converted or the model's own.

    Raises:
        UserError: a shard of another size, or a layer whose logits are sharded over the vocabulary.
    """
    converted = {} if float8 is None else float8.layers
    linears = {name: recipe for name, recipe in converted.items() if isinstance(model.get_submodule(name), nn.Linear)}
    own = {name: kept.recipe for name, (kept, _) in kept_weights(model).items() if isinstance(kept, Linear)}
    if degree > 1:
        _check_cut(linears, "model.converters = [{converter!r}]", "name {which} in {option}", model, plan, degree)
        _check_cut(own, "the model's own float8", "let {which} be plain", model, plan, degree)


def _check_cut(
    recipes: Mapping[str, Recipe], what: str, instead: str, model: nn.Module, plan: Plan, degree: int
) -> None:
    roles, odd, asked = parameter_roles(model, plan), [], f"parallelism.tensor_parallel_degree = {degree}"
    for name, recipe in recipes.items():
        option, converter, multiple = _words_of(recipe)
        role = roles.get(f"{name}.weight", {}).get(TP) or plan.get(name, {}).get(TP, "")
        if role == "vocabulary":
            raise UserError(
                f"{asked}: {what.format(converter=converter)} is not built for {name}, sharded over the vocabulary;"
                f" {instead.format(which='it', option=option)}"
            )
        size = model.get_parameter(f"{name}.weight").shape[SPLIT_DIM[role]] if role in SPLIT_DIM else 0
        if size // degree % multiple:
            odd.append(f"{size // degree} of {size} in {name}")
    if odd:
        raise UserError(
            f"{asked}: {what.format(converter=converter)}: leaves rows or columns that are no multiples of {multiple},"
            f" {listed(odd, 4)}; choose another degree, or {instead.format(which='such layers', option=option)}"
        )
