"""What compiled flex attention computes, by Triton's interpreter, against attention written out plainly in fp64."""

import dataclasses
from collections.abc import Callable

import host
import null_gpu
import pytest
import torch
from torch import Tensor

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.models.layers.attention import attend
from torchtitan_graph.models.layers.masks import Rule, all_of, build_mask, causal, chunked, same_document, sliding
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.compile_regions import FLEX, compile_regions
from torchtitan_graph.torch_private.flex import ScoreFunction

B, WINDOW, CHUNK = 2, 24, 40
# Of the norm of a result. bf16 has 8 bits, and the probabilities are rounded to it before they multiply the values.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Give 2 tanh(score / 2), by what the interpreter has."""
    return 4 * torch.sigmoid(score) - 2


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads of queries and of keys, widths of keys and of values, and what is seen."""

    L: int
    num_heads: int = 2
    num_kv_heads: int = 1
    width: int = 32
    v_width: int = 32
    mask: str = "document"
    sinks: bool = False
    score: ScoreFunction | None = None


# Rows that end inside a block of the mask, with a block, before its end; the heads and masks of the families.
CASES = {
    "document, llama3": Case(150),
    "document, whole blocks": Case(256),
    "document, a short row": Case(72),
    "causal, as many heads of keys": Case(131, num_kv_heads=2, mask="causal"),
    "latent, deepseek": Case(150, num_kv_heads=2, width=48),
    "chunked, llama4": Case(150, mask="chunked"),
    "sinks, gpt_oss": Case(150, sinks=True),
    "sliding window and sinks, gpt_oss": Case(150, mask="sliding", sinks=True),
    "softcap, a family of one's own": Case(150, score=softcap),
    "released width 64": Case(140, width=64, v_width=64),
    "released width 128": Case(140, width=128, v_width=128),
    "released width 192": Case(140, num_heads=1, width=192, v_width=128),
}


class Given:
    """The tensors of a case, on the host, and which of them take gradients."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        N, K = case.num_heads, case.num_kv_heads
        self.inputs = [numbers(B, case.L, N, case.width), numbers(B, case.L, K, case.width)]
        self.inputs += [numbers(B, case.L, K, case.v_width)] + [numbers(N)] * case.sinks
        self.d_out = numbers(B, case.L, N, case.v_width)
        is_first = torch.rand(B, case.L, generator=generator) < 0.02
        self.documents_BL = is_first.long().cumsum(1)
        if case.mask == "causal":
            self.documents_BL.zero_()
        places_L = torch.arange(case.L)
        is_first[:, 0] = True
        self.positions_BL = places_L - torch.where(is_first, places_L, 0).cummax(1).values


def shifted(rule: Rule) -> Rule:
    """See what the position before sees: a fault."""
    return lambda b, h, q, kv: rule(b, h, (q - 1).clamp(min=0), kv)


def compiled(case: Case, given: Given, fault: Callable[[Rule], Rule] = lambda rule: rule) -> list[Tensor]:
    """Give the result and the gradients of attention as a graph has it: traced on the device, and compiled."""
    documents_BL, positions_BL = given.documents_BL.cuda(), given.positions_BL.cuda()
    rules = [causal, same_document(documents_BL)]
    rules += [sliding(WINDOW)] if case.mask == "sliding" else []
    rules += [chunked(positions_BL, CHUNK)] if case.mask == "chunked" else []

    def step(inputs: list[Tensor], d_out: Tensor, mask: object) -> list[Tensor]:
        with torch.enable_grad():
            q, k, v, *sinks = leaves = [x.detach().requires_grad_() for x in inputs]
            out = attend(q, k, v, mask, sinks_N=sinks[0] if sinks else None, score=case.score)
            return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    with host.OnHost():
        mask = build_mask("flex", fault(all_of(*rules)), B, case.L, documents_BL.device)
        arguments = [x.cuda() for x in given.inputs], given.d_out.cuda(), mask
    traced = minimal_fx_tracer(step)(*arguments)
    gm = compile_regions(cleanup(traced.gm), {FLEX: {}})
    with host.OnHost():
        return [x.cpu() for x in run_traced(dataclasses.replace(traced, gm=gm))(*arguments)]


def plain(case: Case, given: Given) -> list[Tensor]:
    """Give the same in fp64: every score, a mask of rows x rows, and autograd."""
    documents_BL, positions_BL, places_L = given.documents_BL, given.positions_BL, torch.arange(case.L)
    ago_LL = places_L[:, None] - places_L
    seen_BLL = (ago_LL >= 0) & (documents_BL[:, :, None] == documents_BL[:, None])
    if case.mask == "sliding":
        seen_BLL &= ago_LL < WINDOW
    if case.mask == "chunked":
        seen_BLL &= positions_BL[:, :, None] // CHUNK == positions_BL[:, None] // CHUNK
    q, k, v, *sinks = leaves = [x.double().requires_grad_() for x in given.inputs]
    groups = case.num_heads // case.num_kv_heads
    scores_BNLL = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(groups, 2)) / case.width**0.5
    if case.score is not None:
        scores_BNLL = 2 * torch.tanh(scores_BNLL / 2)
    scores_BNLL = scores_BNLL.masked_fill(~seen_BLL[:, None], float("-inf"))
    if sinks:
        scores_BNLL = torch.cat((scores_BNLL, sinks[0].view(1, -1, 1, 1).expand(B, -1, case.L, 1)), dim=-1)
    shares_BNLL = scores_BNLL.softmax(-1)[..., : case.L]
    out = torch.einsum("bnlm,bmnh->blnh", shares_BNLL, v.repeat_interleave(groups, 2))
    return [out.detach(), *torch.autograd.grad(out, leaves, given.d_out.double())]


def distances(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    names = ["out", "dq", "dk", "dv", "dsinks"][: len(expected)]
    pairs = zip(names, found, expected, strict=True)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_attention_is_attention(name: str, dtype: torch.dtype) -> None:
    given = Given(CASES[name], dtype)
    found = distances(compiled(CASES[name], given), plain(CASES[name], given))
    null_gpu.tell(", ".join(f"{name} {x:.1e}" for name, x in found.items()))
    assert max(found.values()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_mask_shifted_by_one_is_found(dtype: torch.dtype) -> None:
    given = Given(CASES["document, llama3"], dtype)
    found = distances(compiled(CASES["document, llama3"], given, shifted), plain(CASES["document, llama3"], given))
    null_gpu.tell(", ".join(f"{name} {x:.1e}" for name, x in found.items()))
    assert min(found.values()) > 10 * TOLERANCE[dtype]
