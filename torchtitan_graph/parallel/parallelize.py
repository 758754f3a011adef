"""The one function that applies a compute layout to a model, before it is traced or sharded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_graph.parallel.mesh import axis_degree
from torchtitan_graph.parallel.plan import style


def parallelize(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Apply the plan to the model in place; without a `tp` axis there is nothing to do.

    The model is on the meta device: nothing is allocated or sent. Tied parameters stay tied.

    Raises:
        ValueError: a pattern that matches nothing, a parameter that no role covers, or a dimension that the degree
            does not divide.
    """
    degree = axis_degree(mesh, "tp")
    if degree == 1:
        return
    tied = _tied_names(model)
    modules = dict(model.named_modules())
    for pattern, role in plan.items():
        names = [name for name in modules if _matches(pattern, name)]
        if not names:
            raise ValueError(f"the plan's pattern {pattern!r} matches no module of the model")
        for name in names:
            parallelize_module(modules[name], mesh["tp"], style(role, loss_parallel))
    for first, *others in tied:
        shared = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, shared)
    _check(model, degree)


def _tied_names(model: nn.Module) -> list[list[str]]:
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return [names for names in by_parameter.values() if len(names) > 1]


def _matches(pattern: str, name: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def _check(model: nn.Module, degree: int) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(f"the plan gives no role to {name}: under tensor parallelism every parameter needs one")
        for placement in parameter.placements:
            if placement.is_shard() and parameter.shape[placement.dim] % degree:  # type: ignore[attr-defined]
                raise ValueError(
                    f"parallelism.tensor_parallel_degree = {degree} does not divide dimension {placement.dim} of {name}, "  # type: ignore[attr-defined]
                    f"{parameter.shape[placement.dim]} long: choose a degree that does"  # type: ignore[attr-defined]
                    + (" or a tokenizer with another vocabulary size" if "embed" in name or "output" in name else "")
                )
