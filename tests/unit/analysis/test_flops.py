"""The arithmetic of a traced step, by the convention that `analysis/flops.py` states."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_graph.analysis.flops import count_flops
from torchtitan_graph.capture.step import trace_train_step
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models import deepseek_v3, llama3
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.spec import family_names, load_family, tiny_config

CONFIG = llama3.Config(32, 2, 4, 2, 48, vocab_size=64, rope_scaling=None)
B, L = 2, 16

BLOCKS = ("layers.0", "layers.1")


def make_batch(documents_BL: torch.Tensor) -> Batch:
    tokens_BL = torch.zeros(B, L, dtype=torch.int64)
    return Batch(tokens_BL, tokens_BL, torch.arange(L).expand(B, L).contiguous(), documents_BL)


def traced(attn: str = "sdpa") -> torch.fx.GraphModule:
    with torch.device("meta"):
        model = llama3.Model(CONFIG, attn)
    return trace(model)


def trace(model: Decoder) -> torch.fx.GraphModule:
    batch = make_batch(torch.zeros(B, L, dtype=torch.int64))
    num_tokens = torch.tensor(B * L)
    masks = model.masks(batch.documents_BL, batch.positions_BL)
    return trace_train_step(model, cross_entropy, batch, masks, num_tokens, device="cpu").gm


def by_hand() -> tuple[int, int]:
    c, tokens = CONFIG, B * L
    per_layer = 2 * c.dim * c.num_heads * c.head_dim + 2 * c.dim * c.num_kv_heads * c.head_dim + 3 * c.dim * c.ffn_dim
    forward = 2 * tokens * (c.num_layers * per_layer + c.dim * c.vocab_size)
    attention = 2 * 2 * B * c.num_heads * L * L * c.head_dim * c.num_layers  # scores and values
    return 3 * forward, 3 * attention  # backward: twice the forward's


@pytest.mark.parametrize("attn", ["sdpa", "flex", "varlen"])
def test_counts_six_operations_per_weight_and_token_and_twelve_per_attended_pair(attn: str) -> None:
    flops = count_flops(traced(attn), BLOCKS)
    assert (flops.matmul, sum(flops.attention.values())) == by_hand()
    assert set(flops.attention) == {"layers.0", "layers.1"}


@pytest.mark.parametrize("attn", ["sdpa", *(pytest.param(x, marks=pytest.mark.slow) for x in ("flex", "varlen"))])
def test_values_count_as_wide_as_they_are_not_as_the_keys(attn: str) -> None:
    config = tiny_config(deepseek_v3.FLAVORS["debugmodel"], vocab_size=64)
    with torch.device("meta"):
        model = deepseek_v3.Model(config, attn)
    flops = count_flops(trace(model), model.blocks)
    forward = 2 * B * config.num_heads * L * L * (config.nope_dim + config.rope_dim + config.v_dim)
    assert flops.attention == {f"layers.{i}": 3 * forward for i in range(config.num_layers)}


def test_matrix_products_agree_with_torchs_own_counter() -> None:
    model = llama3.Model(CONFIG)
    batch = make_batch(torch.zeros(B, L, dtype=torch.int64))
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(batch.tokens_BL, batch.positions_BL), batch.labels_BL, torch.tensor(B * L)).backward()
    matmuls = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm")
    )
    assert count_flops(traced(), BLOCKS).matmul == matmuls


F = torch.nn.functional
OFFSETS = torch.tensor([3, 8], dtype=torch.int32)
PRODUCTS = {
    "mm": (torch.mm, (3, 4), (4, 5)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5)),
    "addmm": (torch.addmm, (5,), (3, 4), (4, 5)),
    "baddbmm": (torch.baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=2), (2, 4, 9), (6, 4, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (2, 4, 9, 11), (6, 4, 3, 2)),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w), (2, 4, 9), (4, 6, 3)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_as_torch_counts_them(name: str) -> None:
    """Forward, and the gradients of all arguments."""
    product, *shapes = PRODUCTS[name]

    def step(*inputs: torch.Tensor) -> Any:
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        return torch.autograd.grad(product(*inputs).square().sum(), inputs)

    inputs = [torch.ones(shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        step(*inputs)
    assert count_flops(minimal_fx_tracer(step)(*inputs).gm, ()).matmul == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("product", "shapes", "flops"),
    [
        (torch.mv, [(3, 4), (4,)], 2 * 3 * 4),
        (torch.dot, [(5,), (5,)], 2 * 5),
        (torch.addmv, [(3,), (3, 4), (4,)], 2 * 3 * 4),
        (torch.addbmm, [(3, 5), (2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
    ],
    ids=["mv", "dot", "addmv", "addbmm"],
)
def test_products_without_a_formula_of_torch_count_by_hand(product: Any, shapes: list, flops: int) -> None:
    inputs = [torch.ones(shape) for shape in shapes]
    assert count_flops(minimal_fx_tracer(product)(*inputs).gm, ()).matmul == flops


def test_groups_count_what_they_multiply() -> None:
    """By hand: torch's counter knows no grouped products, and takes a convolution's gradient for one without groups."""

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(product(x, w).float().square().sum(), (x, w))

    def counted(*shapes: tuple[int, ...]) -> int:
        inputs = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
        return count_flops(minimal_fx_tracer(step)(*inputs).gm, ()).matmul

    product: Any = lambda x, w: F.conv1d(x, w, padding=2, groups=4)  # noqa: E731
    assert counted((2, 4, 9), (4, 1, 3)) == 3 * 2 * (2 * 4 * 11) * 3
    product = lambda x, w: torch._grouped_mm(x, w, offs=OFFSETS)  # noqa: E731
    assert counted((8, 16), (2, 16, 24)) == 3 * 2 * (8 * 16) * 24


OWN = torch.ops.torchtitan_graph
S, E, D, F_ = 32, 2, 64, 24  # rows, groups, widths
ROWS, OTHER, WEIGHTS = ((S, D), torch.bfloat16), ((S, F_), torch.bfloat16), ((E, F_, D), torch.bfloat16)
ROWS_8, OTHER_8, WEIGHTS_8 = (((*shape,), torch.float8_e4m3fn) for shape, _ in (ROWS, OTHER, WEIGHTS))
OF_ROWS, OF_WIDTH, OF_OTHER = ((S,), torch.float32), ((E, D), torch.float32), ((E, F_), torch.float32)


def columns(width: int, multiple: int) -> Any:
    """Columns of the rows in places, each group at a multiple."""
    return (width, S + multiple * E), torch.float8_e4m3fn


def of_blocks(*shape: int) -> Any:
    return (*shape[:-1], shape[-1] // 32), torch.float32


@pytest.mark.parametrize(
    ("product", "inputs"),
    [
        (lambda x, w: OWN.grouped_mm(x, w, OFFSETS, True), (ROWS, WEIGHTS)),
        (lambda x, y: OWN.grouped_outer(x, y, OFFSETS), (ROWS, OTHER)),
        (lambda x, a, w, b: OWN.scaled_grouped_mm(x, a, w, b, OFFSETS), (ROWS_8, OF_ROWS, WEIGHTS_8, OF_OTHER)),
        (
            lambda x, a, y, b: OWN.scaled_grouped_outer(x, a, y, b, OFFSETS, True),
            (columns(D, 16), OF_WIDTH, columns(F_, 16), OF_OTHER),
        ),
        (
            lambda x, a, w, b: OWN.blocked_grouped_mm(x, a, w, b, OFFSETS),
            (ROWS_8, of_blocks(S, D), WEIGHTS_8, of_blocks(E, F_, D)),
        ),
        (
            lambda x, a, y, b: OWN.blocked_grouped_outer(x, a, y, b, OFFSETS, True),
            (columns(D, 32), of_blocks(D, S + 64), columns(F_, 32), of_blocks(F_, S + 64)),
        ),
    ],
    ids=["mm", "outer", "scaled mm", "scaled outer", "blocked mm", "blocked outer"],
)
def test_products_of_experts_count_each_row_once(product: Any, inputs: Any) -> None:
    given = [torch.zeros(shape, dtype=dtype) for shape, dtype in inputs]
    assert count_flops(minimal_fx_tracer(product)(*given).gm, ()).matmul == 2 * S * D * F_


def test_recomputed_operators_would_count_twice_so_the_count_is_taken_before() -> None:
    gm = traced()
    before = count_flops(gm, BLOCKS)
    product = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default)
    with gm.graph.inserting_after(product):
        gm.graph.node_copy(product)
    assert count_flops(gm, BLOCKS).matmul > before.matmul


def test_the_mask_leaves_the_triangle_of_each_document() -> None:
    half = L // 2
    with torch.device("meta"):
        model = llama3.Model(CONFIG)
    one, halves = torch.arange(L).expand(B, L), torch.arange(half).repeat(2).expand(B, L)
    documents = torch.zeros(B, L, dtype=torch.int64)
    assert set(model.visible_pairs(documents, one).values()) == {(L * (L + 1) / 2) / L**2}
    assert set(model.visible_pairs(documents, halves).values()) == {2 * (half * (half + 1) / 2) / L**2}


@pytest.mark.parametrize("counted", ["by the family", "pair by pair"])
@pytest.mark.parametrize("family", family_names())
def test_the_visible_pairs_are_those_of_the_masks(family: str, counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = load_family(family).Model(tiny_config(load_family(family).FLAVORS["debugmodel"]))
    if counted == "pair by pair":
        monkeypatch.setattr(model, "num_visible", lambda positions_BL: {})
    positions = torch.tensor([[*range(11), *range(5)]])
    documents = (positions == 0).long().cumsum(1)
    expected = {rule: mask.double().mean().item() for rule, mask in model.masks(documents, positions).items()}
    found = model.visible_pairs(documents, positions)
    assert found == {name: pytest.approx(expected[layer.mask]) for name, layer in model.blocks.items()}


def test_operations_scale_attention_alone_by_what_the_mask_leaves() -> None:
    flops = dataclasses.replace(count_flops(traced(), BLOCKS), matmul=100, attention={"layers.0": 10, "layers.1": 20})
    assert flops.of({"layers.0": 0.5, "layers.1": 0.25}) == 110.0
    assert flops.of({"layers.0": 0.5, "layers.1": 0.25}, 0.5) == 50.0 + 10 / 4, "rows half as long"
