"""Flex attention's own operator, and block masks as tensors and a remainder."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention as _flex_attention
from torch._higher_order_ops.flex_attention import flex_attention_backward as _flex_attention_backward
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, _apply_kernel_options, flex_attention


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A function without the tensors it closes over: equal for two closures of one function that differ only in
    tensors."""

    code: types.CodeType
    cells: tuple
    defaults: tuple | None
    scope: dict = dataclasses.field(compare=False)


class _Hole:
    """Placeholder of a removed tensor."""


def _open_rule(rule: Any) -> tuple[list[torch.Tensor], Any]:
    """Split a mask rule into the tensors it closes over, through nested functions, partials and sequences, and a
    comparable remainder. torch's own `BlockMask` does so from 2.13 on; 2.11 leaves the tensors in place, where a trace
    would bake in one batch's documents as constants."""
    tensors: list[torch.Tensor] = []

    def take(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            return _Hole
        if isinstance(x, types.FunctionType):
            cells = tuple(take(cell.cell_contents) for cell in x.__closure__ or ())
            return _Rule(x.__code__, cells, take(x.__defaults__), x.__globals__)
        if isinstance(x, functools.partial):
            return functools.partial, take(x.func), take(x.args), tuple((k, take(v)) for k, v in x.keywords.items())
        return type(x)(map(take, x)) if type(x) in (tuple, list) else x

    return tensors, take(rule)


def _close_rule(tensors: Iterable[torch.Tensor], remainder: Any) -> Any:
    """Return the rule of these tensors and the remainder of `_open_rule`."""
    given = iter(tensors)

    def put(x: Any) -> Any:
        if x is _Hole:
            return next(given)
        if isinstance(x, _Rule):
            cells = tuple(types.CellType(put(cell)) for cell in x.cells)
            return types.FunctionType(x.code, x.scope, argdefs=put(x.defaults), closure=cells)
        if type(x) is tuple and x and x[0] is functools.partial:
            function, args, keywords = map(put, x[1:])
            return functools.partial(function, *args, **dict(keywords))
        return type(x)(map(put, x)) if type(x) in (tuple, list) else x

    return put(remainder)


_OF_QUERIES_AND_KEYS = ("seq_lengths", "BLOCK_SIZE")  # of a block mask: two numbers each


def mask_parts(mask: BlockMask) -> tuple[dict[str, Any], tuple]:
    """Split a block mask into its tensors by name, those of its rule included, its lengths and block sizes, which are
    numbers, and a comparable remainder."""
    of_rule, rule = _open_rule(mask.mask_mod)
    tensors = {name: x for name in BlockMask._TENSOR_ATTRS if (x := getattr(mask, name)) is not None}
    numbers = {f"{name}[{i}]": getattr(mask, name)[i] for name in _OF_QUERIES_AND_KEYS for i in range(2)}
    left = [name for name in BlockMask._CONTEXT_ATTRS if name not in (*_OF_QUERIES_AND_KEYS, "mask_mod")]
    remainder = (tuple(tensors), tuple((name, getattr(mask, name)) for name in left), rule)
    return tensors | numbers | {f"mask_mod_{i}": x for i, x in enumerate(of_rule)}, remainder


def mask_whole(given: Iterable[Any], remainder: tuple) -> BlockMask:
    """Return the block mask of the parts and remainder of `mask_parts`."""
    names, constants, rule = remainder
    given = iter(given)
    parts = dict.fromkeys(BlockMask._TENSOR_ATTRS) | {name: next(given) for name in names} | dict(constants)
    parts |= {name: (next(given), next(given)) for name in _OF_QUERIES_AND_KEYS}
    return BlockMask(**parts, mask_mod=_close_rule(given, rule))


_flex_attention_fake = registered_hop_fake_fns[_flex_attention]  # type: ignore[index]


def _truthful_flex_attention_fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Compute fake results with the uncompiled operator's dtypes. torch's own rule has fp32 for the log-sum-exp even
    where it is fp64: a trace would then round its gradient to fp32. Replaced by torch's, once that follows the queries'
    dtype."""
    out, *statistics = _flex_attention_fake(*args, **kwargs)
    if out.dtype == torch.float64:
        statistics = [x.double() for x in statistics]
    return out, *statistics


registered_hop_fake_fns[_flex_attention] = _truthful_flex_attention_fake  # type: ignore[index]

# The functions that run the uncompiled operator and its backward, with the same arguments; they can be replaced. A
# public flex attention for CPUs with gradients would replace this.
_UNCOMPILED = DispatchKey.CompositeExplicitAutograd
dense_flex_attention = _flex_attention.py_kernels[_UNCOMPILED]
dense_flex_attention_backward = _flex_attention_backward.py_kernels[_UNCOMPILED]


def run_flex_attention_with(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Replace the functions that run the uncompiled operator and its backward."""
    _flex_attention.py_kernels[_UNCOMPILED] = forward
    _flex_attention_backward.py_kernels[_UNCOMPILED] = backward
    _flex_attention._dispatch_cache.clear()
    _flex_attention_backward._dispatch_cache.clear()


ScoreFunction = Callable[..., torch.Tensor]  # (score, b, h, q, kv) -> score


def flex_attention_op(
    q_BNLH: torch.Tensor,
    k_BNLH: torch.Tensor,
    v_BNLH: torch.Tensor,
    mask: BlockMask,
    scale: float,
    score: ScoreFunction | None = None,
    kernel_options: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flex attention by its own higher-order operator, without the public function around it, and the logarithm
    of each softmax's denominator, (B, N, L), both with gradients.

    The public function refuses gradients on a CPU, although the uncompiled operator has them, and compiles its own
    call, which can't happen inside a trace. On CUDA the eager step calls it all the same, compiled: the operator alone
    would hold every score. A graph leaves the operator to the pass `compile_regions`, which generates the same kernels
    for it: so it gets the same kernel options, a GPU's when it is compiled. Rule and score function may close over
    tensors (a batch's document ids): they are passed to the operator as arguments, so that a graph has them as inputs.

    Args:
        kernel_options: of the compiled kernels.
    """
    if q_BNLH.is_cuda and not isinstance(q_BNLH, FakeTensor):
        given: dict[str, Any] = dict(score_mod=score, block_mask=mask, scale=scale, kernel_options=kernel_options)
        given |= dict(enable_gqa=q_BNLH.shape[1] != k_BNLH.shape[1], return_aux=AuxRequest(lse=True))
        out_BNLH, aux = _compiled_flex_attention()(q_BNLH, k_BNLH, v_BNLH, **given)
        return out_BNLH, aux.lse
    options = dict(_apply_kernel_options(q_BNLH, k_BNLH, v_BNLH, True, None))
    score = score or _no_score_change
    if torch.compiler.is_dynamo_compiling():  # lifts the closures of rule and score function itself
        out_BNLH, lse_BNL, *_ = _flex_attention(q_BNLH, k_BNLH, v_BNLH, score, mask.as_tuple(), scale, options)
        return out_BNLH, lse_BNL * math.log(2)
    of_mask, mask_remainder = _open_rule(mask.mask_mod)
    of_score, score_remainder = _open_rule(score)

    def rule(b: Any, h: Any, q: Any, kv: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return _close_rule(tensors, mask_remainder)(b, h, q, kv)

    def change(value: Any, b: Any, h: Any, q: Any, kv: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return _close_rule(tensors, score_remainder)(value, b, h, q, kv)

    out_BNLH, lse_BNL, *_ = _flex_attention(
        q_BNLH, k_BNLH, v_BNLH, change, (*mask.as_tuple()[:-1], rule), scale, options, tuple(of_score), tuple(of_mask)
    )
    return out_BNLH, lse_BNL * math.log(2)  # the operator uses base-2 logarithms


@functools.cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    """Compile the public function for each shape it is called with, as a graph is, never for dynamic shapes."""
    return torch.compile(flex_attention, dynamic=False)


def _no_score_change(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score
