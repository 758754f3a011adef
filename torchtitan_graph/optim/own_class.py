"""A user's optimizer class: import it, and check before training that its state can be saved."""

import inspect

import torch
from torch.distributed.tensor import DTensor, Partial

from torchtitan_graph.config.own import find_own
from torchtitan_graph.errors import UserError


def find_class(dotted_name: str) -> type[torch.optim.Optimizer]:
    """Return the class that `optimizer.name` names, imported; raise UserError if there is none, or no optimizer."""
    found = find_own("optimizer.name", dotted_name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"optimizer.name = {dotted_name!r}: must be a class derived from torch.optim.Optimizer")
    return found


def check_step(cls: type[torch.optim.Optimizer]) -> None:
    """Raise UserError if the steps of a class need arguments, such as a closure."""
    try:
        inspect.signature(cls.step).bind(None)
    except TypeError as error:
        raise UserError(f"optimizer.name: {cls.__qualname__} can't take a step: {error}") from error


def rehearse(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> None:
    """Run a step on zero gradients and undo all but the state, so that a checkpoint is read straight into it.

    Only the class knows its state and its initial values: the first step has to make it, so a run from the start must
    drop this one by `forget_rehearsal`. A class that has its state from when it is built takes no step. `names` are the
    parameters' names in the model. Raises UserError if the step fails, or a checkpoint can't hold the state.
    """
    if not optimizer.state:
        _step_and_undo(optimizer, list(names))
        optimizer.is_rehearsed = True  # type: ignore[attr-defined]
    if problem := _find_problem(optimizer, names):
        raise UserError(f"optimizer.name: {type(optimizer).__qualname__} can't be resumed from a checkpoint: {problem}")


def forget_rehearsal(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state that `rehearse` made; any other is kept."""
    if getattr(optimizer, "is_rehearsed", False):
        optimizer.state.clear()


def _step_and_undo(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    before = [param.detach().clone() for param in params]
    settings = _group_settings(optimizer)
    for param in params:
        param.grad = torch.zeros_like(param)
    odd = [key for key in ("capturable", "differentiable", "fused") if optimizer.defaults.get(key)]
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if params[0].is_cuda else []):
            optimizer.step()
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:
        name = type(optimizer).__qualname__
        if odd:
            raise UserError(
                f"optimizer.options: {name} can't take a step with {', '.join(odd)} ({error}); remove it"
            ) from error
        if not type(optimizer).__module__.startswith("torch."):
            raise  # the user's own code: only the traceback shows where
        raise UserError(
            f"optimizer.name: {name} can't take a step on parameters laid out over ranks ({error}); use another, such "
            "as AdamW"
        ) from error
    optimizer.zero_grad()
    with torch.no_grad():
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
    if changed := [key for key, value in _group_settings(optimizer).items() if settings.get(key) != value]:
        raise UserError(
            f"optimizer.name: {type(optimizer).__qualname__} can't be resumed from a checkpoint: a step changes "
            f"{changed[0][1]!r} of its param_groups, which are settings; keep it in the state of each parameter"
        )


def _group_settings(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], str]:
    groups = enumerate(optimizer.param_groups)
    return {(i, key): repr(value) for i, group in groups for key, value in group.items() if key != "params"}


def _find_problem(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> str | None:
    """Return why a checkpoint can't hold the state, None if it can: its tensors must have known placements."""
    for param, state in optimizer.state.items():
        if param not in names:
            return f"it has state {param!r} that belongs to no parameter"
        for key, value in state.items():
            where = f"its state {key!r} of {names[param]}"
            if not isinstance(value, torch.Tensor):
                return f"{where} is not a tensor, but {value!r}; make it one, such as torch.tensor(0.0)"
            if isinstance(value, DTensor):
                if any(isinstance(placement, Partial) for placement in value.placements):
                    return f"{where} is a sum that is not reduced yet: {value.placements}"
            elif isinstance(param, DTensor) and value.numel() > 1:
                return f"{where} is this rank's alone; make it like the parameter, by torch.zeros_like(param)"
    return None
