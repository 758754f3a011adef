"""Gradients that are taken while a graph runs: nothing in the graph reads or writes them any more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_graph.capture.step import bind_train_step, trace_train_step
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models.spec import load_family, tiny_config
from torchtitan_graph.runtime.gradients import find_made, taking


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


FAMILIES = ["llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize(
    ("family", "tied", "num_runs"),
    [*((family, False, 1) for family in FAMILIES), ("llama3", True, 1), ("deepseek_v3", False, 3), ("llama3", True, 2)],
)
def test_what_is_done_to_a_gradient_that_is_taken_changes_nothing_else(family: str, tied: bool, num_runs: int) -> None:
    module = load_family(family)
    torch.manual_seed(0)
    model = module.Model(tiny_config(module.FLAVORS["debugmodel"], vocab_size=64, tied=tied), "sdpa")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens, positions = torch.randint(64, (2, 16)), torch.arange(16).expand(2, -1).contiguous()
    batches = [Batch(x, x, positions, torch.zeros_like(x)) for x in (tokens.roll(i) for i in range(num_runs))]
    masks = model.masks(batches[0].documents_BL, positions)
    inputs = batches[0], masks, torch.tensor(32)
    step = bind_train_step(trace_train_step(model, cross_entropy, *inputs, device="cpu"), model)
    plain = [step(batch, *inputs[1:]) for batch in batches]
    expected = {name: p.grad for name, p in model.named_parameters()}
    taken: list[list[int]] = []
    for _ in range(2):
        model.zero_grad()
        found: list[Tensor] = []

        def double(made: Tensor, found: list[Tensor] = found) -> None:
            found.append(made.mul_(2))

        with taking(double, num_runs):
            outputs = [step(batch, *inputs[1:]) for batch in batches]
        places = {address(p.grad): name for name, p in model.named_parameters()}
        taken.append([places[address(made)] for made in found])
        for output, alone in zip(outputs, plain, strict=True):
            assert torch.equal(output.loss, alone.loss)
            assert all(torch.equal(x, alone.state[name]) for name, x in output.state.items())
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, 2 * expected[name]), name
    assert taken[0] == taken[1] and sorted(taken[0]) == sorted(places.values()), "all, in one order"


def made(function: Callable[..., Any], gradients: list[int], *inputs: Tensor) -> list[tuple[str, str]]:
    gm: GraphModule = make_fx(function)(*inputs)
    return [(last.name, memory.name) for last, memory in find_made(gm.graph, gradients)]


X = torch.randn(4, 6)


def test_a_gradient_is_taken_after_its_last_use() -> None:
    def step(x: Tensor) -> list[Tensor]:
        made = x * 2
        return [made.t().unsqueeze(0), made.sum(), x.cos()]

    assert made(step, [0], X) == [("sum_1", "mul")]


def test_a_write_to_a_gradient_is_a_use() -> None:
    def step(x: Tensor) -> list[Tensor]:
        made = x * 2
        part = made.view(-1)
        x.cos()
        part.add_(1)
        return [made]

    ((last, memory),) = made(step, [0], X)
    assert memory == "mul" and last.startswith("add_")


def test_the_result_of_a_write_in_place_is_the_same_memory() -> None:
    def step(x: Tensor) -> list[Tensor]:
        made = x * 2
        more = torch.ops.aten.mul_.Tensor(made.view(-1), 3)
        return [made, more + 1, x * 3]

    assert made(step, [0, 2], X) == [("add", "mul"), ("mul_1", "mul_1")]


def test_parts_of_one_block_are_taken_as_one() -> None:
    def step(x: Tensor) -> list[Tensor]:
        one, two = torch.ops.aten.split_with_sizes(x * 2, [1, 3])
        return [one.view(6), two.view(18)]

    ((_, memory),) = made(step, [0, 1], X)
    assert memory == "mul"


@pytest.mark.parametrize(
    "step",
    [
        lambda x: [x.view(-1)],  # an input
        lambda x: [(x * 2)[:1].expand(4, 6)],  # an element in several places, which is copied
        lambda x: (lambda y: [y, y.view(-1)])(x * 2),  # a result that is no gradient
        lambda x: (lambda y: [y, torch.ops.aten.mul_.Tensor(y.view(-1), 3)])(x * 2),  # the same
        lambda x: [torch.ops.aten.mul_.Tensor(x, 2)],  # an input, written to
        lambda x: [(x * 2).as_strided((3, 3), (1, 1))],  # elements in several places
    ],
)
def test_memory_that_is_more_than_a_gradients_is_left_alone(step: Callable[..., Any]) -> None:
    assert made(step, [0], X) == []


def test_parts_of_two_splits_overlap() -> None:
    def step(x: Tensor) -> list[Tensor]:
        made = x * 2
        one, _ = torch.ops.aten.split_with_sizes(made, [2, 2])
        _, two = torch.ops.aten.split_with_sizes(made, [1, 3])
        return [one, two]

    assert made(step, [0, 1], X) == []


def test_gradients_that_overlap_are_left_alone() -> None:
    def step(x: Tensor) -> list[Tensor]:
        made = x * 2
        return [made, made.view(-1), x * 3]

    assert made(step, [0, 1, 2], X) == [("mul_1", "mul_1")]
