"""Uncompiled flex attention in strips of queries is what it is at once, and holds fewer scores."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from torchtitan_graph.models.layers.attention import attend
from torchtitan_graph.models.layers.masks import Rule, all_of, build_mask, causal, same_document, sliding
from torchtitan_graph.ops import flex_strips

L = 400
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([130, 20, 250])).expand(2, L)
PLACES = torch.cat([torch.arange(128, 256), torch.arange(300, 390)])


def results(rule: Rule, places: Tensor | None, score: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    Lq, cap = L if places is None else len(places), torch.tensor(3.0, dtype=torch.float64)
    q, k, v = (
        torch.randn(2, length, N, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for length, N in ((Lq, 4), (L, 2), (L, 2))
    )
    mask = build_mask("flex", rule, 2, L, torch.device("cpu"), places)
    change = (lambda s, b, h, q, kv: cap * torch.tanh(s / cap) + 0.01 * (kv - h)) if score else None
    sinks = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    out = attend(q, k, v, mask, score=change, sinks_N=sinks)
    (out * torch.randn(out.shape, dtype=torch.float64, generator=generator)).sum().backward()
    return [out.detach(), *(x.grad for x in (q, k, v, sinks))]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rule", "places", "score"),
    [
        (all_of(causal, same_document(DOCUMENTS)), None, True),
        (all_of(causal, sliding(90)), PLACES, True),
        (causal, PLACES, False),
    ],
    ids=["documents", "window-of-a-part", "part"],
)
def test_strips_are_the_whole(rule: Rule, places: Tensor | None, score: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(rule, places, score)
    monkeypatch.setattr(flex_strips, "AT_ONCE", 0)
    for at_a_time in (1, 2 * 4 * 256 * 384):
        monkeypatch.setattr(flex_strips, "SCORES_AT_A_TIME", at_a_time)
        for x, y in zip(expected, results(rule, places, score), strict=True):
            assert x.stride() == y.stride()
            assert (x - y).abs().max() <= 1e-13 * x.abs().max()


@pytest.mark.slow
def test_whoever_traces_has_them() -> None:
    """A tensor that a score function closes over has its gradient by them."""
    code = "import sys, torchtitan_graph.capture.trace; assert 'torchtitan_graph.ops.flex_strips' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
