"""Quantised layers in a training loop of one's own: workspaces, delayed scaling, autocast."""

import contextlib
import copy
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_graph.capture import minimal_fx_tracer, run_traced
from torchtitan_graph.capture.step import SideOutputs, trace_train_step
from torchtitan_graph.errors import UserError
from torchtitan_graph.quantize import GroupedLinear, LayerNormLinear, Linear, Recipe, refresh
from torchtitan_graph.quantize.products import DELAYED, MX, ROWWISE, ROWWISE_WIDE, TENSORWISE

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
EXPERTS = nn.Parameter(torch.ones(2, 32, 32))


def net(scaling: str = TENSORWISE) -> nn.Sequential:
    torch.manual_seed(0)
    recipe = Recipe(scaling)
    return nn.Sequential(Linear(nn.Linear(32, 32), recipe), nn.ReLU(), Linear(nn.Linear(32, 32, bias=False), recipe))


def losses(model: nn.Module, steps: int = 3, refreshes: bool = True) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        if refreshes:
            refresh(model)
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_weights_that_are_quantised_once_a_step_give_the_same_bits() -> None:
    cached, each_call = net(), net()
    assert losses(cached) == losses(each_call, refreshes=False)
    assert cached[0].weight_q is not None and each_call[0].weight_q is None
    assert losses(cached, refreshes=False) != losses(copy.deepcopy(each_call), refreshes=False)  # they are old


def test_the_loop_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tune" / "float8.md").read_text()
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    assert names["model"][0].weight_q is not None


def test_a_traced_step_reads_what_refresh_writes() -> None:
    model = net()
    refresh(model)
    traced = minimal_fx_tracer(lambda x: model(x), module=model)(X)
    with torch.no_grad():
        model[0].weight.mul_(2)
    refresh(model)
    assert torch.equal(run_traced(traced, module=model)(X), net_with(model)(X))


def net_with(model: nn.Sequential) -> nn.Sequential:
    new = net()
    new.load_state_dict(model.state_dict())
    return new


def test_a_workspace_is_filled_when_it_is_added() -> None:
    layer, other = net()[0], net()[0]
    layer.add_workspace(layer.weight)
    assert torch.equal(layer(X), other(X))
    experts = GroupedLinear(nn.Parameter(torch.randn(2, 32, 32)), Recipe())
    before = experts(X, torch.tensor([8, 16]))
    experts.add_workspace(experts.weight)
    assert torch.equal(experts(X, torch.tensor([8, 16])), before)


def test_delayed_scaling_keeps_what_a_backward_pass_told() -> None:
    model = net(DELAYED)
    refresh(model)
    model(X).sum().backward()
    model.zero_grad()
    refresh(model)
    assert model[0].amax_history[0].tolist() == [
        X.abs().max().item(),
        pytest.approx(model[0].amax_history[0, 1].item()),
    ]
    assert model[0].amax_history[0].all() and not model[0].amax_history[1:].any() and model[0].amax.grad is None


def test_delayed_scaling_of_a_layer_that_is_called_twice_is_refused() -> None:
    layer = net(DELAYED)[0]
    model = nn.ModuleDict({"inner": layer})
    (layer(X).sum() + layer(3 * X).sum()).backward()
    with pytest.raises(UserError, match="the layer inner was called 2 times before its largest magnitudes were read"):
        refresh(model)
    layer.amax.grad = None
    for _ in range(2):
        layer(X).sum().backward()
        refresh(model)
    assert layer.amax_history[0].equal(layer.amax_history[1])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net(DELAYED)[0]

    def forward(self, x: Tensor, positions: Tensor, masks: None, side_outputs: bool) -> tuple[Tensor, SideOutputs]:
        return self.inner(self.inner(x)), SideOutputs()


@dataclasses.dataclass
class Batch:
    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor


torch.export.register_dataclass(Batch)


def test_a_training_step_that_calls_it_twice_is_refused_when_it_is_traced() -> None:
    """So by a dry run too."""
    with pytest.raises(UserError, match="the layer inner is called several times in a forward pass"):
        trace_train_step(
            Twice(), lambda y, _, n, *more: y.sum() / n, Batch(X, X, X), None, torch.ones(()), device="cpu"
        )


def test_what_refresh_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="refresh: the model has no layer of torchtitan_graph.quantize"):
        refresh(nn.Linear(2, 2))
    monkeypatch.setattr("torchtitan_graph.quantize.state.DTensor", (DTensor, nn.Parameter))
    with pytest.raises(UserError, match="the weight of 0 is a DTensor, .*: leave refresh out"):
        refresh(net())


@pytest.mark.parametrize("scaling", [TENSORWISE, DELAYED, ROWWISE, ROWWISE_WIDE, MX])
def test_autocast_is_honoured_as_by_other_layers(scaling: str) -> None:
    """What goes in and out is bf16, parameters' gradients are fp32, and nothing emulated is multiplied in bf16."""
    model = net(scaling)
    plain, x = copy.deepcopy(model), X.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        gradients = torch.autograd.grad(y.float().sum(), [*model.parameters(), x])
    assert y.dtype == torch.bfloat16 and {g.dtype for g in gradients} == {torch.float32}

    of_bf16 = X.bfloat16().requires_grad_()
    hidden = plain[0].forward(of_bf16)
    expected = plain[2](hidden.bfloat16().relu())
    assert torch.equal(y, expected)
    others = torch.autograd.grad(expected.float().sum(), [*plain.parameters(), of_bf16])
    for mine, other in zip(gradients, others, strict=True):
        assert torch.equal(mine, other.float())


