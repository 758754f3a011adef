"""Tensor subclasses, nested ones too: unwrapped at the graph's door, wrapped again from recorded layouts."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import layout_of, signature_of


class Two(Tensor):
    """Two tensors that every operator works on alike, with a word beside them."""

    left: Tensor
    right: Tensor
    word: str

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor, word: str) -> "Two":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, left.shape, strides=left.stride(), dtype=left.dtype, requires_grad=left.requires_grad
        )

    def __init__(self, left: Tensor, right: Tensor, word: str) -> None:
        self.left, self.right, self.word = left, right, word

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["left", "right"], self.word

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], word: str, size: Any, stride: Any) -> "Two":
        return Two(inner["left"], inner["right"], word)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = [x.word for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Two)]
        lefts = tree_map_only(Two, lambda x: x.left, args)
        rights = tree_map_only(Two, lambda x: x.right, args)
        left, right = func(*lefts, **(kwargs or {})), func(*rights, **(kwargs or {}))
        return Two(left, right, words[0]) if isinstance(left, Tensor) else left


def two(x: Tensor, word: str = "w") -> Two:
    return Two(x, 10 * x, word)


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x.left])
def test_a_mark_on_it_or_inside_it_is_refused(of: Callable[[Two], Tensor]) -> None:
    x = two(torch.zeros(4))
    mark_dynamic(of(x), 0)
    with pytest.raises(UserError, match="args.0. is a Two with a dynamic dimension, which is not supported"):
        minimal_fx_tracer(torch.relu)(x)


def test_a_subclass_comes_in_and_goes_out_as_itself() -> None:
    run = run_traced(minimal_fx_tracer(lambda x: x * 2 + 1)(two(torch.zeros(2))))
    found = run(two(torch.ones(2), "w"))
    assert isinstance(found, Two)
    assert found.word == "w"
    assert found.left.tolist() == [3, 3]
    assert found.right.tolist() == [21, 21]


def test_a_subclass_spans_a_placeholder_for_each_tensor_it_holds() -> None:
    traced = minimal_fx_tracer(lambda x, y: x * y)(two(torch.zeros(2)), torch.zeros(2))
    assert [slot.layout.num_tensors for slot in signature_of(traced.gm).inputs] == [2, 1]
    assert all(type(node.meta["val"]).__name__ == "FakeTensor" for node in traced.gm.graph.nodes if node.op != "output")


@pytest.mark.parametrize("given", [torch.ones(2), two(torch.ones(3)), two(torch.ones(2), "other")])
def test_another_layout_is_refused_by_name(given: Tensor) -> None:
    run = run_traced(minimal_fx_tracer(lambda batch: batch * 2)(two(torch.zeros(2))))
    with pytest.raises(UserError, match=r"batch is laid out as .*, traced as Two\[2\]"):
        run(given)


def test_a_subclass_where_a_plain_tensor_was_is_refused() -> None:
    run = run_traced(minimal_fx_tracer(lambda x: x * 2)(torch.zeros(2)))
    with pytest.raises(UserError, match="x is a Two, traced as a plain tensor"):
        run(two(torch.ones(2)))


def test_a_parameter_that_is_a_subclass_gets_a_gradient_that_is_one() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(two(torch.tensor([1.0, 2.0])))

    def gradient() -> Tensor:
        return torch.autograd.grad((model.weight**2).sum(), model.weight)[0]

    found = run_traced(minimal_fx_tracer(gradient, module=model)(), module=model)()
    assert isinstance(found, Two)
    assert found.left.tolist() == [2, 4]
    assert found.right.tolist() == [20, 40]


# --- DTensor ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_dtensors_come_in_and_go_out_with_their_placements() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x, w = torch.randn(4, 2), torch.randn(2, 3)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    sharded, replicated = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])
    found = run_traced(minimal_fx_tracer(fn)(sharded, replicated))(sharded, replicated)
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(0),)
    assert found.shape == (4, 3)
    assert torch.equal(found.to_local(), x @ w)


@pytest.mark.usefixtures("one_rank")
def test_a_mesh_is_no_input_of_the_graph() -> None:
    x = distribute_tensor(torch.randn(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    traced = minimal_fx_tracer(lambda x: x * 2)(x)
    assert [node.name for node in traced.gm.graph.find_nodes(op="placeholder")] == ["x"]


@pytest.mark.usefixtures("one_rank")
def test_other_placements_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    run = run_traced(minimal_fx_tracer(lambda x: x * 2)(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])))
    with pytest.raises(UserError, match=r"x is laid out as DTensor\[4\].*, traced as DTensor\[4\]"):
        run(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_may_lie_inside_another_subclass() -> None:
    mesh = init_device_mesh("cpu", (1,))

    def nested(x: Tensor) -> Two:
        return two(distribute_tensor(x, mesh, [Shard(0)]))

    def fn(x: Tensor) -> Tensor:
        return torch.autograd.grad((x**2).sum(), x)[0] + 1

    x = torch.tensor([1.0, 2.0])
    given = nested(x).detach().requires_grad_()
    traced = minimal_fx_tracer(fn)(given)
    found = run_traced(traced)(given)
    assert layout_of(found) == layout_of(fn(given))
    assert isinstance(found.left, DTensor)
    assert found.left.to_local().tolist() == [3, 5]
    assert found.right.to_local().tolist() == [21, 41]


ADAPTIVE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "AdamW, one by one": functools.partial(torch.optim.AdamW, foreach=False, amsgrad=True),
    "Adamax": torch.optim.Adamax,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ADAPTIVE)
def test_an_optimizer_that_reads_its_step_counter_steps_on_dtensors_as_in_eager(name: str) -> None:
    def after(is_traced: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, mesh = nn.Linear(3, 3), init_device_mesh("cpu", (1,))
        for key, p in list(model.named_parameters()):
            setattr(model, key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        optimizer = ADAPTIVE[name](model.parameters(), lr=0.1)
        x = distribute_tensor(torch.ones(2, 3), mesh, [Replicate()])

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step(x)  # makes the state
        run = run_traced(minimal_fx_tracer(step, model, optimizer)(x), model, optimizer) if is_traced else step
        for _ in range(2):
            run(x)
        return [p.to_local().detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(after(True), after(False), strict=True))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("fn", [lambda x: x * x.sum().item(), lambda x: x.add_(x.to_local().sum().item())])
def test_a_number_that_is_read_is_refused_among_the_arguments_of_a_dtensors_operator(fn: Callable) -> None:
    x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(UserError, match=r"a DTensor's operator a number that it reads .*test_trace_subclasses.py"):
        minimal_fx_tracer(fn)(x)


def new_local(p: Any) -> None:
    p._local_tensor = p._local_tensor + 1


def swap_contents(p: Any) -> None:
    torch.utils.swap_tensors(p, nn.Parameter(DTensor.from_local(p.to_local() + 1, p.device_mesh, p.placements)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("replace", [new_local, swap_contents])
def test_a_dtensor_parameter_with_another_local_tensor_is_bound_again(replace: Callable) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    run = run_traced(minimal_fx_tracer(lambda: model.weight * 2, module=model)(), module=model)
    assert run().to_local().tolist() == [2, 2]
    with torch.no_grad():
        replace(model.weight)
    assert run().to_local().tolist() == [4, 4]
