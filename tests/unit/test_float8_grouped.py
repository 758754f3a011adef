"""Groups of rows in float8: the same numbers in every way to run them, and those of their definition."""

import pytest
import torch
from float8_plain import quantized
from test_float8_products import RECIPES, _most_off, in_every_way, numbers, step
from torch import Tensor

from torchtitan_graph.models.layers.moe import Experts, MoEConfig
from torchtitan_graph.quantize.grouped import grouped_linear
from torchtitan_graph.quantize.layers import GroupedLinear
from torchtitan_graph.quantize.products import (
    DELAYED,
    E4M3,
    E5M2,
    MX,
    MX_WIDE,
    ROWWISE,
    Recipe,
    by_rows,
    meant,
    workspace_of,
)
from torchtitan_graph.quantize.state import Float8, convert

S, D, F, ENDS = 40, 24, 12, (7, 7, 30, 40)  # the second group has no row
OFFSETS = torch.tensor(ENDS, dtype=torch.int32)
GROUPS = [slice(begin, end) for begin, end in zip((0, *ENDS[:-1]), ENDS, strict=True)]
EVERY = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
WAYS = {f"{name}-{is_hit}": (RECIPES[name], is_hit) for name in ("current", "delayed") for is_hit in ("hit", "miss")}
WAYS |= {f"{name}-miss": (RECIPES[name], "miss") for name in ("rowwise", "rowwise-wide", "mx", "mx-wide")}


FAST = ("current-hit", "delayed-miss", "mx-miss")


