"""The declaration of an operator: all that other code has to know about it, said once, where the operator is made.

Costs, recomputation, compiled regions, CUDA graphs and pipelines' parts read it by `operator_of`, and name no operator.
An operator of another library needs no declaration where torch says enough: its tags (`pointwise`,
`cudagraph_unsafe`), its FLOP formula (`torch.utils.flop_counter.register_flop_formula`), its schema (aliases, writes,
an argument `group` or `group_name` with the name of a process group).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils.flop_counter import flop_registry

from torchtitan_graph.errors import UserError

Recomputed = Literal["any", "alternate", "costly", "never"]


@dataclass(frozen=True, eq=False)
class Collective:
    """A kind of collective.

    received     (bytes of the result, number of ranks) -> the least bytes that a rank receives
    is_pairwise  whether every rank sends to every other directly, instead of around rings
    """

    received: Callable[[int, int], int]
    is_pairwise: bool = False


def _others_parts(size: int, degree: int) -> int:
    return size * (degree - 1) // degree


ALL_GATHER = Collective(_others_parts)
REDUCE_SCATTER = Collective(lambda size, degree: size * (degree - 1))  # the others' terms of the rank's own part
ALL_REDUCE = Collective(lambda size, degree: 2 * size * (degree - 1) // degree)  # a reduce-scatter and an all-gather
ALL_TO_ALL = Collective(_others_parts, is_pairwise=True)
OTHER_COLLECTIVE = Collective(_others_parts)


class Attention(NamedTuple):
    """The form of an attention operator.

    query        index of the argument with the queries; keys and values follow
    length       dim of their positions
    is_backward  whether it computes the gradients
    """

    query: int = 0
    length: int = 2
    is_backward: bool = False


@dataclass(frozen=True)
class Operator:
    """Facts about an operator. A function of a call gets its arguments, tensors as fake tensors, and `out_val`, its
    result, as the formulas of torch.utils.flop_counter do.

    elementwise   each number of the result depends on a few numbers of the arguments, or is a copy: cheap to recompute
    flops         a call's FLOPs, of matrix products; those of elementwise operators are not counted
    attention     its form, if it is an attention
    num_bytes     bytes that a call reads and writes; None: its arguments and results
    reads_first   whether the data of the first argument is read, not only overwritten, or its shape used
    scratch       bytes of a call's temporaries
    collective    what it sends, if it starts a collective, for which a `wait_tensor` waits
    holds_input   whether the input of a collective is kept until the wait
    copies        the direction of an asynchronous copy that it starts
    waits         whether it waits for a collective or copy, and returns its result
    host_reads    index of an argument in the host's memory that the host waits for, and reads
    dynamic_rows  whether a call's result has a number of rows that depends on data; None: if an argument has
    recompute     any: as a policy chooses; alternate: a product, of which selective recomputation saves every second;
                  costly: for the memory it frees, so selective recomputation saves it; never: the host reads the result
    compiles      whether a compiled region may contain it
    records       whether a CUDA graph may contain a call
    overwrites    its write in place saves memory, so `cleanup` keeps it where nothing reads the old value later
    examples      (floating-point arguments, or all if none is; number) -> as many integers that are legal arguments, to
                  measure a call
    """

    elementwise: bool = False
    flops: Callable[..., int] | None = None
    attention: Attention | None = None
    num_bytes: Callable[..., int] | None = None
    reads_first: bool = True
    scratch: Callable[..., int] | None = None
    collective: Collective | None = None
    holds_input: bool = False
    copies: Literal["to the host", "from the host"] | None = None
    waits: bool = False
    host_reads: int | None = None
    dynamic_rows: Callable[..., bool] | None = None
    recompute: Recomputed = "any"
    compiles: bool = True
    records: Callable[..., bool] | bool = False
    overwrites: bool = False
    examples: Callable[[Sequence[Tensor], int], Tensor] | None = None


GROUP_ARGUMENTS = ("group_name", "group")
_FUNCTION = Operator()  # a Python function, of which nothing is known
# By the identity of a target, which is kept as well: an operator's hash is computed by Python, and there are millions.
_DECLARED: dict[int, tuple[object, Operator]] = {}
_UNSAFE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe}


def operator_of(target: object) -> Operator:
    """Return what is known of a node's target: as declared, else as torch says."""
    if (found := _DECLARED.get(id(target))) is None:
        if not isinstance(target, OpOverload):
            return _FUNCTION
        found = _DECLARED[id(target)] = target, _by_torch(target)
    return found[1]


