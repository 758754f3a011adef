"""reuse_sharded_logits: no matrix of the logits' size in backward beside them, and one in forward; bitwise."""

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from toy import aten, bitwise, calls

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.graph.edit import value
from torchtitan_graph.ops.row_loss import exponentials, sharded_cross_entropy_backward_
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.reuse_sharded_logits import reuse_sharded_logits

OURS = (exponentials, sharded_cross_entropy_backward_)
T, V = 40, 6
X, W, COLUMNS = torch.randn(T, 3), torch.randn(3, V), torch.randint(V, (T,))


def loss_and_gradient(logits: Tensor, columns: Tensor, again: bool = False, where: str = "") -> tuple[Tensor, ...]:
    """What torch's loss over a sharded vocabulary computes on one rank, its collectives left out."""
    wide = logits.float()
    largest = wide.amax(1, keepdim=True)
    shifted = wide - largest
    log = shifted.exp().sum(1, keepdim=True).log()
    logs = shifted - log
    loss = logs.gather(1, columns.unsqueeze(1)).sum()
    if where == "evaluation":
        return (loss,)
    if again:  # as `rematerialize` leaves it
        logs = logits.float() - largest - log
    put = torch.zeros_like(logs).index_put([torch.arange(T), columns], -torch.ones(T))
    scale = torch.arange(float(T)).unsqueeze(1)
    made = ((put + logs.exp()) * (scale if where != "other scale" else logs)).to(logits.dtype)
    return loss, made


def step(dtype: torch.dtype, again: bool = False, where: str = "") -> GraphModule:
    def fn(x: Tensor, w: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
        logits = (x @ w).to(dtype)
        first = [logits.sin()] if where == "read before" else []  # it could run again after the write
        loss, *made = loss_and_gradient(logits, columns, again, where)
        if where == "read after":
            made.append(logits * 2)
        return (loss, *made, *first, *([logits] if where == "an output" else []))

    return cleanup(minimal_fx_tracer(fn)(X, W, COLUMNS).gm)


def run(gm: GraphModule) -> list[Tensor]:
    return list(gm(X, W, COLUMNS))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_keeps_its_numbers(dtype: torch.dtype, again: bool) -> None:
    gm = step(dtype, again)
    expected = run(gm)
    gm = reuse_sharded_logits(gm)
    gm.graph.lint()
    assert [n.target for n in calls(gm, *OURS)] == [*OURS]
    large = [n for n in gm.graph.nodes if n.op == "call_function" and tuple(value(n).shape) == (T, V)]
    assert {n.target for n in large} <= {aten.mm.default, aten._to_copy.default, *OURS}
    assert bitwise(run(gm), expected)


def test_evaluation_has_the_first_half_alone() -> None:
    gm = step(torch.float32, where="evaluation")
    expected = run(gm)
    gm = reuse_sharded_logits(gm)
    assert [n.target for n in calls(gm, *OURS)] == [exponentials]
    assert bitwise(run(gm), expected)


@pytest.mark.parametrize("where", ["read before", "read after", "an output", "other scale"])
def test_others_stay_as_they_are(where: str) -> None:
    gm = step(torch.float32, where=where)
    expected = run(gm)
    assert not calls(reuse_sharded_logits(gm), *OURS)
    assert bitwise(run(gm), expected)
