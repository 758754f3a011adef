"""Cross entropy in the memory of the logits."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import owners, readers_of_memory
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, erase_dead, value
from torchtitan_graph.ops.fused_loss import fused_cross_entropy_backward_
from torchtitan_graph.ops.row_loss import cross_entropy, cross_entropy_backward_

aten = torch.ops.aten
_SUM = 2  # ATen's number for this reduction
_FUSED, _FUSED_BACKWARD = (
    getattr(torch.ops.torchtitan_graph, f"fused_cross_entropy_{end}").default for end in ("terms", "backward")
)


def reuse_logits(gm: GraphModule) -> GraphModule:
    """Compute the loss some rows at a time, and write the logits' gradient over them. Bitwise.

        p = log_softmax(x); l = nll_loss(p, t); ...; dp = nll_loss_backward(dl, p, t); dx = log_softmax_backward(dp, p)
        l = cross_entropy(x, t); ...; dx = cross_entropy_backward_(x, dl, t)

    One matrix of tokens x vocabulary is held instead of three, with casts in the logits' dtype instead of fp32; the
    logarithms are computed again in backward. Of a fused loss only the gradient changes its place. Only for logits that
    nothing else reads (another reader could be recomputed, or delayed, past the write), in memory that no input has,
    and sums over all classes alike. It runs before the policies, which see what the loss holds then. From here on a
    node's value may change: no policy may recompute its readers.
    """
    found = gm.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    losses = list(filter(None, map(_match, found)))
    fused = gm.graph.find_nodes(op="call_function", target=_FUSED_BACKWARD)
    if not losses and not fused:
        return gm
    owner, readers = owners(gm), readers_of_memory(gm)

    def is_free(logits: Node, loss: Container[Node]) -> bool:
        memory = owner[logits]
        is_own = memory.op == "call_function" and all(reader in loss for reader in readers[memory])
        return is_own and value(logits).is_contiguous()

    for loss in losses:
        if not loss.backward or is_free(loss.logits, {*loss.forward, *loss.backward}):
            _rewrite(gm, loss)
    for back in fused:
        logits = back.args[0]
        terms = [reader for reader in readers[owner[logits]] if reader.target is _FUSED]
        if len(terms) == 1 and is_free(logits, {*terms, back}):
            with gm.graph.inserting_before(back):
                made = call(gm.graph, back, fused_cross_entropy_backward_, *back.args)
            meta.stand_for(made, [back])
            back.replace_all_uses_with(made)
            gm.graph.erase_node(back)
    gm.recompile()
    return gm


class _Loss(NamedTuple):
    """The loss's nodes: in forward, in order, from a cast or the logarithms to the sum; in backward to the gradient of
    the logits, none in evaluation."""

    logits: Node
    forward: list[Node]
    backward: list[Node]


def _match(logs: Node) -> _Loss | None:
    """Return the loss computed from log-probabilities, None if the operators here don't cover it."""
    readers = {node.target: node for node in logs.users}
    nll, nll_back, back = (
        readers.pop(op.default, None)
        for op in (aten.nll_loss_forward, aten.nll_loss_backward, aten._log_softmax_backward_data)
    )
    if nll is None or readers or logs.args[1:] != (1, False) or value(logs).dim() != 2 or nll.args[2:4] != (None, _SUM):
        return None
    if value(logs).dtype not in (torch.float32, torch.float64):  # the operators would skip the rounding in between
        return None
    forward, backward = [logs, nll], []
    if nll_back is not None or back is not None:
        if nll_back is None or back is None or [*nll_back.users] != [back] or nll_back.args[3:6] != nll.args[2:]:
            return None
        backward = [nll_back, back]
    cast: Node = logs.args[0]  # type: ignore[assignment]
    ends = list(backward[-1].users) if backward else []
    if cast.target is aten._to_copy.default and len(cast.users) == 1 and len(ends) == bool(backward):
        logits: Node = cast.args[0]  # type: ignore[assignment]
        narrow = value(logits).dtype
        casts_back = all(end.target is aten._to_copy.default and value(end).dtype == narrow for end in ends)
        if casts_back and torch.promote_types(narrow, torch.float32) == value(cast).dtype:
            return _Loss(logits, [cast, *forward], [*backward, *ends])
    return _Loss(cast, forward, backward)


def _rewrite(gm: GraphModule, loss: _Loss) -> None:
    """Replace the loss's forward nodes by one operator, and its backward nodes by another."""
    nll, ignored = loss.forward[-1], loss.forward[-1].args[4]
    with gm.graph.inserting_before(nll):
        made = call(gm.graph, nll, cross_entropy, loss.logits, nll.args[1], ignored)
    meta.stand_for(made, loss.forward)
    nll.replace_all_uses_with(made)
    if loss.backward:
        nll_back, end = loss.backward[0], loss.backward[-1]
        dloss, _, labels, *_, total = nll_back.args
        with gm.graph.inserting_before(end):
            made = call(gm.graph, end, cross_entropy_backward_, loss.logits, dloss, labels, total, ignored)
        meta.stand_for(made, loss.backward)
        end.replace_all_uses_with(made)
    erase_dead(gm.graph, reversed([*loss.forward, *loss.backward]))
