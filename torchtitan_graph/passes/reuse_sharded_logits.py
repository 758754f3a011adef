"""Cross entropy of a vocabulary sharded by tensor parallelism, in the memory of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import owners, readers_of_memory
from torchtitan_graph.graph.edit import call, erase_unused, value
from torchtitan_graph.ops.row_loss import exponentials, sharded_cross_entropy_backward_

aten = torch.ops.aten


def reuse_sharded_logits(gm: GraphModule) -> GraphModule:
    """Compute the values of a sharded vocabulary's loss that have the logits' size some rows at a time. Bitwise.

        s = x - m; z = sum(exp(s)); l = gather(s - log z, t); ...; p = x - m - log z; dx = (onehot(t) + exp(p)) * scale
        z = sum(exponentials(x, m)); l = gather(x, t) - m - log z; ...; dx = sharded_cross_entropy_backward_(x, ...)

    Besides the logits one such matrix is held in forward, where the sum stays torch's own, and none in backward,
    instead of two and four. Where logits are narrow, they and their gradient are never whole in fp32 except in the
    search for the maximum. Only for logits that nothing else reads, in memory that no input has. From here on a node's
    value may change: no policy may recompute its readers.
    """
    found = gm.graph.find_nodes(op="call_function", target=aten.gather.default)
    losses = list(filter(None, map(_match, found)))
    if not losses:
        return gm
    owner, readers = owners(gm), readers_of_memory(gm)
    for loss in losses:
        memory, is_whole = owner[loss.logits], value(loss.logits).is_contiguous()
        is_own = memory.op == "call_function" and readers[memory] <= _own_readers(loss)
        if loss.end is None or (is_whole and is_own):
            _rewrite(gm, loss)
    erase_unused(gm)
    gm.recompile()
    return gm


class _Loss(NamedTuple):
    """The loss's nodes; m is the logits' maximum: exp(x - m), the gathered x - m - log z, and the logits' gradient."""

    logits: Node
    largest: Node
    log: Node
    exp: Node
    gather: Node
    back: tuple[Node, Node, Node] | None = None  # column, value, scale: the gradient's other operands
    end: Node | None = None
    """The gradient's last node."""


def _match(gather: Node) -> _Loss | None:
    """Return the loss whose target log-probabilities a gather takes, None if it is another pattern."""
    logs: Node = gather.args[0]  # type: ignore[assignment]
    parts = _logarithms(logs)
    if parts is None or gather.args[1] != 1 or value(logs).dtype not in (torch.float32, torch.float64):
        return None
    logits, largest, log = parts
    exps = [x for s in _subtractions(logits, largest) for x in s.users if x.target is aten.exp.default]
    sums = [exp for exp in exps if [x.target for x in exp.users] == [aten.sum.dim_IntList]]
    if len(sums) != 1 or next(iter(sums[0].users)).args[1:] != ([1], True):
        return None
    loss = _Loss(logits, largest, log, sums[0], gather)
    readers = [x for s in _subtractions(logits, largest) for x in s.users]
    again = [x for x in readers if _logarithms(x) == parts]
    others = [x for each in again for x in each.users if x is not gather]
    if {*readers} != {sums[0], *again}:
        return None
    return _with_backward(loss, others) if others else loss


def _with_backward(loss: _Loss, readers: list[Node]) -> _Loss | None:
    """Add the gradient nodes to a loss; None if the readers of the log-probabilities are another pattern."""
    zeros, exp = (
        next((x for x in readers if x.target is t), None) for t in (aten.zeros_like.default, aten.exp.default)
    )
    if zeros is None or exp is None or len(readers) != 2 or len(zeros.users) != 1 or len(exp.users) != 1:
        return None
    put, add = next(iter(zeros.users)), next(iter(exp.users))
    if put.target is not aten.index_put.default or add.target is not aten.add.Tensor or add.args != (put, exp):
        return None
    rows: Node
    rows, column = put.args[1]  # type: ignore[misc, str-unpack, assignment]
    mul = next(iter(add.users))
    if [*put.users] != [add] or [*add.users] != [mul] or mul.target is not aten.mul.Tensor or mul.args[0] is not add:
        return None
    count = rows.args[0]
    num_rows = value(count) if isinstance(count, Node) else count  # a node where the rows' number is dynamic
    if rows.target is not aten.arange.default or len(rows.args) > 1 or len(put.args) > 3:
        return None
    if num_rows != len(value(zeros)):
        return None
    end, narrow = mul, value(loss.logits).dtype
    if narrow != value(mul).dtype:
        end = next(iter(mul.users))
        if len(mul.users) != 1 or end.target is not aten._to_copy.default or value(end).dtype != narrow:
            return None
    return loss._replace(back=(column, put.args[2], mul.args[1]), end=end)  # type: ignore[arg-type]


def _logarithms(node: Node) -> tuple[Node, Node, Node] | None:
    """Return (x, m, log z) of x - m - log z."""
    first = node.args[0] if node.target is aten.sub.Tensor else None
    if not isinstance(first, Node) or first.target is not aten.sub.Tensor or node.kwargs or first.kwargs:
        return None
    wide: Node = first.args[0]  # type: ignore[assignment]
    return _narrow(wide), first.args[1], node.args[1]  # type: ignore[return-value]


def _narrow(wide: Node) -> Node:
    """Return the logits before their cast to fp32, or those without a cast."""
    logits = wide.args[0] if wide.target is aten._to_copy.default else None
    is_cast = isinstance(logits, Node) and value(logits).dtype.itemsize < value(wide).dtype.itemsize
    return logits if is_cast else wide  # type: ignore[return-value]


def _subtractions(logits: Node, largest: Node) -> list[Node]:
    """Return all nodes that are x - m, one in forward and perhaps another, rematerialized, in backward."""
    wide = [logits, *(x for x in logits.users if x.target is aten._to_copy.default)]
    readers = dict.fromkeys(x for each in wide for x in each.users if x.target is aten.sub.Tensor)
    return [x for x in readers if x.args[1] is largest and _narrow(x.args[0]) is logits]  # type: ignore[arg-type]


def _own_readers(loss: _Loss) -> set[Node]:
    """Return the loss's readers of the logits: the differences to the maximum, the search for it, and their casts."""
    differences = _subtractions(loss.logits, loss.largest)
    wide = {loss.logits, *(node.args[0] for node in differences)}
    searches = {x for each in wide for x in each.users if x.target is aten.amax.default}  # type: ignore[union-attr]
    return {*wide, *differences, *searches}  # type: ignore[arg-type]


def _rewrite(gm: GraphModule, loss: _Loss) -> None:
    """Replace the operators of the logits' size by row-by-row operators."""
    wide = value(loss.exp).dtype
    with gm.graph.inserting_before(loss.exp):
        loss.exp.replace_all_uses_with(call(gm.graph, loss.exp, exponentials, loss.logits, loss.largest))
    with gm.graph.inserting_before(loss.gather):
        target = call(gm.graph, loss.gather, aten.gather.default, loss.logits, 1, loss.gather.args[2])
        if value(target).dtype != wide:
            target = call(gm.graph, loss.gather, aten._to_copy.default, target, dtype=wide)
        for other in (loss.largest, loss.log):
            target = call(gm.graph, loss.gather, aten.sub.Tensor, target, other)
        loss.gather.replace_all_uses_with(target)
    if loss.end is not None and loss.back is not None:
        with gm.graph.inserting_before(loss.end):
            given = (loss.logits, loss.largest, loss.log, *loss.back)
            loss.end.replace_all_uses_with(call(gm.graph, loss.end, sharded_cross_entropy_backward_, *given))
