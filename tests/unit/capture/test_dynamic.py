"""What `minimal_fx_tracer` takes as sizes that differ from call to call, and numbers that a function reads."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sized import branching, double, marked, rows
from torch import Tensor, nn
from torch._dynamo import mark_dynamic, maybe_mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch.export import Dim

from torchtitan_graph.capture.trace import capture_step, make_fx_capture, minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError


def mark_beyond(x: Tensor) -> Tensor:
    mark_dynamic(x, 2)
    return x


# --- one graph for several sizes --------------------------------------------------------------------------------------


def test_an_unbacked_size_may_be_none_and_one() -> None:
    run = run_traced(minimal_fx_tracer(lambda x: x.sum(1) + 1)(marked(rows(5), mark_unbacked)))
    for n in (0, 1, 7):
        assert torch.equal(run(rows(n)), rows(n).sum(1) + 1)


@pytest.mark.parametrize(
    ("how", "shapes"), [({"shape_id": "n"}, None), (None, {"x": {0: "n"}, "y": {0: "n"}})], ids=["marks", "declared"]
)
def test_sizes_of_one_name_are_equal(how: dict | None, shapes: dict | None) -> None:
    first = [rows(5) if how is None else marked(rows(5), mark_unbacked, **how) for _ in range(2)]
    run = run_traced(minimal_fx_tracer(lambda x, y: x + y, dynamic_shapes=shapes)(*first))
    assert torch.equal(run(rows(3), rows(3)), 2 * rows(3))
    with pytest.raises(UserError, match=r"x.shape.0. is 4, but y.shape.0. is 3: both are n, and must be equal"):
        run(rows(4), rows(3))


def test_what_may_be_dynamic_and_is_one_stays_one() -> None:
    run = run_traced(minimal_fx_tracer(lambda x: x + 1)(marked(rows(1), maybe_mark_dynamic)))
    assert torch.equal(run(rows(1)), rows(1) + 1)
    with pytest.raises(UserError, match=r"x has shape \[2, 4\]"):
        run(rows(2))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 8)),
        lambda x: F.pad(x, (1, 2)) @ torch.ones(7, 3),
    ],
)
def test_operators_whose_kernels_take_no_symbols(fn: Callable) -> None:
    run = run_traced(minimal_fx_tracer(fn)(marked(rows(6))))
    for n in (6, 3, 9):
        assert torch.equal(run(rows(n)), fn(rows(n))), n


def test_a_dimension_may_be_less_than_another() -> None:
    shapes = {"x": {0: Dim("n")}, "y": {0: Dim("n") - 1}}
    run = run_traced(minimal_fx_tracer(lambda x, y: x[1:] + y, dynamic_shapes=shapes)(rows(6), rows(5)))
    assert torch.equal(run(rows(4), rows(3)), rows(4)[1:] + rows(3))


def test_arguments_may_lie_across() -> None:
    run = run_traced(minimal_fx_tracer(lambda x: x.t() @ x)(marked(torch.ones(4, 6).t())))
    assert torch.equal(run(rows(4, 9).t()), rows(4, 9) @ rows(4, 9).t())


# --- what a call has to keep --------------------------------------------------------------------------------------


def promising(x: Tensor, y: Tensor) -> Tensor:
    torch._check(x.shape[0] == y.shape[0])
    torch._check(x.shape[0] != 3)
    return x + y


@pytest.mark.parametrize(("sizes", "relation"), [((1, 4), "x.shape.0. == y.shape.0."), ((3, 3), "!= 3")])
def test_what_is_promised_of_unbacked_sizes_is_checked(sizes: tuple[int, int], relation: str) -> None:
    """Also where a call that breaks it would have a result: a row is added to many."""
    run = run_traced(minimal_fx_tracer(promising)(*(marked(rows(5), mark_unbacked) for _ in range(2))))
    assert torch.equal(run(rows(1), rows(1)), 2 * rows(1))
    with pytest.raises(UserError, match=rf"the trace holds where .*{relation} \(test_dynamic.py"):
        run(*map(rows, sizes))


def test_the_bounds_of_an_unbacked_size_decide_a_branch() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] <= 5 else x * 3

    run = run_traced(minimal_fx_tracer(fn)(marked(rows(4), mark_unbacked, min=2, max=5)))
    assert torch.equal(run(rows(5)), rows(5) * 2)
    with pytest.raises(UserError, match=r"x.shape.0. is 6: the trace holds for 2 to 5"):
        run(rows(6))


def below(number: int) -> None:
    torch._check(number < 100)


def both(number: int) -> None:
    torch._check((number >= 0) & (number <= 99))


@pytest.mark.parametrize("promise", [below, both, lambda n: torch._check(n == 5), lambda n: torch._check(n + 1 <= 100)])
def test_a_promise_that_a_call_breaks_is_named_with_its_line(promise: Callable) -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        number = n.item()
        promise(number)
        return x * number

    run = run_traced(minimal_fx_tracer(fn, call_hierarchy=True)(rows(2), torch.tensor(5)))
    assert torch.equal(run(rows(2), torch.tensor(5)), rows(2) * 5)
    with pytest.raises(UserError, match=r"needs .*u0.* \(test_dynamic.py:\d+: .*_check.*is a number that it reads"):
        run(rows(2), torch.tensor(200))


def test_a_size_that_makes_a_divisor_zero_is_refused() -> None:
    """The gradient of `std` divides by the number of rows less one: eagerly to inf, in Python not."""

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.std(0).sum(), x)[0]

    run = run_traced(minimal_fx_tracer(step)(marked(rows(5).requires_grad_(), mark_unbacked)))
    assert torch.equal(run(rows(3).requires_grad_()), step(rows(3).requires_grad_()))
    with pytest.raises(UserError, match=r"by one that is 0 in this call, which it computes of x.shape\[0\]: trace"):
        run(rows(1).requires_grad_())


def test_a_size_beyond_its_bounds_is_refused() -> None:
    run = run_traced(minimal_fx_tracer(torch.relu, dynamic_shapes={"args[0]": {0: Dim("n", min=4, max=8)}})(rows(6)))
    with pytest.raises(UserError, match=r"args\[0\].shape\[0\] is 9: the trace holds for 4 to 8"):
        run(rows(9))
    run = run_traced(minimal_fx_tracer(double, dynamic_shapes={"x": ["n"], "y": [2 * Dim("n")]})(rows(6), rows(12)))
    with pytest.raises(UserError, match=r"y.shape\[0\] is 11, but 2\*n is 10, for x.shape\[0\] is 5"):
        run(rows(5), rows(11))
    run = run_traced(minimal_fx_tracer(lambda x: x + 1)(marked(rows(6), min=4)))
    with pytest.raises(UserError, match=r"x.shape.0. is 3: the trace holds for 4 and more"):
        run(rows(3))


def test_dimensions_that_are_not_dynamic_stay_as_they_are() -> None:
    run = run_traced(minimal_fx_tracer(lambda x: x + 1)(marked(rows(6))))
    with pytest.raises(UserError, match=r"x has shape \[6, 5\] .*traced with \[any, 4\]"):
        run(rows(6, 5))


# --- what can't be dynamic --------------------------------------------------------------------------------------------


def fixed(x: Tensor) -> Tensor:
    return x.view(3, -1) if x.shape[0] == 6 else x


@pytest.mark.parametrize(
    ("fn", "first", "message"),
    [
        (
            fixed,
            (marked(rows(6)),),
            r"x.shape.0. is to be dynamic, but .* takes it for 6 \(test_dynamic.py:\d+: ret",
        ),
        (lambda x: x + 1, (marked(rows(1)),), r"x.shape.0. is to be dynamic, but is 1: trace with 2 or more"),
        (branching, (marked(rows(6), mark_unbacked),), r"size and decides by it \(x.shape.0. > 5 \(sized.py:"),
        (
            branching,
            (marked(rows(6), min=3),),
            r"x.shape.0. may be 3, as declared, but .* holds only where x.*> 5 \(",
        ),
        (
            lambda x: x * 2 if x.shape[0] < 8 else x,
            (marked(rows(6), max=9),),
            r"x.shape.0. may be 9, as declared, but .* holds only where x.*< 8 \(test_dynamic.py",
        ),
        (lambda x: x + 1, (marked(rows(6), min=1),), r"x.shape.0. is declared from 1 on: .* 2 and more"),
        (
            lambda x: x + 1,
            (marked(rows(6), max=4),),
            r"is 6, outside the declared bounds, any to 4",
        ),
        (lambda x: x + 1, (mark_beyond(rows(6)),), "x: dimension 2 is marked dynamic, and it has 2 dimensions"),
        (lambda x: x + 1, (marked(rows(6), specialize_on=[bool]),), r"x.shape.0. is marked with specialize_on, but"),
        (
            lambda x: torch.autograd.grad(F.interpolate(x[None, : x.shape[0] // 2], scale_factor=2.0).sum(), x),
            (marked(rows(6).requires_grad_()),),
            r"with a dynamic size,.* takes a plain number only \(test_dynamic.py",
        ),
        (lambda x: {x.shape[0]: x}, (marked(rows(6)),), r"with a dynamic size,.* \(test_dynamic.py:.*unhashable"),
        (lambda x: x[0, 0].long().item(), (rows(6),), "the result holds u0, a number that only a run knows"),
        (lambda x: torch.from_numpy(x.numpy()), (rows(6),), r"a NumPy array of a tensor \(test_dynamic.py:\d+: "),
    ],
)
def test_what_can_not_be_dynamic_is_refused_by_name(fn: Callable, first: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        minimal_fx_tracer(fn)(*first)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": {0: "n"}}, "z is not a tensor among the arguments: x, y"),
        ({"x": {2: "n"}}, "x has no dimension 2: 0 to 1"),
        ({"x": {"0": "n"}}, "x has no dimension '0': 0 to 1"),
        ({"x": "n"}, "x is 'n': legal are a dict of its dimensions' names, and a list of names"),
        (({0: "n"}, None), r"dynamic_shapes is .*: legal is a dict of tensors' names, as in {'x': {0: 'rows'}}"),
        ({"x": {0: 8}}, r"x.shape.0. is 8: legal are a name"),
        ({"y": {0: 2 * Dim("n")}}, r"y.shape.0. is 2\*n, but no dimension is n"),
    ],
)
def test_what_dynamic_shapes_can_not_say_is_refused(shapes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        minimal_fx_tracer(double, dynamic_shapes=shapes)(rows(6), rows(12))


def test_marks_that_are_not_arguments_are_refused() -> None:
    net = nn.Linear(4, 4)
    mark_dynamic(net.weight, 0)
    with pytest.raises(UserError, match="weight has a dimension marked dynamic: only an argument's may be"):
        minimal_fx_tracer(functools.partial(net), net)(rows(6))
    norm = nn.BatchNorm1d(4).eval()
    mark_dynamic(norm.running_mean, 0)
    with pytest.raises(UserError, match="running_mean has a dimension marked dynamic"):
        minimal_fx_tracer(functools.partial(norm), norm)(rows(6))


NUMBER = r"a plain number of a tensor's value, by float\(\), int\(\) or torch.tensor\(\)"


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda x: x * torch.tensor([x.sum().item()]), rf"{NUMBER} {{}}.*torch.stack"),
        (lambda x: x * torch.tensor([x.sum(), x.mean()])[0], r"copies numbers out of a tensor {}.*torch.stack"),
        (lambda x: x * x.sum().item(), "reads a tensor's value {}: a training step.* choose by torch.where"),
        (lambda x: x * x[0].tolist()[0], "reads a tensor's value {}: a training step"),
        (lambda x: x * float(x.sum()), rf"{NUMBER} {{}}"),
        (lambda x: x * int(x.sum()), rf"{NUMBER} {{}}"),
        (lambda x: x if bool(x.sum() > 0) else -x, "decides by it .*{}"),
        (lambda x: x[x > 0].sum(), r"whose shape depends on values \(aten.nonzero.default {}"),
    ],
)
def test_a_training_step_that_reads_numbers_is_refused_with_the_line(read: Callable[..., Tensor], said: str) -> None:
    net = nn.Linear(4, 4)
    place = rf"\((\w+/)?test_dynamic.py:{read.__code__.co_firstlineno}(: .*)?\)"
    with pytest.raises(UserError, match=said.format(place)):
        capture_step(make_fx_capture, lambda x: read(net(x)), net, device=None)(rows(6))


def test_a_training_step_computes_each_size_once_and_has_numbers_in_its_values() -> None:
    net = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        y = net(x).view(x.shape[0] * 2, 2)
        return torch.cat([y, torch.zeros(2 * y.shape[0] // 2, 2), y.new_ones(x.shape[0] * 2, 2)])

    traced = make_fx_capture(step, net, dynamic_shapes={"x": {0: "n"}})(rows(6))
    nodes = list(traced.gm.graph.nodes)
    sizes = [node for node in nodes if isinstance(node.meta.get("val"), int)]
    assert sorted(node.meta["val"] for node in sizes) == [6, 12]
    first = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    assert nodes[first : first + len(sizes)] == sizes  # they hold no value
    assert [tuple(node.meta["val"].shape) for node in nodes if node.target is torch.ops.aten.cat.default] == [(36, 2)]
    run = run_traced(traced, net)
    for n in (6, 3):
        assert torch.equal(run(rows(n)), step(rows(n)).detach())


# --- numbers that are read ------------------------------------------------------------------------------------------


def first_rows(x: Tensor, n: Tensor) -> Tensor:
    length = int(n.item()) if n.dtype.is_floating_point else n.item()
    torch._check(length >= 0)
    torch._check(length <= x.shape[0])
    return x[:length] * n.item()


def test_a_number_that_is_read_is_read_at_each_call() -> None:
    run = run_traced(minimal_fx_tracer(first_rows)(rows(6), torch.tensor(3)))
    for n in (3, 0, 6):
        assert torch.equal(run(rows(6), torch.tensor(n)), rows(6)[:n] * n)
    with pytest.raises(UserError, match=r"needs u0 <= 6 \(test_dynamic.py:.*, where u0 is a number that it reads"):
        run(rows(6), torch.tensor(7))


def counting(x: Tensor, n: Tensor) -> Tensor:
    count = torch.tensor(1.0)
    count.add_(n.item())
    return x * count.item()


@pytest.mark.parametrize(
    "fn",
    [
        counting,
        lambda x, n: x * (torch.tensor(0.9) * n.item()).item(),
        lambda x, n: x * (torch.tensor(0.9) * (x.shape[0] * 0.5)).item(),
        lambda x, n: x * torch.div(2.0, n.item() + 1.0),
    ],
)
def test_what_a_number_of_the_function_s_own_meets_is_read_too(fn: Callable) -> None:
    run = run_traced(minimal_fx_tracer(fn)(marked(rows(6)), torch.tensor(3.0)))
    for n in (3, 7):
        assert torch.equal(run(rows(n), torch.tensor(n + 0.5)), fn(rows(n), torch.tensor(n + 0.5)))


def test_a_branch_on_it_is_refused() -> None:
    def branch(x: Tensor) -> Tensor:
        return x * 2 if torch.tensor(0.9) * (x.shape[0] * 0.5) > 2 else x

    with pytest.raises(UserError, match=r"decides by it .*test_dynamic.py"):
        minimal_fx_tracer(branch)(marked(rows(6)))


def test_a_write_to_several_numbers_of_its_own_is_refused() -> None:
    """torch gives what such a number was before to who reads it."""

    def own_counters(x: Tensor) -> Tensor:
        counts = [torch.tensor(1.0), torch.tensor(2.0)]
        torch._foreach_mul_(counts, x.sum() if x.shape[1] == 4 else 3.0)
        return x * counts[1].item()

    with pytest.raises(UserError, match=r"writes to a number of its own \(aten._foreach_mul_.Tensor, .*test_dynamic"):
        minimal_fx_tracer(own_counters)(rows(6))
    run = run_traced(minimal_fx_tracer(own_counters)(rows(6, 5)))
    assert torch.equal(run(rows(6, 5)), rows(6, 5) * 6)  # by a number that the trace knows


OPTIMIZERS: dict[str, Callable] = {
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adagrad": functools.partial(torch.optim.Adagrad, lr_decay=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Muon": torch.optim.Muon,
    "NAdam": functools.partial(torch.optim.NAdam, betas=(torch.tensor(0.9), torch.tensor(0.99))),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_reads_its_counter_is_traced_bit_for_bit(name: str, foreach: bool) -> None:
    if name in ("Muon", "NAdam") and foreach:
        pytest.skip("Muon has one form, and numbers that are tensors want one tensor at a time")
    options = {"lr": 0.1} | ({} if name == "Muon" else {"foreach": foreach})
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    other = copy.deepcopy(net)
    optimizer, plain = (OPTIMIZERS[name](m.parameters(), **options) for m in (net, other))

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    for module, its in ((net, optimizer), (other, plain)):  # state comes with the first step
        step(module, its, [rows(4), rows(4)])
    traced = minimal_fx_tracer(functools.partial(step, net, optimizer), net, optimizer)([rows(4), rows(4)])
    run = run_traced(traced, net, optimizer)
    for k in range(4):
        gradients = [rows(4) * k, rows(4) + k]
        run(gradients)
        step(other, plain, [g.clone() for g in gradients])
        assert all(map(torch.equal, net.parameters(), other.parameters())), k
