"""Construction of the optimizer over a model's parameters, built in or a user's class, with settings by name."""

import copy
import difflib
import fnmatch
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.optim.adam import MOMENTS, RoundedAdam
from torchtitan_graph.optim.average import AVERAGE, AVERAGE_DTYPE
from torchtitan_graph.optim.muon import Muon, matrices_of
from torchtitan_graph.optim.own_class import check_step, find_class, rehearse
from torchtitan_graph.parallel.storage import Storage, materialize

BUILT_IN: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Muon": Muon,
}
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
        dtype, fused = _state_dtype(config), config.implementation == "fused"
        for group in optimizer.param_groups:
            moments = ("momentum_buffer",) if group.get("is_matrix") else MOMENTS
            for param in group["params"]:
                optimizer.state[param] = _initial_state(param, moments, dtype, fused)
                if config.ema_decay is not None:
                    average = torch.zeros_like(param, dtype=AVERAGE_DTYPE, requires_grad=False)
                    optimizer.state[param][AVERAGE] = average
        if isinstance(optimizer, Muon):
            optimizer.plan()
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
    elif config.name == "Muon":
        own = config.muon
        further = dict(momentum=own.momentum, nesterov=own.nesterov, ns_steps=own.ns_steps, adjust_lr=own.adjust_lr)
        further["ns_dtype"] = getattr(torch, own.ns_dtype)
    else:
        further = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
        if config.state_dtype is not None:
            cls, further = RoundedAdam, further | {"decoupled_weight_decay": config.name == "AdamW"}
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
    return type(optimizer) in (*BUILT_IN.values(), RoundedAdam) and bool(optimizer.defaults.get("fused"))


def state_of(model: nn.Module, config: job.Optimizer) -> dict[str, tuple[int, torch.dtype | None]] | None:
    """Return the number and dtype (None: its own) of the tensors like it that the optimizer keeps for each trained
    parameter, by name; None for a user's class, which makes them in its first step. The model may be on meta."""
    if config.name not in BUILT_IN:
        return None
    dtype = _state_dtype(config)
    groups = check_optimizer(model, config, in_part=True).param_groups
    of_muon = {p for group in groups if group.get("is_matrix") for p in group["params"]}
    return {n: (1 if p in of_muon else 2, dtype) for n, p in model.named_parameters() if p.requires_grad}


def takes_stops(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether its kernels take `found_inf` from `device` without a copy, which would be waited for."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return is_fused(optimizer) and all(param.device.type == device.type for param in params)


def _groups(model: nn.Module, config: job.Optimizer, taken: set[str], in_part: bool) -> list[dict[str, Any]]:
    """Return torch's parameter groups: those that no entry of `optimizer.param_groups` matches, then each entry's."""
    rest = {name: param for name, param in model.named_parameters() if param.requires_grad}
    names, groups = list(rest), []
    matrices = matrices_of(model) if config.name == "Muon" else None
    for number, entry in enumerate(config.param_groups, 1):
        matched = fnmatch.filter(names, entry.pattern)
        mine = {name: rest.pop(name) for name in matched if name in rest}
        if not mine and not in_part:
            near = difflib.get_close_matches(entry.pattern, names, n=1, cutoff=0.0)[0]
            why = f"matches no parameter; names are such as {near}, matched in full, and * stands for any part"
            why = "the entries before it have all that it matches; put it before them" if matched else why
            raise UserError(f"optimizer.param_groups, entry {number}: pattern = {entry.pattern!r}: {why}")
        settings = {"pattern": entry.pattern, **_settings(entry, config, taken)}
        groups += _split(mine, entry, config, settings, matrices)
    return [*_split(rest, job.ParamGroup(), config, {"pattern": ""}, matrices), *groups]


def _split(
    mine: Mapping[str, torch.Tensor],
    entry: job.ParamGroup,
    config: job.Optimizer,
    settings: dict[str, Any],
    matrices: set[str] | None,
) -> list[dict[str, Any]]:
    """Return the group of an entry; for Muon two, of matrices and of what AdamW steps."""
    if matrices is None:
        return [{"params": [*mine.values()], **settings}]
    if entry.name is not None:
        if wrong := [name for name, p in mine.items() if entry.name == "Muon" and p.dim() not in (2, 3)]:
            raise UserError(
                f"optimizer.param_groups: name = 'Muon': {wrong[0]}, which {entry.pattern} matches, is no matrix and no"
                " stack of matrices (E, M, N); name the others alone"
            )
        matrices = {*mine} if entry.name == "Muon" else set()
    rate = next(lr for lr in (entry.lr, config.muon.lr, config.lr) if lr is not None)
    of_muon = [p for name, p in mine.items() if name in matrices]
    others = [p for name, p in mine.items() if name not in matrices]
    return [
        {"params": of_muon, "is_matrix": True, **settings, "lr": rate},
        {"params": others, "is_matrix": False, **settings},
    ]


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


def _state_dtype(config: job.Optimizer) -> torch.dtype | None:
    return None if config.state_dtype is None else getattr(torch, config.state_dtype)


def _initial_state(
    param: torch.Tensor, moments: Iterable[str], dtype: torch.dtype | None, fused: bool
) -> dict[str, torch.Tensor]:
    """Return the state that the optimizer's own first step would allocate for `param`, in its dtype or another."""
    state = {key: torch.zeros_like(param, dtype=dtype, requires_grad=False) for key in moments}
    if moments is MOMENTS:
        # The fused kernel reads the step count on the parameter's device; the others read it on the host, where a CPU
        # tensor costs no synchronisation.
        count = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
        return {"step": count, **state}
    return state
