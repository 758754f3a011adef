"""A block mask whose length follows a dynamic dimension: one graph, bit for bit, whether rows fill its last block."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torchtitan_graph.capture.dynamo import CAPTURES
from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.trace import InParts, minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.torch_private.flex import flex_attention_op

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="older traces of attention are of one length")
BLOCK = 16
SHAPES = {name: {2: "L"} for name in "qkv"} | {"bias": {0: "L"}, "mask": {2: "L", 3: "L"}, "mask.mask_mod_0": {1: "L"}}


def document_mask(length: int, block: int = BLOCK) -> BlockMask:
    documents_BL = (torch.arange(length) // 7).expand(2, length).contiguous()

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (documents_BL[b, q] == documents_BL[b, kv]) & (q >= kv)

    return create_block_mask(rule, 2, None, length, length, device="cpu", BLOCK_SIZE=block)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: BlockMask) -> Tensor:
    out, lse = flex_attention_op(q, k, v, mask, 0.5, lambda score, b, h, q, kv: score + bias[kv])
    return (out.square().sum() + lse.sum()) / mask.shape[-1]


def step(forward: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: BlockMask) -> tuple[Tensor, ...]:
    return torch.autograd.grad(forward(q, k, v, bias, mask), (q, k, v, bias))


def inputs(length: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 2, 2, length, 8, generator=generator)
    bias = torch.randn(length, generator=generator)
    return *(x.clone().requires_grad_() for x in (q, k, v, bias)), document_mask(length)


@pytest.mark.parametrize("traced_at", [40, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capture", CAPTURES)
def test_one_graph_serves_several_lengths(capture: str, traced_at: int) -> None:
    """Those that fill the last block, and others; one block, and several."""
    module = nn.Module()
    traced = CAPTURES[capture](InParts(step, attend), module, dynamic_shapes=SHAPES)(*inputs(traced_at))
    run = run_traced(traced, module)
    for length in (40, 32, 64, 16, 5):
        assert all(map(torch.equal, run(*inputs(length)), step(attend, *inputs(length)))), length


def attend_by_length(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: BlockMask) -> Tensor:
    n = q.shape[2]
    out, _ = flex_attention_op(q, k, v, mask, 0.5, lambda score, b, h, q, kv: score + bias[kv] * (q - kv + n))
    return out.square().sum()


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_score_function_may_compute_with_a_length(capture: str) -> None:
    module, fn = nn.Module(), InParts(step, attend_by_length)
    run = run_traced(CAPTURES[capture](fn, module, dynamic_shapes=SHAPES)(*inputs(40)), module)
    for length in (40, 16):
        assert all(map(torch.equal, run(*inputs(length)), step(attend_by_length, *inputs(length)))), length


def test_both_captures_give_one_graph() -> None:
    module, graphs = nn.Module(), []
    for capture in CAPTURES.values():
        traced = capture(InParts(step, attend), module, dynamic_shapes=SHAPES)(*inputs(40))
        graphs.append(described(cleanup(traced.gm)))
    assert graphs[0] == graphs[1]


def first_rows(x: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention_op(x, x, x, mask, 0.5)[0][:, :, : mask.shape[-1] // 2]


def test_a_length_of_a_mask_may_derive_from_another() -> None:
    shapes = {"x": {2: "n"}, "mask": {2: Dim("n"), 3: Dim("n")}, "mask.mask_mod_0": {1: Dim("n")}}
    run = run_traced(minimal_fx_tracer(first_rows, dynamic_shapes=shapes)(torch.ones(2, 1, 40, 4), document_mask(40)))
    for n in (40, 20, 48):
        x = torch.randn(2, 1, n, 4, generator=torch.Generator().manual_seed(n))
        assert torch.equal(run(x, document_mask(n)), first_rows(x, document_mask(n)))
    x = torch.ones(2, 1, 40, 4)
    with pytest.raises(UserError, match=r"x.shape\[2\] is 40, but mask.mask_mod_0.shape\[1\] is 32: both are n"):
        run(x, document_mask(32))
    with pytest.raises(UserError, match=r"mask.BLOCK_SIZE\[0\] is 8, traced with 16"):
        run(x, document_mask(40, block=8))


def test_a_mask_that_is_not_dynamic_has_one_length() -> None:
    run = run_traced(minimal_fx_tracer(first_rows)(torch.ones(2, 1, 40, 4), document_mask(40)))
    with pytest.raises(UserError, match=r"mask.seq_lengths\[0\] is 32, traced with 40"):
        run(torch.ones(2, 1, 40, 4), document_mask(32))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"mask": {1: "n"}},
            r"mask is {1: 'n'}: of a BlockMask legal are names of its queries and keys, as in",
        ),
        ({"mask": {2: "n", 3: "n"}}, r"mask.seq_lengths\[0\] is n, but no dimension is n: name that one as well"),
        ({"x": {2: "n"}, "mask": {2: Dim.AUTO}}, r"dimension 2 of mask is .*: give it another one's name"),
        ({"x": {2: "n"}, "mask": {2: 2 * Dim("n")}}, r"mask.seq_lengths\[0\] is 40, but 2\*n is 80, for x.shape\[2\]"),
    ],
)
def test_what_can_not_be_said_of_a_mask_is_refused(shapes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        minimal_fx_tracer(first_rows, dynamic_shapes=shapes)(torch.ones(2, 1, 40, 4), document_mask(40))
