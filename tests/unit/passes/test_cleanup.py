"""cleanup: no aliases, nothing unused, and no node's value changes; bitwise, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toy import aten, bitwise, calls, run_toy, toy, trace_toy

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.errors import UserError
from torchtitan_graph.ops.loss import cross_entropy_backward_, cross_entropy_terms
from torchtitan_graph.passes.cleanup import cleanup


def traced(fn: Callable, *args: Tensor) -> torch.fx.GraphModule:
    return minimal_fx_tracer(fn)(*args).gm


def test_a_step_keeps_its_numbers_and_loses_aliases_and_writes() -> None:
    gm = trace_toy(toy())
    expected, before = run_toy(gm), len(gm.graph.nodes)
    gm = cleanup(gm)
    assert bitwise(run_toy(gm), expected)
    assert not calls(gm, aten.detach.default, aten.alias.default)
    assert not any(n.target._schema.is_mutable for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    assert len(gm.graph.nodes) < before


def test_unused_nodes_go() -> None:
    def fn(x: Tensor) -> Tensor:
        x.sin()
        return x.cos()

    assert [n.target for n in cleanup(traced(fn, torch.ones(2))).graph.nodes if n.op == "call_function"] == [
        aten.cos.default
    ]


def chain(x: Tensor) -> list[Tensor]:
    y = x + 1
    before = y * 1
    y.add_(1)
    between = y * 1
    y.mul_(y)
    return [before, between, y, y.detach().sin()]


def through_detach(x: Tensor) -> list[Tensor]:
    y = x * 2
    z = y.detach()
    z.add_(1)
    return [y + 0, z + 0]


def from_detached_source(x: Tensor) -> list[Tensor]:
    y = x * 2
    z = y.detach()
    y.add_(1)
    return [y + 0, z + 0]


def narrow_result(x: Tensor) -> list[Tensor]:
    y = x.bfloat16()
    y.add_(torch.full((2,), 1 / 3))
    return [y, y.float() * 3]


def overwritten(x: Tensor) -> list[Tensor]:
    y = torch.empty(2)
    y.copy_(x)
    z = torch.zeros(2)
    z.masked_fill_(x > 0, 5.0)
    return [y, z]


def view_that_nobody_reads_again(x: Tensor) -> list[Tensor]:
    y = (x * 2).view(2, 1)
    y.add_(1)
    return [y + 0]


def view_taken_after_the_write(x: Tensor) -> list[Tensor]:
    y = x * 2
    y.add_(1)
    return [y.view(2, 1) + 0]


def one_of_two_results(x: Tensor) -> list[Tensor]:
    values, places = x.topk(2)
    values.mul_(2)
    return [values + 0, places]


def overloads_of_other_names(x: Tensor) -> list[Tensor]:
    y = (x + 1).pow_(2)
    return [y, (x + 1).pow_(y)]


def base_read_after_write_to_view(x: Tensor) -> list[Tensor]:
    y = x * 2
    y[0].add_(1)
    return [y + 0]


def view_read_after_write_to_base(x: Tensor) -> list[Tensor]:
    y = x * 2
    v = y.view(2, 1)
    y.add_(1)
    return [v + 0]


def view_of_a_view(x: Tensor) -> list[Tensor]:
    y = x * 2
    first, second = y.view(2, 1), y.unsqueeze(0)
    first.t().add_(1)
    return [second + 0]


def base_returned(x: Tensor) -> list[Tensor]:
    y = x * 2
    y.view(-1).add_(1)
    return [y]


def filled_by_slices(x: Tensor) -> list[Tensor]:
    y = x.new_empty(4)
    y[:2].copy_(x)
    y[2:].copy_(x * 3)
    return [y, y * 2]


def assigned(x: Tensor) -> list[Tensor]:
    y = torch.empty(3, 2)
    y[0] = x
    y[1] = 1.0
    y[2] = x.bfloat16()
    return [y.t(), y.sum()]


def through_many_views(x: Tensor) -> list[Tensor]:
    y = torch.zeros(2, 3, 2)
    y[0, 1:, 1].copy_(x)
    y.transpose(0, 1).permute(2, -2, 0)[1, 1].mul_(x[0])
    y.view(-1)[3].fill_(5)
    y[1].diagonal().add_(x)
    y.unsqueeze(0).squeeze(0)[0, 0].sub_(x)
    return [y, y.transpose(0, 2) + 0]


def one_view_twice(x: Tensor) -> list[Tensor]:
    y = x * 2
    first, both = y[:1], y.view(2, 1)
    first.add_(1)
    first.mul_(3)
    both.add_(first * 2)
    return [y + 0, first + 0, both + 0]


def what_the_write_gives(x: Tensor) -> list[Tensor]:
    y = x * 2
    z = y[0].add_(1)
    y.mul_(3)
    return [y + 0, z + 0]


def detached_and_viewed(x: Tensor) -> list[Tensor]:
    y = x * 2
    z = y.detach()
    v = y.view(2, 1)
    v.add_(1)
    return [z + 0, y + 0]


EXACT = [
    overloads_of_other_names,
    one_of_two_results,
    chain,
    through_detach,
    from_detached_source,
    narrow_result,
    overwritten,
    view_that_nobody_reads_again,
    view_taken_after_the_write,
    base_read_after_write_to_view,
    view_read_after_write_to_base,
    view_of_a_view,
    base_returned,
    filled_by_slices,
    assigned,
    through_many_views,
    one_view_twice,
    what_the_write_gives,
    detached_and_viewed,
]


@pytest.mark.parametrize("fn", EXACT)
def test_in_place_writes_become_new_values(fn: Callable) -> None:
    x = torch.tensor([1.0, -2.0])
    gm = cleanup(traced(fn, x))
    assert not any(n.target._schema.is_mutable for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    found, expected = gm(x), fn(x)
    assert bitwise(found, expected)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for node, t in zip(gm.graph.output_node().args[0], expected, strict=True):  # type: ignore[arg-type]
        assert node.meta["val"].dtype == t.dtype  # type: ignore[union-attr]


def one_chunk_of_two(x: Tensor) -> Tensor:
    y = x * 2
    y.chunk(2)[0].add_(1)
    return y + 0


def test_a_write_to_a_view_without_an_inverse_is_refused_where_another_sees_it() -> None:
    with pytest.raises(
        UserError, match=r"cleanup: aten.add_.* in place to a view \(aten.split.Tensor\) of what aten.mul"
    ):
        cleanup(traced(one_chunk_of_two, torch.ones(2)))


def beside_the_column(x: Tensor) -> Tensor:
    y = x * 1.5
    y[:, 3].as_strided((2,), (1,), 3).zero_()  # also the first number of the second row
    return y


def test_a_write_beside_the_view_that_it_is_made_of_is_refused() -> None:
    with pytest.raises(UserError, match=r"writes in place to a view \(aten.as_strided.default\) of what aten.mul"):
        cleanup(traced(beside_the_column, torch.arange(16.0).view(4, 4)))


def test_a_write_without_a_functional_form_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        y, z = x * 1, x * 2
        torch._foreach_mul_([y, z], 2.0)
        return y + z

    with pytest.raises(UserError, match="cleanup: aten._foreach_mul_"):
        cleanup(traced(fn, torch.ones(2)))


def test_a_step_with_its_optimizer_writes_to_its_inputs_and_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(UserError, match="cleanup: .* in place to an input"):
        cleanup(minimal_fx_tracer(step, module=model, optimizer=optimizer)(torch.ones(1, 2)).gm)


@pytest.mark.parametrize("is_read", [False, True])
def test_the_losss_gradient_is_written_over_logits_unless_they_are_read_later(is_read: bool) -> None:
    labels_T = torch.tensor([1, 0])

    def step(x: Tensor) -> Tensor:
        logits = x * 2
        view = logits.view(-1)
        largest_T, log_T, target_T = cross_entropy_terms(logits, labels_T)
        gradient = cross_entropy_backward_(logits, labels_T, largest_T, log_T, torch.ones(2))
        return gradient.sum() + (view.sum() if is_read else target_T.sum())

    x = torch.randn(2, 5)
    traced = minimal_fx_tracer(step)(x)
    gm = cleanup(traced.gm)
    assert bool(calls(gm, cross_entropy_backward_)) != is_read
    assert torch.equal(gm(x)[0], step(x))
