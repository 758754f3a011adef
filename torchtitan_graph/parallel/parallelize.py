"""The one function that applies a compute layout to a model, before it is traced or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_graph.parallel.mesh import axis_degree
from torchtitan_graph.parallel.plan import SPLIT_DIM, style


def parallelize(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Apply the plan to the model in place; without a `tp` axis there is nothing to do.

    The model is on the meta device: nothing is allocated or sent. Tied parameters stay tied. `check_plan` has passed.
    """
    if axis_degree(mesh, "tp") == 1:
        return
    tied = _tied_names(model)
    modules = dict(model.named_modules())
    for pattern, role in plan.items():
        for name in filter(partial(_matches, pattern), modules):
            parallelize_module(modules[name], mesh["tp"], style(role, loss_parallel))
    for first, *others in tied:
        shared = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, shared)


def _tied_names(model: nn.Module) -> list[list[str]]:
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return [names for names in by_parameter.values() if len(names) > 1]


def _matches(pattern: str, name: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def check_plan(model: nn.Module, plan: Mapping[str, str], degree: int) -> None:
    """Check, before any mesh exists, that the plan fits the model and that the degree divides what it splits.

    Raises:
        ValueError: a pattern that matches nothing, a parameter without a role, or a size that does not divide.
    """
    if degree == 1:
        return
    covered = set()
    for pattern, role in plan.items():
        modules = {name: m for name, m in model.named_modules() if _matches(pattern, name)}
        if not modules:
            raise ValueError(f"the plan's pattern {pattern!r} matches no module of the model")
        for name, module in modules.items():
            covered |= {f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)}
            if role in SPLIT_DIM:
                _check_split(model, name, module.weight.shape[SPLIT_DIM[role]], degree)  # type: ignore[union-attr, index, arg-type]
    uncovered = [name for name, _ in model.named_parameters() if name not in covered]
    if uncovered:
        raise ValueError(
            f"the plan gives no role to {', '.join(uncovered[:5])}: tensor parallelism needs one for every parameter"
        )


def _check_split(model: nn.Module, name: str, size: int, degree: int) -> None:
    # Heads are not cut: what a rank gets of an attention layer's projection is a number of whole ones.
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    what = f"{size // head_dim} heads" if head_dim else f"size {size}"
    if (size // head_dim if head_dim else size) % degree:
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {degree}: does not divide the {what} of {name}; choose a degree "
            "that does (the size of embedding and output is the vocabulary's)"
        )
