"""Fake tensors with the strides of a device's own kernels; tensors with data are never written to."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._prims_common
import torch.utils._pytree as pytree
from torch import Tensor, ops
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._subclasses import FakeTensorMode as _FakeTensorMode

from torchtitan_graph.errors import UserError
from torchtitan_graph.torch_private.tracing import author_stack

aten = ops.aten


class WritesToLive(Exception):
    """An operator would write to a tensor with data: the operator, and Python's stack."""

    def __init__(self, func: Any, stack: traceback.StackSummary) -> None:
        super().__init__(f"{func} writes to a tensor that holds numbers")
        self.func, self.stack = func, stack


class NeedsSymbols(Exception):
    """A loop whose number of rounds depends on data needs symbols, and the mode has no `shape_env`."""


class FakeTensorMode(_FakeTensorMode):
    """torch's fake tensor mode, except that it never writes to a tensor with data, and has the strides of a device's
    own kernels, and refuses a fake tensor's address.

    torch computes an operator's result while it traces if all its tensors have data; in place too. And for many
    operators it takes the strides from their decompositions in Python, which order the inputs otherwise than the
    kernel. Replaced when it does neither. The address of a tensor without memory is 0 unless an option of torch is set.

    torch looks up fake rules of higher-order operators only for its own class.

    live: the tensors with data among operators' arguments, by their identity, with the first `.grad` of each.
    watch: is called with each operator and its arguments.
    """

    supports_higher_order_operators = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            super().__init__(*args, **kwargs)
        self.live: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.watch: Callable[[Any, Any], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        self._keep_live(func, args, kwargs or {})
        if self.watch is not None:
            self.watch(func, (args, kwargs))
        if func is aten.mkldnn_rnn_layer.default:
            raise UserError(
                "the traced function calls an LSTM by oneDNN's kernel, whose memory for backward no trace has: trace it"
                " and call it inside torch.backends.mkldnn.flags(enabled=False)"
            )
        is_region = isinstance(func, torch._ops.HigherOrderOperator)
        # `while_loop_stack_output` keeps the values of each round, for backward.
        if is_region and func.name().startswith("while_loop") and self.shape_env is None:
            raise NeedsSymbols
        if is_region and func not in registered_hop_fake_fns and _FakeTensorMode in func.python_key_table:
            return func.python_key_table[_FakeTensorMode](self, *args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func not in _STRIDES and func not in _STRIDES_ON_CPU or result is NotImplemented:
            return result
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        rule = _STRIDES.get(func) or (_STRIDES_ON_CPU[func] if tensors[0].device.type == "cpu" else None)
        if rule is None or all(x.is_contiguous() for x in tensors):
            return result
        with self:
            strides = rule(tensors)
            return pytree.tree_map_only(Tensor, lambda x: _laid_out(x, strides), result)

    def _keep_live(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record the tensors with data among an operator's arguments; raise WritesToLive if it would write to one."""
        for i, given in enumerate((*args, *kwargs.values())):
            for x in given if isinstance(given, (list, tuple)) else (given,):
                if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
                    continue
                self.live.setdefault(id(x), (x, x.grad if x.is_leaf else None))
                if _writes(func, i, args, kwargs):
                    raise WritesToLive(func, author_stack())


def _writes(func: Any, number: int, args: Any, kwargs: Any) -> bool:
    """Return whether an operator writes to the argument at this index of its positional and keyword arguments."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return False
    name = func._schema.arguments[number].name if number < len(args) else list(kwargs)[number - len(args)]
    return any(argument.name == name and argument.is_write for argument in func._schema.arguments)


Rule = Callable[[Sequence[Tensor]], Callable[[Tensor], Sequence[int]]]


def _laid_out(x: Tensor, strides: Callable[[Tensor], Sequence[int]]) -> Tensor:
    wanted = tuple(strides(x))
    return x if wanted == x.stride() else torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device)


def _contiguous(tensors: Sequence[Tensor]) -> Callable[[Tensor], Sequence[int]]:
    return lambda x: torch.empty_like(x, memory_format=torch.contiguous_format).stride()


def _of_iterator(*order: int) -> Rule:
    """Return a rule for TensorIterator's result layout, with the inputs in this order."""

    def rule(tensors: Sequence[Tensor]) -> Callable[[Tensor], Sequence[int]]:
        inputs = torch.broadcast_tensors(*(tensors[i] for i in order))
        return lambda x: torch._prims_common.compute_elementwise_output_strides(*inputs)

    return rule


def _as(number: int) -> Rule:
    return lambda tensors: lambda x: torch.empty_like(tensors[number]).stride()


def _as_suggested_by(number: int) -> Rule:
    """Return a rule for channels-last results where the input is channels last, else contiguous ones."""

    def rule(tensors: Sequence[Tensor]) -> Callable[[Tensor], Sequence[int]]:
        wanted = torch._prims_common.suggest_memory_format(tensors[number])
        return lambda x: (torch.empty_like(x, memory_format=wanted) if x.dim() > 1 else x).stride()

    return rule


# Result layouts of kernels where torch's Python version differs, by the indices of their tensors.
_STRIDES: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            *(aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default),
            *(aten.hardtanh_backward.default, aten.logit_backward.default, aten.softplus_backward.default),
            *(aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default),
            *(aten.special_xlog1py.default, aten.xlogy.Tensor),
        ),
        _of_iterator(0, 1),
    ),
    **dict.fromkeys((aten.leaky_relu_backward.default, aten.threshold_backward.default), _of_iterator(1, 0)),
    aten.rrelu_with_noise_backward.default: _of_iterator(1, 0),
    aten.soft_margin_loss_backward.default: _of_iterator(2, 1),
    aten._prelu_kernel_backward.default: _of_iterator(1, 2, 0),
    **dict.fromkeys(
        (
            *(aten._log_softmax_backward_data.default, aten.native_layer_norm_backward.default),
            *(aten.huber_loss_backward.default, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default),
        ),
        _contiguous,
    ),
    aten.binary_cross_entropy_backward.default: _as(1),
    aten.log_sigmoid_backward.default: _as(0),
}
_STRIDES_ON_CPU: dict[Any, Rule] = {
    aten.log_sigmoid_forward.default: _contiguous,
    aten.native_dropout_backward.default: _of_iterator(0, 1),
    aten.batch_norm_backward.default: _as_suggested_by(1),
    aten.native_batch_norm_backward.default: _as_suggested_by(1),
    aten.native_batch_norm.default: _as_suggested_by(0),
    aten.channel_shuffle.default: _as_suggested_by(0),
    aten.max_unpool2d.default: _as_suggested_by(0),
    aten.replication_pad2d_backward.default: _as_suggested_by(1),
}
