"""The state that DiLoCo keeps beside a model: its fragments, and what is saved of them."""

import pytest
import torch
from torch import nn

from torchtitan_graph.config.job import FaultTolerance
from torchtitan_graph.errors import UserError
from torchtitan_graph.replicas.outer import Outer, fragments_of

BLOCKS = [f"layers.{i}" for i in range(5)]


class Model(nn.Module):
    """Five blocks between an embedding and an output, of one number each."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 1, bias=False)
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in BLOCKS)
        self.norm = nn.RMSNorm(1)
        self.output = self.embedding if tied else nn.Linear(1, 1, bias=False)


def names(model: nn.Module, number: int) -> list[list[str]]:
    return [
        [name.removesuffix(".weight").removeprefix("layers.") for name in fragment]
        for fragment in fragments_of(model, BLOCKS, number)
    ]


def test_blocks_are_divided_in_order() -> None:
    assert names(Model(), 1) == [["embedding", "0", "1", "2", "3", "4", "norm", "output"]]
    assert names(Model(), 2) == [["embedding", "0", "1", "2"], ["3", "4", "norm", "output"]]
    assert names(Model(), 5) == [["embedding", "0"], ["1"], ["2"], ["3"], ["4", "norm", "output"]]


def test_a_tied_weight_is_in_one_fragment() -> None:
    assert names(Model(tied=True), 2) == [["embedding", "0", "1", "2"], ["3", "4", "norm"]]


def test_frozen_parameters_are_in_none() -> None:
    model = Model()
    for module in (model.embedding, *model.layers[:3]):
        module.requires_grad_(False)
    assert names(model, 2) == [["3"], ["4", "norm", "output"]]
    with pytest.raises(UserError, match="num_fragments = 3: a rank has 2 blocks with trained .* at most 2"):
        fragments_of(model, BLOCKS, 3)


def test_each_parameter_is_saved_with_its_original_and_momentum() -> None:
    model = Model()
    outer = Outer(model, BLOCKS, FaultTolerance(num_fragments=2))
    outer.begin()
    chunks = outer.chunks()
    assert len(chunks) == 2 * len(list(model.parameters()))
    for name, p in model.named_parameters():
        assert torch.equal(chunks[f"outer.{name}.original"].local, p)
        assert not chunks[f"outer.{name}.momentum_buffer"].local.any()
    with torch.no_grad():
        model.norm.weight.fill_(7)
    assert chunks["outer.norm.weight.original"].local == 1, "a copy, not the live parameter"
    without = Outer(model, BLOCKS, FaultTolerance(outer_momentum=0.0)).chunks()
    assert not any(name.endswith("momentum_buffer") for name in without)


def test_the_first_step_with_momentum_of_zeros_is_that_without_any() -> None:
    """torch takes the first gradient for the momentum; the state is allocated here before that."""
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    table = FaultTolerance(num_fragments=1)
    (mine,) = Outer(model, BLOCKS, table).optimizers
    theirs = torch.optim.SGD(plain.parameters(), lr=table.outer_lr, momentum=table.outer_momentum, nesterov=True)
    for _ in range(3):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        mine.step()
        theirs.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