@pytest.mark.parametrize(
    ("recipe", "hit"),
    [pytest.param(*way, id=name, marks=[pytest.mark.slow] * (name not in FAST)) for name, way in WAYS.items()],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_every_way_to_run_it_gives_the_same_bits(recipe: Recipe, hit: str) -> None:
    weight = numbers(len(ENDS), F, D, seed=1).requires_grad_()
    x, dy = numbers(S, D).requires_grad_(), numbers(S, F, seed=2)
    workspace = workspace_of(weight.detach(), None, None)[:2] if hit == "hit" else (None, None)
    is_delayed = recipe.scaling == DELAYED
    past = torch.tensor([3.0, 0.0]) if is_delayed else None
    slots = [torch.tensor([0.0, 0.0, 1.0], requires_grad=True)] if is_delayed else []

    def forward(x: Tensor, weight: Tensor, *slot: Tensor) -> Tensor:
        return grouped_linear(x, weight, OFFSETS, recipe, *workspace, *(slot or (None,)), past)[0]

    expected = in_every_way(forward, dy, x, weight, *slots)
    if is_delayed:
        assert torch.equal(expected[3], torch.stack([x.abs().max(), dy.abs().max(), torch.tensor(1.0)]))
    others = step(forward, dy, x, (weight.detach() * 2).requires_grad_(), *slots)
    assert torch.equal(others[0], expected[0]) == (hit == "hit")  # a workspace is taken as it is


@EVERY
def test_each_group_is_a_linear_layer_but_for_the_rounding_of_its_operands(recipe: Recipe) -> None:
    """Against the same products in fp64: of the numbers that float8 stands for, exactly those; of those that it was
    given, within the largest error that rounding both operands can make."""
    wide = torch.float32
    x, weight = numbers(S, D, dtype=wide), numbers(len(ENDS), F, D, seed=1, dtype=wide)
    dy, leaves = numbers(S, F, seed=2, dtype=wide), [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    slot = torch.tensor([0.0, 0.0, 1.0], requires_grad=True) if recipe.scaling == DELAYED else None
    y, *_ = grouped_linear(*leaves, OFFSETS, recipe, slot=slot, past=None if slot is None else torch.zeros(2))
    y_SF, (dx_SD, dw_EFD) = y.detach(), torch.autograd.grad(y, leaves, dy)

    def rounded(a: Tensor, part: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give what a part of `a` stands for, with the whole's scale or its rows', and how far off it may be."""
        if recipe.by_row:
            return meant(*by_rows(part, dtype, recipe)).double()[:, : part.shape[1]], _most_off(part, dtype, recipe)
        q, scale = quantized(torch.cat([a, part]), dtype)  # the part, by the scale of the whole
        off = _most_off(torch.cat([a, part]), dtype, recipe)
        return ((q.double() * scale.double())[len(a) :], off[len(a) :])

    for e, rows in enumerate(GROUPS):
        w, g = weight[e], recipe.gradient
        products = [
            (y_SF[rows], x, x[rows], E4M3, w, w, E4M3),
            (dx_SD[rows], dy, dy[rows], g, w.t(), w.t(), E4M3),
            (dw_EFD[e], dy.t(), dy[rows].t(), g, x.t(), x[rows].t(), E4M3),
        ]
        for i, (found, a_whole, a, a_dtype, b_whole, b, b_dtype) in enumerate(products):
            exact = a.double() @ b.double().t()
            if not len(a) or not a.shape[1]:
                assert not found.any()
                continue
            if i == 2 and recipe.is_wide:
                torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
                continue
            if i == 2 and not recipe.by_row:  # columns: the whole has others
                a_whole, b_whole = (each.reshape(-1, 1).expand(-1, a.shape[1]) for each in (a_whole, b_whole))
            (am, a_off), (bm, b_off) = rounded(a_whole, a, a_dtype), rounded(b_whole, b, b_dtype)
            product = am @ bm.t()
            torch.testing.assert_close(found.double(), product, rtol=0, atol=1e-5 * float(product.abs().max()))
            bound = a_off @ b.double().abs().t() + a.double().abs() @ b_off.t() + a_off @ b_off.t()
            assert ((found.double() - exact).abs() <= bound + 1e-4).all()
            assert not ((found.double() - exact).abs() <= bound / 50 + 1e-4).all()  # the bound is not idle


@EVERY
def test_a_rank_may_have_no_rows(recipe: Recipe) -> None:
    slot = torch.tensor([0.0, 0.0, 1.0], requires_grad=True) if recipe.scaling == DELAYED else None
    x, weight = torch.zeros(0, D).requires_grad_(), numbers(len(ENDS), F, D).requires_grad_()
    y, *_ = grouped_linear(x, weight, OFFSETS * 0, recipe, slot=slot, past=None if slot is None else slot[:2])
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == (0, F) and dx.shape == (0, D) and not dw.any() and dw.shape == weight.shape


def test_a_workspace_has_a_scale_for_each_expert() -> None:
    weight = numbers(3, F, D) * torch.tensor([1.0, 8.0, 64.0])[:, None, None]
    q, scale, is_made = workspace_of(weight, None, None)
    assert is_made and scale.shape == (3,)
    for e in range(3):
        expected, one = quantized(weight[e], E4M3)
        assert torch.equal(q[e].float(), expected.float()) and scale[e] == one
    assert workspace_of(weight, q, scale)[0] is q
    for bad_q, bad_scale in [(q[:-1], scale), (q.to(E5M2), scale), (q, scale[:1]), (q, scale[0]), (q, scale.double())]:
        assert workspace_of(weight, bad_q, bad_scale)[2]


def test_experts_multiply_by_the_functions_and_keep_their_parameters_and_biases() -> None:
    model = torch.nn.ModuleDict({"experts": Experts(D, MoEConfig(4, 2, F, biased=True))})
    for p in model.parameters():
        torch.nn.init.normal_(p)
    x, load, before = numbers(S, D, dtype=torch.float32), torch.tensor([7, 0, 23, 10]), dict(model.named_parameters())
    plain = model["experts"](x, load)
    convert(model, Float8({"experts": Recipe()}))
    assert dict(model.named_parameters()) == before
    experts = model["experts"]

    def product(x: Tensor, name: str) -> Tensor:
        bias = before[f"experts.b{name[-1]}"][torch.repeat_interleave(torch.arange(4), load)]
        return GroupedLinear(before[f"experts.{name}"], Recipe())(x, OFFSETS) + bias

    found = experts(x, load)
    assert torch.equal(found, product(experts.activation(product(x, "w1"), product(x, "w3")), "w2"))
    assert not torch.equal(found, plain) and (found - plain).norm() < 0.1 * plain.norm()


def in_tiles(data: Tensor, begin: int, rows: int, blocks: int) -> Tensor:
    """Read scales (rows, blocks) from a kernel's bytes: tiles of 128 x 4, in which row r, block c are at 16 * (r % 32)
    + 4 * (r // 32) + c; https://docs.nvidia.com/cuda/cublas, "1D Block Scaling Factors Layout"."""
    tiles = -(-blocks // 4)
    at = [
        [begin + 512 * (r // 128 * tiles + c // 4) + r % 32 * 16 + r % 128 // 32 * 4 + c % 4 for c in range(blocks)]
        for r in range(rows)
    ]
    return 2.0 ** (data.flatten()[torch.tensor(at, dtype=torch.long).view(rows, blocks)].double() - 127)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kernel_of_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    """A GPU's product of groups in MXFP8, by its definition, in fp64. It leaves a group without rows unwritten."""
    assert (
        scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu and scale_a.is_contiguous() and scale_b.is_contiguous()
    )
    assert scale_a.dim() == 2 and scale_a.shape[0] >= a.shape[0] and not a.shape[-1] % 32
    ends, blocks = offs.tolist(), a.shape[-1] // 32
    of_a, of_b, parts = scale_a.view(torch.uint8), scale_b.view(torch.uint8), [*zip([0, *ends], ends, strict=False)]
    if b.dim() == 3:
        width = b.shape[2]
        out, begin, columns = torch.full((a.shape[0], width), torch.nan).double(), 0, up(blocks, 4)
        assert scale_b.shape == (len(b), columns * up(width, 128))
        for g, (i, j) in enumerate(parts):
            x = a[i:j].double() * in_tiles(of_a, begin, j - i, blocks).repeat_interleave(32, 1)
            w = b[g].t().double() * in_tiles(of_b[g], 0, width, blocks).repeat_interleave(32, 1)
            out[i:j], begin = x @ w.t(), begin + columns * up(j - i, 128)
        return out
    assert not any(end % 32 for end in ends), "a group begins within a block"
    out, begins = torch.full((len(ends), a.shape[0], b.shape[1]), torch.nan).double(), [0, 0]
    for g, (i, j) in enumerate(parts):
        blocks = (j - i) // 32
        numbers = [
            each[:, i:j].double() * in_tiles(data, begin, len(each), blocks).repeat_interleave(32, 1)
            for each, data, begin in zip((a, b.t()), (of_a, of_b), begins, strict=True)
        ]
        if blocks:
            out[g] = numbers[0] @ numbers[1].t()
        begins = [begin + up(len(x), 128) * up(blocks, 4) for begin, x in zip(begins, (a, b.t()), strict=True)]
    return out


def kernel(a, b, scale_a, scaling, swizzle_a, scale_b, _, swizzle_b, offs, bias, out_dtype, *rest):  # type: ignore[no-untyped-def]
    """A GPU's product of groups, by its definition, in fp64; it refuses what the GPU's would."""
    assert a.stride(-1) == 1 and a.stride(-2) % 16 == 0 and b.stride(-2) == 1 and b.stride(-1) % 16 == 0
    assert not any(size % 16 for size in (b.shape[1:] if b.dim() == 3 else (*a.shape, *b.shape)))
    assert a.dtype == b.dtype == E4M3 and offs.dtype == torch.int32 and offs[-1] <= a.shape[b.dim() - 3]
    if scaling == [3]:  # F.ScalingType.BlockWise1x32
        assert swizzle_a == swizzle_b == [1]
        return kernel_of_blocks(a, b, *scale_a, *scale_b, offs).to(out_dtype)
    (a_scale,), (b_scale,), parts = scale_a, scale_b, [slice(i, j) for i, j in zip([0, *offs], offs, strict=False)]
    if b.dim() == 3:
        a, b = a.double() * a_scale[:, None], b.double() * b_scale[:, None]
        return torch.cat([a[part] @ b[g] for g, part in enumerate(parts)]).to(out_dtype)
    assert not any(end % 16 for end in offs), "a group begins where the kernel can't read"
    a_scale, b_scale = a_scale.view(len(offs), -1, 1).double(), b_scale.view(len(offs), 1, -1).double()
    a, b = a.double(), b.double()
    return torch.stack([(a[:, p] * a_scale[g]) @ (b[p] * b_scale[g]) for g, p in enumerate(parts)]).to(out_dtype)


FEW = (40, (7, 7, 30, 40))  # rows, and where the groups end


@pytest.mark.parametrize(
    ("scaling", "width", "out", "rows"),
    [
        (ROWWISE, 16, F, FEW),
        (ROWWISE, 24, F, FEW),
        (MX, 24, F, FEW),
        (MX, 160, 200, (300, (131, 131, 131, 300))),
        (MX, 64, 128, (128, (0, 0, 128, 128))),
        (MX_WIDE, 48, F, FEW),
    ],
)
def test_a_gpus_products_get_what_emulation_multiplies(
    scaling: str, width: int, out: int, rows: tuple[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm_v2", kernel)
    wide, (num_rows, ends) = torch.float32, rows
    x, weight = numbers(num_rows, width, dtype=wide), numbers(len(ends), out, width, seed=1, dtype=wide)
    x *= torch.logspace(-6, 6, num_rows)[:, None]  # rows' scales differ
    dy = numbers(num_rows, out, seed=2, dtype=wide)
    found, offsets_E = [], torch.tensor(ends)  # int64, which a kernel does not take
    for recipe in (Recipe(scaling, E4M3), Recipe(scaling, E4M3, is_traced_for_gpu=True)):
        layer = GroupedLinear(torch.nn.Parameter(weight.clone()), recipe)
        leaves = [x.clone().requires_grad_(), layer.weight]
        y = layer(leaves[0], offsets_E)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    for emulated, of_kernel in zip(*found, strict=True):
        off, size = (of_kernel - emulated).abs(), emulated.abs()
        assert (off <= 2**-8 * size + 1e-5 * size.amax(-1, keepdim=True)).all()
