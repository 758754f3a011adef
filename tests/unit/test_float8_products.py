"""A linear layer in float8: the same numbers in every way to run it, and those of its definition."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.quantize.products import (
    DELAYED,
    E4M3,
    E5M2,
    ROWWISE,
    ROWWISE_WIDE,
    Recipe,
    largest,
    linear,
    product,
    quantize,
    quantized,
    scale_for,
    workspace_of,
)

T, D, F = 32, 64, 48
RECIPES = {
    "current": Recipe(),
    "current-e4m3": Recipe(gradient=E4M3),
    "delayed": Recipe(DELAYED),
    "rowwise": Recipe(ROWWISE, E4M3),
    "rowwise-e5m2": Recipe(ROWWISE),
    "rowwise-wide": Recipe(ROWWISE_WIDE, E4M3),
}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("a", "b"), [*itertools.product((E4M3, E5M2), repeat=2)])
@pytest.mark.parametrize("by_row", [False, True])
def test_the_product_is_bitwise_that_of_the_kernel(a: torch.dtype, b: torch.dtype, by_row: bool) -> None:
    (x, sx), (w, sw) = quantized(numbers(T, D), a, by_row), quantized(numbers(F, D, seed=1), b, by_row)
    found = product(x, sx, w, sw, torch.bfloat16, Recipe())
    try:
        kernel = torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:  # 2.11's for a CPU has one scale alone
        assert by_row and "only supports per-tensor scaling for CPU" in str(error)
        return
    assert torch.equal(found, kernel)
    assert not torch.equal(product(x, 2 * sx, w, sw, torch.bfloat16, Recipe()), kernel)


def test_numbers_are_rounded_to_the_format_and_saturate() -> None:
    x = torch.tensor([448.0, -500.0, 1.0, 1.06, 2.0**-9, 0.0])
    assert quantize(x, torch.tensor(1.0), E4M3).float().tolist() == [448.0, -448.0, 1.0, 1.0, 2.0**-9, 0.0]
    q, scale = quantized(torch.zeros(2, 2), E4M3)
    assert scale > 0 and q.float().eq(0).all()
    assert quantized(torch.tensor([[1.0, 3.0], [0.5, 8.0]]), E4M3, True)[1].mul(448).flatten().tolist() == [3.0, 8.0]
    assert largest(torch.tensor([[float("nan")]])).isnan()  # and so the loss: a run stops


def step(call: Callable[..., Tensor], dy: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    y = call(*args)
    return y.detach(), *torch.autograd.grad(y, args, dy)


def in_every_way(forward: Callable[..., Tensor], dy: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    """Give a function's result and its gradients, which are the same in every way to run it."""

    def again(*args: Tensor) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False)

    torch._dynamo.reset()
    expected = step(forward, dy, *args)
    ways = {
        "recomputed": step(again, dy, *args),
        "traced": make_fx(lambda *a: step(forward, dy, *a))(*args)(*args),
        "traced and recomputed": make_fx(lambda *a: step(again, dy, *a))(*args)(*args),
        "compiled": step(torch.compile(forward, backend="aot_eager", fullgraph=True), dy, *args),
    }
    for way, found in ways.items():
        assert all(map(torch.equal, expected, found)), way
    return expected


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("is_hit", [False, True], ids=["miss", "hit"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_every_way_to_run_it_gives_the_same_bits(recipe: Recipe, is_hit: bool) -> None:
    weight = numbers(F, D, seed=1)
    x, weight = numbers(2, T // 2, D).requires_grad_(), weight.requires_grad_()
    workspace = quantized(weight.detach(), E4M3) if is_hit else (None, None)
    past = torch.tensor([3.0, 0.0]) if recipe.scaling == DELAYED else None
    slot = torch.zeros(2, requires_grad=True) if recipe.scaling == DELAYED else None
    dy = numbers(2, T // 2, F, seed=2)

    def forward(x: Tensor, weight: Tensor, *slot: Tensor) -> Tensor:
        return linear(x, weight, recipe, *workspace, *(slot or (None,)), past)[0]

    args = (x, weight) if slot is None else (x, weight, slot)
    expected = in_every_way(forward, dy, *args)
    if slot is not None:
        assert torch.equal(expected[3], torch.stack([x.abs().max(), dy.abs().max()]).float())
    others = step(forward, dy, x, (weight.detach() * 2).requires_grad_(), *args[2:])
    assert torch.equal(others[0], expected[0]) == (is_hit and not recipe.by_row)  # a workspace is taken as it is


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_is_infinite_is_not_saturated(recipe: Recipe) -> None:
    """Else a loss would stay finite, and delayed scaling keep an infinite magnitude."""
    x = numbers(T, D)
    x[0, 0] = float("inf")
    past = torch.tensor([3.0, 3.0]) if recipe.scaling == DELAYED else None
    assert not linear(x, numbers(F, D, seed=1), recipe, past=past)[0].isfinite().all()


def test_a_workspace_is_taken_made_or_made_anew() -> None:
    weight = numbers(F, D)
    q, scale, is_made = workspace_of(weight, None, None)
    assert is_made and torch.equal(q.float(), quantized(weight, E4M3)[0].float())
    assert workspace_of(weight, q, scale)[0] is q and not workspace_of(weight, q, scale)[2]
    for bad_q, bad_scale in [(q[:-1], scale), (q.to(E5M2), scale), (q, scale.expand(F, 1)), (q, scale.double())]:
        found, _, is_made = workspace_of(weight, bad_q, bad_scale)
        assert is_made and torch.equal(found.float(), q.float())
    y, made, made_scale = linear(numbers(T, D), weight, Recipe())
    assert made is not None and made_scale is not None and torch.equal(made.float(), q.float())
    assert not made.requires_grad and y.shape == (T, F)
    assert linear(numbers(T, D), weight, Recipe(), made, made_scale)[1:] == (None, None)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_is_a_linear_layer_but_for_the_rounding_of_its_operands(recipe: Recipe) -> None:
    """Against the same products in fp64: of the numbers that float8 stands for, exactly those; of those that it was
    given, within the largest error that rounding both operands can make."""
    x, weight = (numbers(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate([(T, D), (F, D)]))
    dy, past = numbers(T, F, seed=2, dtype=torch.float32), torch.zeros(2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    is_delayed = recipe.scaling == DELAYED
    slot = torch.zeros(2, requires_grad=True) if is_delayed else None
    y, *_ = linear(*leaves, recipe, slot=slot, past=past if is_delayed else None)
    found = y.detach(), *torch.autograd.grad(y, leaves, dy)

    def stands_for(a: Tensor, dtype: torch.dtype) -> Tensor:
        q, scale = quantized(a, dtype, recipe.by_row)
        return q.double() * scale.double()

    products = [
        (x, E4M3, weight, E4M3),
        (dy, recipe.gradient, weight.t(), E4M3),
        (dy.t(), recipe.gradient, x.t(), E4M3),
    ]
    for i, (y, (a, a_dtype, b, b_dtype)) in enumerate(zip(found, products, strict=True)):
        exact = a.double() @ b.double().t()
        if i == 2 and recipe.scaling == ROWWISE_WIDE:
            torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)
            continue
        meant = stands_for(a, a_dtype) @ stands_for(b, b_dtype).t()
        torch.testing.assert_close(y.double(), meant, rtol=0, atol=1e-5 * float(meant.abs().max()))
        # Half a spacing of each operand, relative; below the smallest normal number half that one's, absolute.
        off = [_most_off(each, dtype, recipe.by_row) for each, dtype in ((a, a_dtype), (b, b_dtype))]
        bound = off[0] @ b.double().abs().t() + a.double().abs() @ off[1].t() + off[0] @ off[1].t()
        assert ((y.double() - exact).abs() <= bound + 1e-4).all()
        assert not ((y.double() - exact).abs() <= bound / 30 + 1e-4).all()  # the bound is not idle


def _most_off(x: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
    kind, scale = torch.finfo(dtype), scale_for(largest(x, by_row), dtype).double()
    return torch.maximum(x.double().abs() * kind.eps / 2, scale * kind.smallest_normal * kind.eps / 2)


def test_an_operand_without_gradient_costs_no_product() -> None:
    weight = numbers(F, D).requires_grad_()

    def step(recipe: Recipe, x: Tensor, weight: Tensor) -> Tensor:
        return torch.autograd.grad(linear(x, weight, recipe)[0].float().sum(), weight)[0]

    for recipe in (Recipe(), Recipe(ROWWISE)):
        gm = make_fx(partial(step, recipe))(numbers(T, D), weight)
        assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 2