def declare(target: OpOverload | OpOverloadPacket | HigherOrderOperator, **facts: Any) -> None:
    """Declare facts about an operator, or all its overloads: fields of `Operator`. Others stay as torch says.

    Raises:
        UserError: a fact is none of the legal ones, or contradicts another.
    """
    names = target.overloads() if isinstance(target, OpOverloadPacket) else ()
    for each in [getattr(target, name) for name in names] or [target]:
        declared = replace(operator_of(each), **facts)
        if declared.recompute not in get_args(Recomputed):
            raise UserError(f"{each}: recompute = {declared.recompute!r}: must be any, alternate, costly or never")
        if declared.elementwise and facts.get("flops") is not None:
            raise UserError(f"{each}: flops: those of elementwise operators are not counted; leave it out")
        _DECLARED[id(each)] = each, declared


def operator(
    fake: Callable[..., Any],
    *,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    namespace: str = "torchtitan_graph",
    **facts: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function an operator of its name, as graphs contain it. It writes to none of its
    arguments.

    Args:
        fake: returns results of the right shape, dtype and device for fake arguments.
        setup, backward: its gradient, as `torch.library.register_autograd` takes it.
        facts: fields of `Operator`.

    Raises:
        UserError: as `declare`; or `setup` without `backward`.
    """
    if setup is not None and backward is None:
        raise UserError("operator: setup needs backward, which reads what it saves")

    def made(function: Callable[..., Any]) -> OpOverload:
        name = function.__name__
        custom = torch.library.custom_op(f"{namespace}::{name}", function, mutates_args=())
        custom.register_fake(fake)
        if backward is not None:
            custom.register_autograd(backward, setup_context=setup)
        overload = getattr(getattr(torch.ops, namespace), name).default
        declare(overload, **facts)
        return overload

    return made


def _by_torch(target: OpOverload) -> Operator:
    """Return what torch says about an operator. One of another library may wait for the device: it is not recorded."""
    is_known = target.namespace in ("aten", "prims", "_c10d_functional", "torchtitan_graph")
    sends = target.namespace in ("_c10d_functional", "_dtensor")
    return Operator(
        elementwise=torch.Tag.pointwise in target.tags,
        flops=flop_registry.get(target.overloadpacket),
        collective=OTHER_COLLECTIVE if group_argument(target) is not None else None,
        compiles=not sends and not target._schema.is_mutable,
        records=is_known and _UNSAFE.isdisjoint(target.tags),
    )


@functools.cache
def group_argument(target: OpOverload) -> tuple[int, str] | None:
    """Return the place and name of the argument that names a process group."""
    names = [argument.name for argument in target._schema.arguments]
    return next(((names.index(name), name) for name in GROUP_ARGUMENTS if name in names), None)


def num_bytes(values: Any) -> int:
    """Return the bytes of a node's value, a tensor or several."""
    if isinstance(values, Tensor):
        return math.prod(values.shape) * values.element_size()
    return sum(map(num_bytes, values)) if isinstance(values, (tuple, list)) else 0


def equal_groups(tensors: Sequence[Tensor], number: int) -> Tensor:
    """Return the ends of groups of rows of equal sizes: an example of offsets."""
    rows = tensors[0].shape[0]
    return torch.linspace(0, rows, number + 1)[1:].long()
