"""Masks against brute force, and attention under them against attention written out."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from reference import Results, largest_gap, loss_of
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers import attention, masks
from torchtitan_graph.models.layers.attention import attend
from torchtitan_graph.models.layers.masks import (
    Rule,
    all_of,
    as_bias,
    build_mask,
    causal,
    chunked,
    same_document,
    sliding,
)
from torchtitan_graph.models.spec import tiny_config

# --- masks ------------------------------------------------------------------------------------------------------------

# Two rows of documents, and where each position is in its own.
LENGTHS = [(5, 11, 8), (24,)]
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])

RULES: dict[str, tuple[Rule, Callable[[int, int, int], bool]]] = {
    "causal": (causal, lambda b, q, k: k <= q),
    "document": (same_document(DOCUMENTS), lambda b, q, k: bool(DOCUMENTS[b, q] == DOCUMENTS[b, k])),
    "sliding": (all_of(causal, sliding(3)), lambda b, q, k: k in (q - 2, q - 1, q)),
    "chunked": (
        all_of(causal, chunked(POSITIONS, 4)),
        lambda b, q, k: k <= q and int(POSITIONS[b, q]) // 4 == int(POSITIONS[b, k]) // 4,
    ),
    "all": (
        all_of(causal, same_document(DOCUMENTS), sliding(6), chunked(POSITIONS, 8)),
        lambda b, q, k: (
            q - 6 < k <= q
            and bool(DOCUMENTS[b, q] == DOCUMENTS[b, k])
            and int(POSITIONS[b, q]) // 8 == int(POSITIONS[b, k]) // 8
        ),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_mask_is_what_the_rule_says_of_every_pair(name: str) -> None:
    rule, by_hand = RULES[name]
    mask = build_mask("sdpa", rule, 2, 24, torch.device("cpu"))
    assert mask.shape == (2, 1, 24, 24) and mask.dtype == torch.bool
    for b, q, k in itertools.product(range(2), range(24), range(24)):
        assert mask[b, 0, q, k].item() is by_hand(b, q, k), (b, q, k)


LONG = torch.repeat_interleave(torch.arange(2), torch.tensor([170, 130])).expand(2, 300)
TO_300 = torch.arange(300).expand(2, 300)


@pytest.mark.parametrize(
    "rule",
    [
        causal,
        all_of(causal, same_document(LONG)),
        all_of(causal, sliding(100)),
        chunked(torch.arange(300).expand(2, 300), 150),
    ],
    ids=["causal", "document", "sliding", "chunked"],
)
def test_a_block_mask_has_the_blocks_in_which_anything_is_seen(rule: Rule) -> None:
    dense, blocks = (build_mask(attn, rule, 2, 300, torch.device("cpu")) for attn in ("sdpa", "flex"))
    padded = torch.nn.functional.pad(dense, (0, 84, 0, 84))  # to three blocks of 128
    seen = padded.unflatten(-1, (3, 128)).unflatten(-3, (3, 128)).any(-1).any(-2)
    assert torch.equal(blocks.to_dense().bool(), seen)


@pytest.mark.parametrize("name", ["document", "sliding"])
def test_a_block_mask_is_torch_s_own_whatever_is_held_at_a_time(name: str, monkeypatch: MonkeyPatch) -> None:
    rule = {"document": all_of(causal, same_document(LONG)), "sliding": all_of(causal, sliding(100))}[name]
    expected = create_block_mask(rule, 2, None, 300, 300, device="cpu")
    for pairs in (1, masks.PAIRS_AT_A_TIME):
        monkeypatch.setattr(masks, "PAIRS_AT_A_TIME", pairs)
        found = build_mask("flex", rule, 2, 300, torch.device("cpu"))
        for x, y in zip(expected.as_tuple()[:-1], found.as_tuple()[:-1], strict=True):  # type: ignore[attr-defined]
            assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
def test_a_mask_of_some_places_has_their_rows(attn: str) -> None:
    rule, places = all_of(causal, same_document(LONG)), torch.tensor([*range(40, 80), *range(200, 299)])
    whole = build_mask("sdpa", rule, 2, 300, torch.device("cpu"))
    found = build_mask(attn, rule, 2, 300, torch.device("cpu"), places)
    if attn == "flex":
        q, kv = torch.arange(139).view(-1, 1), torch.arange(300)
        assert found.shape == (2, 1, 139, 300)
        found = found.mask_mod(torch.arange(2).view(2, 1, 1, 1), torch.tensor(0), q, kv)  # type: ignore[union-attr]
    assert torch.equal(found, whole[:, :, places])  # type: ignore[arg-type]


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
def test_keys_of_a_part_of_the_row_are_refused(attn: str) -> None:
    q, k = torch.zeros(1, 16, 2, 8), torch.zeros(1, 16, 2, 8)
    mask = build_mask(attn, causal, 1, 32, torch.device("cpu"), torch.arange(16))
    with pytest.raises(UserError, match=r"given 16 keys, and a mask of 32: .*self\.seen\(k, v\)"):
        attend(q, k, k, mask)


def test_scores_that_change_by_the_query_s_place_are_refused_on_a_part_of_the_row() -> None:
    q, k = torch.zeros(1, 16, 2, 8), torch.zeros(1, 32, 2, 8)
    mask = build_mask("flex", causal, 1, 32, torch.device("cpu"), torch.arange(16))
    attend(q, k, k, mask, score=lambda score, b, h, q, kv: score + kv)
    with pytest.raises(UserError, match="leave the degree at 1"):
        attend(q, k, k, mask, score=lambda score, b, h, q, kv: score + q - kv)


class Capped:
    def score(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.tanh(score)


def test_a_method_that_does_not_look_at_the_query_s_place_is_none_of_these() -> None:
    q, k = torch.zeros(1, 16, 2, 8), torch.zeros(1, 32, 2, 8)
    attend(q, k, k, build_mask("flex", causal, 1, 32, torch.device("cpu"), torch.arange(16)), score=Capped().score)


# --- attention --------------------------------------------------------------------------------------------------------

B, L, N, K = 2, 140, 4, 2


def written_out(
    q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, seen_B1LL: Tensor, scale: float, sinks_N: Tensor | None
) -> Tensor:
    """Attend head by head, the sink as one more column of the scores."""
    heads = []
    for n in range(q_BLNH.shape[2]):
        kv = n * k_BLKH.shape[2] // q_BLNH.shape[2]
        scores_BLL = scale * q_BLNH[:, :, n] @ k_BLKH[:, :, kv].transpose(1, 2)
        scores_BLL = scores_BLL.masked_fill(~seen_B1LL[:, 0], float("-inf"))
        weights = scores_BLL.exp()
        total = weights.sum(-1, keepdim=True) + (sinks_N[n].exp() if sinks_N is not None else 0.0)
        heads.append(weights / total @ v_BLKH[:, :, kv])
    return torch.stack(heads, dim=2)


def inputs(width: int = 16, v_width: int = 16, sinks: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, L, N, width), "k": (B, L, K, width), "v": (B, L, K, v_width), "sinks": (N,)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    drawn["sinks"] = torch.tensor([-2.0, 0.0, 3.0, 6.0], dtype=torch.float64)  # from hardly any weight to nearly all
    return {name: x.requires_grad_() for name, x in drawn.items() if sinks or name != "sinks"}


def results(function: Callable[..., Tensor], given: dict[str, Tensor], mask: Any, scale: float) -> Results:
    q, k, v, sinks = (given.get(name) for name in ("q", "k", "v", "sinks"))
    keyword = {"sinks_N": sinks, "scale": scale}
    out = function(q, k, v, mask, **keyword)
    found = torch.autograd.grad(loss_of(out), list(given.values()))
    return {"out": out.detach(), **dict(zip(given, found, strict=True))}


WINDOW = all_of(causal, same_document(torch.repeat_interleave(torch.arange(2), 70).expand(B, L)), sliding(50))
CASES: dict[str, tuple[dict[str, Any], Rule, float]] = {
    "plain": ({}, causal, 0.25),
    "sinks": ({"sinks": True}, causal, 0.25),
    "sinks, window of 128": ({"sinks": True}, all_of(causal, sliding(128)), 0.25),
    "sinks, window, documents": ({"sinks": True}, WINDOW, 0.25),
    "values narrower than keys": ({"width": 24, "v_width": 16}, causal, 0.4),
    "values wider than keys": ({"width": 16, "v_width": 24}, causal, 0.4),
    "sinks, values narrower": ({"sinks": True, "width": 24, "v_width": 16}, WINDOW, 0.4),
}


def gap_from_dense(attn: str, case: str, rule: Rule | None = None) -> float:
    widths, of_case, scale = CASES[case]
    given, cpu = inputs(**widths), torch.device("cpu")
    found = results(attend, given, build_mask(attn, rule or of_case, B, L, cpu), scale)
    return largest_gap(found, results(written_out, given, build_mask("sdpa", of_case, B, L, cpu), scale))


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
@pytest.mark.parametrize("case", CASES)
def test_attention_and_its_gradients_are_those_written_out(case: str, attn: str) -> None:
    assert gap_from_dense(attn, case) < 1e-12


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
@pytest.mark.parametrize("window", [127, 129])
def test_a_window_that_is_off_by_one_is_seen(window: int, attn: str) -> None:
    assert gap_from_dense(attn, "sinks, window of 128", all_of(causal, sliding(window))) > 1e-3


def test_a_gradient_that_does_not_go_through_the_log_sum_exp_is_seen(monkeypatch: MonkeyPatch) -> None:
    def faulty(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = attention_op(*args)
        return out, lse.detach()

    attention_op = attention.flex_attention_op
    monkeypatch.setattr(attention, "flex_attention_op", faulty)
    assert gap_from_dense("flex", "sinks") > 1e-3


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
def test_a_trace_of_attention_with_sinks_keeps_its_numbers_in_fp64(attn: str) -> None:
    given, cpu = inputs(sinks=True), torch.device("cpu")
    mask = build_mask(attn, WINDOW, B, L, cpu)

    def step(function: Callable[..., Tensor], mask: Any, given: Results) -> Results:
        q, k, v, sinks = given.values()
        out = function(q, k, v, mask, scale=0.25, sinks_N=sinks)
        gradients = torch.autograd.grad(out.square().sum(), list(given.values()))
        return {"out": out.detach(), **dict(zip(given, gradients, strict=True))}

    found = run_traced(minimal_fx_tracer(partial(step, attend))(mask, given))(mask, given)
    expected = step(written_out, build_mask("sdpa", WINDOW, B, L, cpu), given)
    assert largest_gap(found, expected) < 1e-12


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
def test_sinks_in_half_precision_are_as_close_as_rounding_allows(attn: str) -> None:
    given = {name: x.detach().bfloat16() for name, x in inputs(sinks=True).items()}
    mask = build_mask(attn, causal, B, L, torch.device("cpu"))
    out = attend(given["q"], given["k"], given["v"], mask, sinks_N=given["sinks"])
    assert out.dtype == torch.bfloat16
    wide = {name: x.double() for name, x in given.items()}
    seen = build_mask("sdpa", causal, B, L, torch.device("cpu"))
    exact = written_out(wide["q"], wide["k"], wide["v"], seen, 0.25, wide["sinks"])
    assert (out - exact).abs().max() < 0.02 * exact.abs().max()


def test_a_score_function_needs_flex_attention() -> None:
    given, mask = inputs(), build_mask("sdpa", causal, B, L, torch.device("cpu"))
    with pytest.raises(UserError, match="model.attn = 'sdpa': .* which only 'flex' can"):
        attend(given["q"], given["k"], given["v"], mask, score=lambda score, b, h, q, kv: score)


def test_a_soft_cap_is_a_score_function() -> None:
    given, mask = inputs(), build_mask("flex", causal, B, L, torch.device("cpu"))
    capped = attend(given["q"], given["k"], given["v"], mask, score=lambda s, b, h, q, kv: 2 * torch.tanh(s / 2))
    q, k = (given[name].transpose(1, 2) for name in ("q", "k"))
    scores = 2 * torch.tanh(0.25 * q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 2)
    seen = build_mask("sdpa", causal, B, L, torch.device("cpu"))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = weights @ given["v"].transpose(1, 2).repeat_interleave(2, 1)
    assert largest_gap({"out": capped.transpose(1, 2)}, {"out": expected}) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_mask_as_a_bias_gives_the_same_bits(dtype: torch.dtype, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 24, heads, 16, generator=generator, dtype=torch.float64).to(dtype) for heads in (4, 2, 2))
    documents = (torch.arange(24) // 7).expand(2, 24)
    mask = build_mask("sdpa", all_of(causal, same_document(documents)), 2, 24, torch.device("cpu"))
    sinks_N = torch.ones(4, dtype=dtype) if sinks else None
    results = []
    for given in (mask, as_bias(mask, dtype)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, given, sinks_N=sinks_N)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_mask_is_made_a_bias_once_for_all_layers() -> None:
    with torch.device("meta"):
        model = llama3.Model(tiny_config(llama3.FLAVORS["debugmodel"]))
    given = []
    for block in model.blocks.values():
        block.attention.register_forward_pre_hook(lambda *a, **k: given.append(a[2]["mask"]), with_kwargs=True)
    model(torch.zeros(1, 8, dtype=torch.long, device="meta"))
    assert len(given) == 3 and len(set(map(id, given))) == 1 and given[0].dtype == torch.float32
