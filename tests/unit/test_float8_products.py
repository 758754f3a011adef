"""A linear layer in float8: the same numbers in every way to run it, and those of its definition."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from float8_plain import quantized
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.ops.blocks import scaled_blocks
from torchtitan_graph.quantize.grouped import grouped_linear
from torchtitan_graph.quantize.products import (
    DELAYED,
    E4M3,
    E5M2,
    MX,
    MX_WIDE,
    ROWWISE,
    ROWWISE_WIDE,
    Recipe,
    by_rows,
    largest,
    linear,
    meant,
    product,
    quantize,
    scale_for,
    workspace_of,
)

T, D, F = 32, 64, 48  # MX formats' blocks of 32 end in the middle of F
RECIPES = {
    "current": Recipe(),
    "current-e4m3": Recipe(gradient=E4M3),
    "delayed": Recipe(DELAYED),
    "rowwise": Recipe(ROWWISE, E4M3),
    "rowwise-e5m2": Recipe(ROWWISE),
    "rowwise-wide": Recipe(ROWWISE_WIDE, E4M3),
    "mx": Recipe(MX, E4M3, emulate=True),
    "mx-wide": Recipe(MX_WIDE, E4M3, emulate=True),
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
    assert quantize(torch.tensor([6e4, -1e6]), torch.tensor(1.0), E5M2).float().tolist() == [57344.0, -57344.0]
    q, scale = quantized(torch.zeros(2, 2), E4M3)
    assert scale > 0 and q.float().eq(0).all()
    assert quantized(torch.tensor([[1.0, 3.0], [0.5, 8.0]]), E4M3, True)[1].mul(448).flatten().tolist() == [3.0, 8.0]
    assert quantized(torch.tensor([3e-10]), E4M3)[0].float() == 448  # however small
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


WAYS = {
    f"{name}-{'hit' if is_hit else 'miss'}": (each, is_hit)
    for name, each in RECIPES.items()
    for is_hit in (False, True)
}


FAST = ("current-hit", "delayed-miss", "rowwise-miss")


@pytest.mark.parametrize(
    ("recipe", "is_hit"),
    [
        pytest.param(*way, id=name, marks=[pytest.mark.slow] * (name not in FAST))
        for name, way in WAYS.items()
        if not (way[0].by_row and way[1])  # those have none
    ],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_every_way_to_run_it_gives_the_same_bits(recipe: Recipe, is_hit: bool) -> None:
    weight = numbers(F, D, seed=1)
    x, weight = numbers(2, T // 2, D).requires_grad_(), weight.requires_grad_()
    workspace = quantized(weight.detach(), E4M3) if is_hit else (None, None)
    past = torch.tensor([3.0, 0.0]) if recipe.scaling == DELAYED else None
    slot = torch.tensor([0.0, 0.0, 1.0], requires_grad=True) if recipe.scaling == DELAYED else None
    dy = numbers(2, T // 2, F, seed=2)

    def forward(x: Tensor, weight: Tensor, *slot: Tensor) -> Tensor:
        return linear(x, weight, recipe, *workspace, *(slot or (None,)), past)[0]

    args = (x, weight) if slot is None else (x, weight, slot)
    expected = in_every_way(forward, dy, *args)
    if slot is not None:
        assert torch.equal(expected[3], torch.stack([x.abs().max(), dy.abs().max(), torch.tensor(1.0)]))
    others = step(forward, dy, x, (weight.detach() * 2).requires_grad_(), *args[2:])
    assert torch.equal(others[0], expected[0]) == is_hit  # a workspace is taken as it is


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_is_infinite_is_not_saturated(recipe: Recipe) -> None:
    """Else a loss would stay finite, and delayed scaling keep an infinite magnitude."""
    x = numbers(T, D)
    x[0, 0] = float("inf")
    past = torch.tensor([3.0, 3.0]) if recipe.scaling == DELAYED else None
    assert not linear(x, numbers(F, D, seed=1), recipe, past=past)[0].isfinite().all()


def test_delayed_scaling_is_by_what_was_seen_of_each() -> None:
    """Of experts too: here one, whose rows are all. Activations, then gradients; what is larger saturates."""
    x, weight, dy = numbers(T, D), numbers(F, D, seed=1), numbers(T, F, seed=2)
    past, recipe = torch.tensor([6.0, 1.0]), Recipe(DELAYED)
    (sx, sdy), (w, sw) = (scale_for(past[0], E4M3), scale_for(past[1], E5M2)), quantized(weight, E4M3)
    xq, dyq = quantize(x, sx, E4M3), quantize(dy, sdy, E5M2)
    expected = [
        product(xq, sx, w, sw, torch.bfloat16, recipe),
        product(dyq, sdy, w.t(), sw, torch.bfloat16, recipe),
        product(dyq.t(), sdy, xq.t(), sx, torch.bfloat16, recipe),
    ]
    args, slot = (x.requires_grad_(), weight.requires_grad_()), torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    found = step(lambda x, w: linear(x, w, recipe, slot=slot, past=past)[0], dy, *args)
    assert all(map(torch.equal, found, expected))
    ends = torch.tensor([T], dtype=torch.int32)
    found = step(lambda x, w: grouped_linear(x, w[None], ends, recipe, slot=slot, past=past)[0], dy, *args)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("emulate", [False, True])
def test_a_dry_run_for_a_gpu_has_its_kernel_unless_emulated(emulate: bool) -> None:
    recipe = Recipe(emulate=emulate, is_traced_for_gpu=True)
    gm = make_fx(lambda x, w: linear(x, w, recipe)[0])(numbers(T, D), numbers(F, D))
    assert bool(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)) != emulate


def test_a_workspace_is_taken_made_or_made_anew() -> None:
    weight = numbers(F, D)
    q, scale, is_made = workspace_of(weight, None, None)
    assert is_made and torch.equal(q.float(), quantized(weight, E4M3)[0].float())
    assert workspace_of(weight, q, scale)[0] is q and not workspace_of(weight, q, scale)[2]
    elsewhere = [(q.to("meta"), scale), (q, scale.to("meta"))]
    of_another = [(q[:-1], scale), (q.to(E5M2), scale), (q, scale.expand(F, 1)), (q, scale.double())]
    for bad_q, bad_scale in of_another + elsewhere:
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
    slot = torch.tensor([0.0, 0.0, 1.0], requires_grad=True) if is_delayed else None
    y, *_ = linear(*leaves, recipe, slot=slot, past=past if is_delayed else None)
    found = y.detach(), *torch.autograd.grad(y, leaves, dy)

    def stands_for(a: Tensor, dtype: torch.dtype) -> Tensor:
        return meant(*(by_rows(a, dtype, recipe) if recipe.by_row else quantized(a, dtype))).double()

    products = [
        (x, E4M3, weight, E4M3),
        (dy, recipe.gradient, weight.t(), E4M3),
        (dy.t(), recipe.gradient, x.t(), E4M3),
    ]
    for i, (y, (a, a_dtype, b, b_dtype)) in enumerate(zip(found, products, strict=True)):
        exact = a.double() @ b.double().t()
        if i == 2 and recipe.is_wide:
            torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)
            continue
        rounded = stands_for(a, a_dtype) @ stands_for(b, b_dtype).t()
        torch.testing.assert_close(y.double(), rounded, rtol=0, atol=1e-5 * float(rounded.abs().max()))
        off = [_most_off(each, dtype, recipe) for each, dtype in ((a, a_dtype), (b, b_dtype))]
        bound = off[0] @ b.double().abs().t() + a.double().abs() @ off[1].t() + off[0] @ off[1].t()
        assert ((y.double() - exact).abs() <= bound + 1e-4).all()
        assert not ((y.double() - exact).abs() <= bound / 30 + 1e-4).all()  # the bound is not idle


def _most_off(x: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """Give half a spacing of each number, relative; below the smallest normal number half that one's, absolute; in MX
    formats perhaps more, for what is larger than the format holds."""
    kind, scale = torch.finfo(dtype), scale_for(largest(x, recipe.by_row), dtype).double()
    if recipe.by_block:
        scale = scaled_blocks(x, dtype)[1].double().repeat_interleave(32, 1)[:, : x.shape[1]]
    off = torch.maximum(x.double().abs() * kind.eps / 2, scale * kind.smallest_normal * kind.eps / 2)
    return off.maximum(x.double().abs() - scale * kind.max) if recipe.by_block else off


@pytest.mark.parametrize(("dtype", "largest_power"), [(E4M3, 8), (E5M2, 15)])
def test_blocks_are_scaled_as_the_specification_says(dtype: torch.dtype, largest_power: int) -> None:
    """Number by number, by Python's own floats; each 32 numbers alone, whatever the others are."""
    x = numbers(4, 70, seed=3, dtype=torch.float32) * 10.0 ** torch.arange(-30, 40).remainder(60)[None].sub(25)
    x[0, :32] = 0
    x[1, 32] = 1e-42
    q, scale = scaled_blocks(x, dtype)
    assert q.shape == (4, 96) and scale.shape == (4, 3) and not q[:, 70:].float().any()
    for row, numbers_q, scales in zip(x.tolist(), q.float().tolist(), scale.tolist(), strict=True):
        for i, found in enumerate(scales):
            block = row[32 * i : 32 * i + 32]
            most = max(map(abs, block))
            power = math.frexp(most)[1] - 1 - largest_power if most else -126
            assert found == 2.0 ** max(power, -126)
            limit = torch.finfo(dtype).max
            expected = torch.tensor([min(max(y / found, -limit), limit) for y in block], dtype=torch.float32)
            assert numbers_q[32 * i : 32 * i + len(block)] == expected.to(dtype).float().tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_with_what_is_not_finite_is_lost_and_no_other(bad: float) -> None:
    x = numbers(2, 64)
    x[1, 40] = bad
    lost = meant(*scaled_blocks(x, E4M3)).isnan()
    assert lost[1, 32:].all() and lost.sum() == 32


def test_an_operand_without_gradient_costs_no_product() -> None:
    weight = numbers(F, D).requires_grad_()

    def step(recipe: Recipe, x: Tensor, weight: Tensor) -> Tensor:
        return torch.autograd.grad(linear(x, weight, recipe)[0].float().sum(), weight)[0]

    for recipe in (Recipe(), Recipe(ROWWISE)):
        gm = make_fx(partial(step, recipe))(numbers(T, D), weight)
        assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 2


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_takes_any_shape_that_a_linear_layer_takes(recipe: Recipe) -> None:
    weight, slot = numbers(F, D, seed=1).requires_grad_(), torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    for shape in ((D,), (0, D), (2, 0, D), (2, 3, 4, D)):
        x = numbers(*shape).requires_grad_()
        y, *_ = linear(x, weight, recipe, slot=slot if recipe.scaling == DELAYED else None)
        y.sum().backward()
        assert y.shape == nn.functional.linear(x, weight).shape and x.grad is not None and x.grad.shape == shape
        rows, *_ = linear(x.view(-1, D), weight, recipe)
        assert torch.equal(y.view(-1, F), rows)
