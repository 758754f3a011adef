"""reuse_logits: one matrix of tokens x vocabulary, whose gradient is written over it; bitwise."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from toy import aten, batch, bitwise, calls, run_toy, toy, trace_toy

from torchtitan_graph.capture.step import trace_eval_step
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.graph.edit import value
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.ops import fused_loss
from torchtitan_graph.ops.row_loss import cross_entropy as rows
from torchtitan_graph.ops.row_loss import cross_entropy_backward_ as rows_backward
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.reuse_logits import reuse_logits

FUSED, FUSED_BACK, FUSED_IN_PLACE = (
    getattr(torch.ops.torchtitan_graph, f"fused_cross_entropy_{end}").default
    for end in ("terms", "backward", "backward_")
)
LEFT = (aten._log_softmax.default, aten.nll_loss_forward.default, aten.nll_loss_backward.default)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_keeps_its_numbers(dtype: torch.dtype) -> None:
    gm = cleanup(trace_toy(toy(), dtype))
    if dtype == torch.float32:
        expected = run_toy(gm)
    gm = reuse_logits(gm)
    gm.graph.lint()
    assert not calls(gm, *LEFT)
    (back,) = calls(gm, rows_backward)
    assert value(back).dtype == value(back.args[0]).dtype == dtype, "in the logits' dtype"
    if dtype == torch.float32:
        assert bitwise(run_toy(gm), expected)


def test_evaluation_has_the_first_half_alone() -> None:
    gm = cleanup(trace_eval_step(toy(), cross_entropy, batch(), None, torch.tensor(6.0), device="cpu").gm)
    expected = run_toy(gm)
    gm = reuse_logits(gm)
    assert [n.target for n in calls(gm, rows, rows_backward, *LEFT)] == [rows]
    assert bitwise(run_toy(gm), expected)


def step(of_loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> GraphModule:
    """Trace a loss of x W, and the gradients of both."""

    def fn(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x, w = x.requires_grad_(), w.requires_grad_()
        loss = of_loss(x @ w, labels, w)
        return loss, *torch.autograd.grad(loss, [x, w])

    return cleanup(minimal_fx_tracer(fn)(X, W, LABELS).gm)


X, W, LABELS = torch.ones(4, 3), torch.arange(15.0).view(3, 5), torch.tensor([1, 4, -100, 0])


def nll(logits: Tensor, labels: Tensor, reduction: str = "sum", **options: object) -> Tensor:
    return F.cross_entropy(logits, labels, reduction=reduction, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t, w: nll(x, t) + x.square().sum(),  # whose gradient reads the logits: before theirs, or after
        lambda x, t, w: x.square().sum() + nll(x, t),
        lambda x, t, w: nll(x, t) + nll(x, t.roll(1)),
        lambda x, t, w: nll(x.bfloat16(), t).float(),  # rounded before the sum
        lambda x, t, w: nll(x, t.clamp(min=0), ignore_index=0),  # the number of a class
        lambda x, t, w: nll(x, t, "mean"),
        lambda x, t, w: nll(x, t, "none").sum(),
        lambda x, t, w: nll(x, t, weight=torch.ones(5)),
        lambda x, t, w: nll(x, t, label_smoothing=0.1),
        lambda x, t, w: nll(w[:, :5], t[:3]) + x.sum(),  # the memory of an input
        lambda x, t, w: nll(x.t().contiguous().t(), t),  # not row by row
    ],
)
def test_other_losses_keep_their_numbers(loss: Callable) -> None:
    gm = step(loss)
    expected = gm(X, W, LABELS)
    found = reuse_logits(gm)(X, W, LABELS)
    assert bitwise(found, expected)
    assert torch.equal(W, torch.arange(15.0).view(3, 5))


@pytest.mark.parametrize(
    ("loss", "is_left"),
    [
        (lambda x, t, w: nll(x, t), False),
        (lambda x, t, w: nll(x, t) + (x @ w.t()).sum(), True),  # what reads them could run again after the write
        (lambda x, t, w: nll(x.bfloat16(), t), True),
        (lambda x, t, w: nll(x, t, "mean"), True),
        (lambda x, t, w: nll(w[:, :5], t[:3]) + x.sum(), True),
        (lambda x, t, w: nll(x.t().contiguous().t(), t), True),
    ],
)
def test_where_it_applies(loss: Callable, is_left: bool) -> None:
    assert bool(calls(reuse_logits(step(loss)), *LEFT)) == is_left


def test_logits_that_are_given_are_not_written_to() -> None:
    def fn(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        w = w.requires_grad_()
        logits = x @ w
        return logits, *torch.autograd.grad(nll(logits, labels), [w])

    gm = cleanup(minimal_fx_tracer(fn)(X, W, LABELS).gm)
    assert calls(reuse_logits(gm), *LEFT)


def fused(logits: Tensor, labels: Tensor) -> Tensor:
    return fused_loss.fused_cross_entropy(logits, labels, -100)


@pytest.mark.parametrize(
    ("loss", "is_written"),
    [
        (lambda x, t, w: fused(x, t), True),
        (lambda x, t, w: fused(x, t) + fused((x @ w.t()) @ w, t), False),  # the second's logits are the first's
        (lambda x, t, w: fused(x, t) + fused(x, t.roll(1)), False),
        (lambda x, t, w: fused(x, t) + x.square().sum(), False),
        (lambda x, t, w: fused(w[:, :5], t[:3]) + x.sum(), False),  # the memory of an input
        (lambda x, t, w: fused(x.t().contiguous().t(), t), False),
    ],
)
def test_a_fused_loss_writes_its_gradient_over_logits_that_nothing_else_reads(loss: Callable, is_written: bool) -> None:
    gm = step(loss)
    assert calls(gm, FUSED) and calls(gm, FUSED_BACK)
    expected = gm(X, W, LABELS)
    gm = reuse_logits(gm)
    gm.graph.lint()
    assert bitwise(gm(X, W, LABELS), expected) and torch.equal(W, torch.arange(15.0).view(3, 5))
    first = calls(gm, FUSED_BACK, FUSED_IN_PLACE)[-1]  # backward comes in the other order
    assert (first.target is FUSED_IN_PLACE) == is_written