@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE, MX])
def test_groups_are_not_multiplied_in_bf16_under_autocast(scaling: str) -> None:
    layer, ends = GroupedLinear(EXPERTS, Recipe(scaling)), torch.tensor([5, 16])
    dy = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for context in (torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
        with context:
            y = layer(X.bfloat16(), ends)
            found.append([y, *torch.autograd.grad(y, (layer.weight,), dy)])
    assert all(map(torch.equal, *found))


def test_a_norm_before_layers_is_the_layers_apart_under_autocast() -> None:
    torch.manual_seed(0)
    norm, apart = nn.RMSNorm(32), net()[0]
    fused = LayerNormLinear(norm, {"wq": nn.Linear(32, 32)}, Recipe())
    fused.layers["wq"].load_state_dict(apart.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(X)[0], apart(norm(X)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Linear(nn.Linear(32, 32)),
            r"missing a required argument: 'recipe'; write Linear\(nn.Linear\(",
        ),
        (lambda: Linear(32, 32), "Linear: old is of class int: must be a Linear"),
        (lambda: LayerNormLinear(3, {"a": nn.Linear(32, 32)}, Recipe()), "norm is of class int: must be a Module"),
        (
            lambda: LayerNormLinear(nn.RMSNorm(32), {"a.b": nn.Linear(32, 32)}, Recipe()),
            "dict of linear layers by name",
        ),
        (
            lambda: GroupedLinear(nn.Parameter(torch.ones(2, 32, 32)), Recipe())(X, [8, 16]),
            "offsets_E is of class list",
        ),
        (
            lambda: GroupedLinear(nn.Parameter(torch.ones(2, 32, 32)), Recipe())(X, torch.tensor([16])),
            r"offsets_E has shape \[1\]: must be \[2\]",
        ),
        (
            lambda: GroupedLinear(nn.Parameter(torch.ones(2, 32, 32)), Recipe())(X, torch.tensor([8.0, 16.0])),
            "offsets_E is of torch.float32: must be torch.int32 or torch.int64",
        ),
        (
            lambda: GroupedLinear(nn.Parameter(torch.ones(2, 32, 64)), Recipe())(X, torch.tensor([8, 16])),
            r"rows of shape \[16, 32\] do not fit a weight of shape \[2, 32, 64\]: must be \(rows, in\)",
        ),
        (lambda: net()(X.long()), "is given torch.int64: must be floating point"),
    ],
)
def test_a_wrong_call_is_told_the_right_one(make: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("ends", [[8, 17], [17, 16], [-1, 16], [16, 8]])
@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE, MX])
def test_ends_of_groups_that_fall_or_pass_the_rows_are_refused(ends: list[int], scaling: str) -> None:
    layer, offsets_E = GroupedLinear(EXPERTS, Recipe(scaling)), torch.tensor(ends)
    with pytest.raises(UserError, match="and there are 16 rows: the ends must rise .*torch.cumsum"):
        layer(X, offsets_E)
    traced = minimal_fx_tracer(lambda x, ends: layer(x, ends), module=layer)(X, torch.tensor([8, 16]))
    with pytest.raises(UserError, match="and there are 16 rows"):
        run_traced(traced, module=layer)(X, offsets_E)


@pytest.mark.parametrize("ends", [[8, 8], [3, 11], [0, 0]])
@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE, MX])
def test_rows_behind_the_last_group_are_zeros_and_have_no_gradient(ends: list[int], scaling: str) -> None:
    """Whatever they hold: they were memory that nobody had written."""
    layer, offsets_E = GroupedLinear(nn.Parameter(EXPERTS.detach().clone()), Recipe(scaling)), torch.tensor(ends)
    traced = run_traced(minimal_fx_tracer(lambda x, ends: layer(x, ends), module=layer)(X, offsets_E), module=layer)
    ones = torch.ones(16, 32)
    ones[ends[-1] :] = 1000
    gradients = []
    for x in (X.clone(), torch.cat([X[: ends[-1]], X[ends[-1] :] * -3])):
        layer.weight.grad, x = None, x.requires_grad_()
        y = layer(x, offsets_E)
        y.backward(ones)
        assert not y[ends[-1] :].any() and not x.grad[ends[-1] :].any()
        assert torch.equal(traced(x, offsets_E), y)
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients) or scaling == TENSORWISE  # whose one scale is of all rows


def test_ends_of_groups_without_rows_are_legal() -> None:
    layer = GroupedLinear(EXPERTS, Recipe())
    assert (
        layer(X, torch.tensor([0, 16])).shape == layer(X, torch.tensor([16, 16], dtype=torch.int32)).shape == (16, 32)
    )
    assert layer(X[:0], torch.tensor([0, 0])).shape == (0, 32)
