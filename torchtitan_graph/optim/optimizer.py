"""Construction of the optimizer over a model's parameters: AdamW, Adam, or a user's class, with settings by name."""

import copy
import difflib
import fnmatch
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchtitan_graph.config import job
from torchtitan_graph.config.nearest import did_you_mean
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.optim.own_class import check_step, find_class, rehearse
from torchtitan_graph.parallel.storage import Storage, materialize

BUILT_IN: dict[str, type[torch.optim.Optimizer]] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
# Arguments of an optimizer, and the options they are set by.
_ARGUMENTS = {"lr": ("lr",), "betas": ("beta1", "beta2"), "eps": ("eps",), "weight_decay": ("weight_decay",)}


def build_optimizer(model: nn.Module, config: job.Optimizer, in_part: bool = False) -> torch.optim.Optimizer:
    """Build the `[optimizer]` table's optimizer over every parameter of `model` that takes gradients.

    The optimizer holds the parameter objects themselves, so the model must be materialised; for a dry run of Adam or
    AdamW it may be on meta. Its first group holds the parameters that no entry of `param_groups` matches; then comes
    one for each entry. Where `model` is a part of the whole one, a pipeline stage's, an entry may match none of it.

    The state (two moments of the parameter's layout, and a step count) is allocated here and not in the first step, so
    that running out of memory is found out now and a checkpoint can be read straight into it. The state of a user's
    class is only a place to load into, see `rehearse`. Raises UserError as `check_optimizer`, or if the user's class
    can't take a step, or its state can't be saved.
    """
    optimizer = check_optimizer(model, config, in_part)
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters() if param.requires_grad}
    assert config.name in BUILT_IN or not any(param.is_meta for param in names), "a rehearsal needs numbers"
    if config.name in BUILT_IN:
        for param in names:
            optimizer.state[param] = _initial_state(param, fused=config.implementation == "fused")
    else:
        rehearse(optimizer, names)
    return optimizer


def check_optimizer(model: nn.Module, config: job.Optimizer, in_part: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer without its state; the model may be on the meta device.

    Raises UserError if an entry of `param_groups` gets no parameter, or the user's class does not exist, does not take
    what is set, can't be built, or wants arguments for a step.
    """
    cls = BUILT_IN.get(config.name) or find_class(config.name)
    parameters = inspect.signature(cls).parameters
    taken = parameters.keys() - config.options.keys()
    further = config.options
    if config.name not in BUILT_IN:
        check_step(cls)
        _check_options(config, parameters)
        _check_taken(config, taken)
    elif config.options:
        raise UserError(f"optimizer.options = {config.options}: is for an optimizer with a dotted name; remove it")
    else:
        further = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
    groups, settings = _groups(model, config, taken, in_part), _settings(job.ParamGroup(), config, taken)
    arguments = settings | further
    refused = f"optimizer.name = {config.name!r}: can't be built with {arguments}"
    try:
        inspect.signature(cls).bind(groups, **arguments)
    except TypeError as error:
        raise UserError(f"{refused}: {error}") from error
    try:
        return cls(groups, **arguments)  # type: ignore[arg-type]
    except Exception as error:
        if not cls.__module__.startswith("torch."):
            raise  # the user's own code: only the traceback shows where
        raise UserError(f"{refused}: {error}") from error


def check_first_step(
    model: nn.Module, storages: Mapping[str, Storage], config: job.Optimizer, in_part: bool = False
) -> None:
    """Check that a user's optimizer class takes its first step, on tiny parameters sharded like those of a model on
    meta. Raises UserError as `build_optimizer`."""
    model = copy.deepcopy(model)
    materialize(model, {name: each.in_small() for name, each in storages.items()}, torch.device("cpu"))
    try:
        build_optimizer(model, config, in_part)
    except UserError:
        raise
    except Exception as error:  # perhaps the user's code does not accept the sizes
        logger.info(f"optimizer.name = {config.name!r}: its step is not tried, for small parameters fail it: {error!r}")


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its kernels are fused ones, which take `found_inf`: a number that, being 1.0, makes them no-ops.

    torch's gradient scaler sets it to skip a step.
    """
    return type(optimizer) in BUILT_IN.values() and bool(optimizer.defaults.get("fused"))


def takes_stops(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether its kernels take `found_inf` from `device` without a copy, which would be waited for."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return is_fused(optimizer) and all(param.device.type == device.type for param in params)


def _groups(model: nn.Module, config: job.Optimizer, taken: set[str], in_part: bool) -> list[dict[str, Any]]:
    """Return torch's parameter groups: those that no entry of `optimizer.param_groups` matches, then each entry's."""
    rest = {name: param for name, param in model.named_parameters() if param.requires_grad}
    names, groups = list(rest), []
    for number, entry in enumerate(config.param_groups, 1):
        matched = fnmatch.filter(names, entry.pattern)
        mine = [rest.pop(name) for name in matched if name in rest]
        if not mine and not in_part:
            near = difflib.get_close_matches(entry.pattern, names, n=1, cutoff=0.0)[0]
            why = f"matches no parameter; names are such as {near}, matched in full, and * stands for any part"
            why = "the entries before it have all that it matches; put it before them" if matched else why
            raise UserError(f"optimizer.param_groups, entry {number}: pattern = {entry.pattern!r}: {why}")
        groups.append({"params": mine, "pattern": entry.pattern, **_settings(entry, config, taken)})
    return [{"params": list(rest.values()), "pattern": ""}, *groups]


def _settings(entry: job.ParamGroup, config: job.Optimizer, taken: set[str]) -> dict[str, Any]:
    """Return the settings of an entry, else of the table, by torch's names, as far as the optimizer takes them."""

    def either(own: float | None, of_table: float) -> float:
        return of_table if own is None else own

    every = {
        "lr": either(entry.lr, config.lr),
        "betas": (either(entry.beta1, config.beta1), either(entry.beta2, config.beta2)),
        "eps": config.eps,
        "weight_decay": either(entry.weight_decay, config.weight_decay),
    }
    return {name: setting for name, setting in every.items() if name in taken}


def _check_taken(config: job.Optimizer, taken: set[str]) -> None:
    """Raise for options that a user's optimizer would not take: they would have no effect."""
    default = job.Optimizer()
    if "lr" not in taken:
        raise UserError(f"optimizer.name = {config.name!r}: must take lr, which the schedule sets in every step")
    if config.implementation != default.implementation:
        raise UserError(f"optimizer.implementation = {config.implementation!r}: is for Adam and AdamW; remove it")
    for key in (key for name, keys in _ARGUMENTS.items() if name not in taken for key in keys):
        if getattr(config, key) != getattr(default, key):
            where = f"optimizer.{key} = {getattr(config, key)}"
        elif any(getattr(entry, key, None) is not None for entry in config.param_groups):
            where = f"optimizer.param_groups: {key}"
        else:
            continue
        raise UserError(f"{where}: {config.name} does not take it, or has it from optimizer.options; remove it")


def _check_options(config: job.Optimizer, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise for a key of `optimizer.options` that the class does not take."""
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for key in config.options.keys() - parameters.keys():
        hint = did_you_mean(key, parameters, f"; it takes {', '.join(parameters)}")
        raise UserError(f"optimizer.options: {key!r}: {config.name} does not take it{hint}")


def _initial_state(param: torch.Tensor, fused: bool) -> dict[str, torch.Tensor]:
    """Return the state that Adam's own first step would allocate for `param`."""
    # The fused kernel reads the step count on the parameter's device; the others read it on the host, where a CPU
    # tensor costs no synchronisation.
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(param, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
    }
