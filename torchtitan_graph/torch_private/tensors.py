"""Tensors, parameters and optimizers: attributes without public names, and operators on many tensors at once."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# Attributes that torch sets in modules and optimizers as they are called: warnings given, checks made, a recurrent
# layer's weights as last seen, a fused step's arguments. No later call depends on them. torch has no list of them.
KEPT_BY_TORCH = frozenset(
    {
        *("_flat_weight_refs", "_flat_weights", "_is_full_backward_hook", "_need_device_dtype_check_for_fused"),
        *("_opt_called", "_warned_capturable_if_run_uncaptured", "found_inf", "grad_scale"),
    }
)


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, torch.nn.Parameter)` true of a tensor that is not a leaf, as a real parameter must be.
    torch has the mark for subclasses of tensors, and no public name for it."""
    tensor._is_param = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def data_assigned(refuse: Callable[[torch.Tensor], NoReturn]) -> Iterator[None]:
    """Call `refuse(x)` instead of `x.data = y` on this thread. torch calls no mode and no hook of a trace for that
    assignment, which is no operator."""
    data: Any = torch._C.TensorBase.data
    thread = threading.get_ident()
    before = vars(torch.Tensor).get("data")

    def assign(x: torch.Tensor, value: torch.Tensor) -> None:
        if threading.get_ident() == thread:
            refuse(x)
        data.__set__(x, value)

    torch.Tensor.data = property(data.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del torch.Tensor.data
        else:
            torch.Tensor.data = before


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a hook is registered on a parameter's gradient; public API only adds and removes them."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook is registered on the step of this optimizer, or of all; public API only adds and removes
    them."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place. Autograd's own counter; there is no public one."""
    return tensor._version


def scaled_mm(
    a_MK: torch.Tensor, scale_a: torch.Tensor, b_NK: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of float8 matrices on a GPU, b transposed; scales are scalars, or (M, 1) and (N, 1). The
    kernel requires row-major a and column-major b. `F.scaled_mm` would replace it, once its names for scales settle."""
    return torch._scaled_mm(
        a_MK.contiguous(), b_NK.contiguous().t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype
    )


def multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors by a scalar in place, many in one kernel. `clip_grads_with_norm_` does it on DTensors, which on
    2.11 leave operators on made-up tensors of the whole shape in a trace."""
    torch._foreach_mul_(tensors, factor)


def accumulate(sums: list[torch.Tensor], terms: list[torch.Tensor]) -> None:
    """Add each term to its tensor, in place, many in one kernel. There is no public form."""
    torch._foreach_add_(sums, terms)


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer's step as called, for a schedule that warns if its own step comes first, when a graph ran the
    step. torch sets this where `step` is called; there is no public form."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def free_gradient_dtype(parameters: Iterable[torch.Tensor], replicated: torch.dtype | None) -> None:
    """Set the leaves' `grad_dtype` to None, autograd's own dtype, where the installed FSDP2 does so (2.15 on): with
    bf16 parameters a norm's weight then has an fp32 gradient, which is reduced unrounded. There, gradients of
    parameters replicated over tensor parallelism have the dtype `replicated`, in which their parts are added."""
    if hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes"):
        for parameter in parameters:
            is_replicated = isinstance(parameter, DTensor) and any(p.is_replicate() for p in parameter.placements)
            parameter.grad_dtype = replicated if is_replicated else None
