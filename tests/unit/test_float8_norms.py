"""A norm and the layers that read its result: the numbers of the layers apart, from one quantisation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_float8_products import RECIPES, numbers
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.quantize import LayerNormLinear, LayerNormMLP, Linear, Recipe
from torchtitan_graph.quantize.products import E4M3, workspace_of

D, F = 32, 64
EVERY = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def built(recipe: Recipe, kind: str, has_workspaces: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Give steps x -> (result, gradients), of the layers together and apart."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(D) if kind == "mlp" else nn.LayerNorm(D)
    mlp, parts = FeedForward(D, F), {"wq": nn.Linear(D, F), "wk": nn.Linear(D, 32, bias=False), "wv": nn.Linear(D, F)}
    one = LayerNormMLP(norm, mlp, recipe) if kind == "mlp" else LayerNormLinear(norm, parts, recipe)
    plain = [mlp.w1, mlp.w2, mlp.w3] if kind == "mlp" else [*parts.values()]
    layers = nn.ModuleList([Linear(each, recipe) for each in plain])
    for each in [*one.modules(), *layers]:
        if isinstance(each, Linear) and each.amax_history is not None:
            each.amax_history[3] = torch.tensor([2.0, 0.5])
        if isinstance(each, Linear) and has_workspaces and not recipe.by_row:
            each.weight_q, each.weight_scale, _ = workspace_of(each.weight.detach(), None, None)

    def apart(x: Tensor) -> tuple[Tensor, ...]:
        h = norm(x)
        if kind == "mlp":
            return (layers[1](mlp.activation(layers[0](h), layers[2](h))),)
        return tuple(layer(h) for layer in layers)

    def step(call: Callable[..., Any], owner: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = call(x)
        y = torch.cat(y, -1) if isinstance(y, tuple) else y
        slots = [buffer for buffer in owner.buffers() if buffer.requires_grad]
        dy = torch.linspace(-1, 1, y.numel()).view_as(y)
        return y.detach(), *torch.autograd.grad(y, [x, *norm.parameters(), *(m.weight for m in plain), *slots], dy)

    return partial(step, one, one), partial(step, apart, layers)


def x_of() -> Tensor:
    return numbers(2, 16, D, dtype=torch.float32).requires_grad_()


FAST = [("current", "linear")]


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        pytest.param(RECIPES[name], kind, id=f"{kind}-{name}", marks=[pytest.mark.slow] * ((name, kind) not in FAST))
        for kind in ("linear", "mlp")
        for name in RECIPES
    ],
)
def test_it_is_its_layers_apart(recipe: Recipe, kind: str) -> None:
    for has_workspaces in (False, True):
        together, separate = built(recipe, kind, has_workspaces)
        x = x_of()
        expected, found = separate(x), together(x)
        assert len(expected) == len(found) and all(map(torch.equal, expected, found))
        num_casts = [_num_casts(make_fx(step)(x)) for step in (together, separate)]
        assert num_casts[0] == num_casts[1] - (2 if kind == "linear" else 1)


def test_what_was_seen_is_the_largest_of_all_that_is_kept() -> None:
    layer = Linear(nn.Linear(D, F), RECIPES["delayed"])
    layer.amax_history[0], layer.amax_history[3] = torch.tensor([1.0, 5.0]), torch.tensor([4.0, 2.0])
    *_, past = layer.state()
    assert past.tolist() == [4.0, 5.0]


def _num_casts(gm: torch.fx.GraphModule) -> int:
    casts = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    rows = gm.graph.find_nodes(op="call_function", target=torch.ops.torchtitan_graph.scaled_rows.default)
    return sum(node.kwargs.get("dtype") == E4M3 for node in casts) + sum(node.args[1] == E4M3 for node in rows)


@pytest.mark.parametrize(
    "recipe", [pytest.param(RECIPES["delayed"], marks=pytest.mark.slow), RECIPES["rowwise"]], ids=["delayed", "rowwise"]
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_every_way_to_run_it_gives_the_same_bits(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = LayerNormLinear(nn.RMSNorm(D), {"w1": nn.Linear(D, F), "w3": nn.Linear(D, F)}, recipe)
    leaves = [*model.parameters(), *(b for b in model.buffers() if b.requires_grad)]
    x, dy = x_of(), numbers(2, 16, F, dtype=torch.float32, seed=1)

    def step(call: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, ...]:
        y = call(x)
        return *y, *torch.autograd.grad(y, [x, *leaves], [dy, dy])

    def again(x: Tensor) -> tuple[Tensor, ...]:
        return checkpoint(model, x, use_reentrant=False)

    torch._dynamo.reset()
    expected = step(model, x)
    ways = {
        "recomputed": step(again, x),
        "traced": make_fx(lambda x: step(model, x))(x)(x),
        "traced and recomputed": make_fx(lambda x: step(again, x))(x)(x),
    }
    if torch.__version__ >= "2.12":  # on 2.11 it has other bits; why is not known
        ways["compiled"] = step(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    for way, found in ways.items():
        assert all(map(torch.equal, expected, found)), way
