"""What ranks send while a step runs, in the order in which each of them starts it."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SEND, RECEIVE = "send", "receive"


class Message(NamedTuple):
    """`ranks` are those of a collective's group, or from where to where something is sent."""

    kind: str
    ranks: tuple[int, ...]
    size: int


class _Collectives(TorchDispatchMode):
    """Notes the operators that take the name of a group, but for waits."""

    supports_higher_order_operators = True

    def __init__(self, found: list[Message]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it is made of comes here again
        names = [argument.name for argument in func._schema.arguments] if isinstance(func, OpOverload) else []
        for name in {"group_name", "group"}.intersection(names):
            ranks = dist.get_process_group_ranks(_resolve_process_group(args[names.index(name)]))
            # How many rows are exchanged only the data know.
            size = 0 if "exchange" in str(func) else args[0].numel()
            self.found.append(Message(str(func), tuple(ranks), size))
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def noted() -> Iterator[list[Message]]:
    """Note all that this rank sends and receives."""
    found: list[Message] = []
    all_reduce, isend, irecv = dist.all_reduce, dist.isend, dist.irecv

    def note_sum(x: torch.Tensor, group: Any = None, **others: Any) -> Any:
        found.append(Message("all_reduce", tuple(dist.get_process_group_ranks(group)), x.numel()))
        return all_reduce(x, group=group, **others)

    def note_send(x: torch.Tensor, group: Any, group_dst: int) -> Any:
        found.append(Message(SEND, (dist.get_rank(), dist.get_global_rank(group, group_dst)), x.numel()))
        return isend(x, group=group, group_dst=group_dst)

    def note_receive(x: torch.Tensor, group: Any, group_src: int) -> Any:
        found.append(Message(RECEIVE, (dist.get_global_rank(group, group_src), dist.get_rank()), x.numel()))
        return irecv(x, group=group, group_src=group_src)

    functions = {"all_reduce": note_sum, "isend": note_send, "irecv": note_receive}
    with patch.multiple(dist, **functions), _Collectives(found):
        yield found


def out_of_order(by_rank: Sequence[Sequence[Message]]) -> list[str]:
    """Name the pairs of ranks that don't meet: each of the two starts the collectives of both in the same order, and
    sends or receives what the other receives or sends, in the same order too."""
    found = []
    for pair in itertools.combinations(range(len(by_rank)), 2):
        of_both = [[m for m in by_rank[rank] if {*pair} <= {*m.ranks}] for rank in pair]
        one, other = ([m for m in each if m.kind not in (SEND, RECEIVE)] for each in of_both)
        if one != other:
            found.append(f"collectives of {pair}")
        one, other = ([m for m in each if m.kind in (SEND, RECEIVE)] for each in of_both)
        if one != [m._replace(kind=RECEIVE if m.kind == SEND else SEND) for m in other]:
            found.append(f"messages between {pair}")
    return found
