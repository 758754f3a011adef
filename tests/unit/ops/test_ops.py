"""Products and sums over groups of rows, against plain loops: empty groups, every dtype, and their gradients; and rows
that are regrouped."""

import pytest
import torch
from torch import Tensor

from torchtitan_graph.ops import experts
from torchtitan_graph.ops.blocks import blocked_grouped_outer, columns_in_blocks, scaled_blocks
from torchtitan_graph.ops.exchange import regrouped, row_splits, turned_order
from torchtitan_graph.ops.experts import grouped_add, grouped_mm, grouped_outer, grouped_sum, permuted
from torchtitan_graph.ops.float8 import aligned_ends, scaled_columns, scaled_grouped_outer, scaled_rows
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.ops.rows import scored_rows, scored_rows_backward, sums_of_rows

D, F = 6, 5
SIZES = [(3, 4, 1), (0, 5, 0, 0, 2, 0), (8,), (0, 0)]  # of the groups
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def ends(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def numbers(sizes: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def weights(sizes: tuple[int, ...], transposed: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    return randn(len(sizes), F, D, dtype=dtype) if transposed else randn(len(sizes), D, F, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_grouped_product_multiplies_each_row_by_its_groups_matrix(
    sizes: tuple[int, ...], transposed: bool, dtype: torch.dtype
) -> None:
    x, w = randn(sum(sizes), D, dtype=dtype), weights(sizes, transposed, dtype)
    found = grouped_mm(x, w, ends(sizes), transposed)
    rows = [x[i].double() @ (w[e].T if transposed else w[e]).double() for i, e in enumerate(numbers(sizes))]
    assert found.dtype == dtype and found.shape == (sum(sizes), F)
    for row, expected in zip(found, rows, strict=True):
        torch.testing.assert_close(row, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_sums_and_outer_products_are_those_of_each_groups_rows(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, y = randn(sum(sizes), D, dtype=dtype), randn(sum(sizes), F, dtype=dtype)
    outer, total = torch.zeros(len(sizes), D, F).double(), torch.zeros(len(sizes), F).double()
    for i, e in enumerate(numbers(sizes)):
        outer[e] += torch.outer(x[i].double(), y[i].double())
        total[e] += y[i].double()
    torch.testing.assert_close(grouped_outer(x, y, ends(sizes)), outer.to(dtype))
    torch.testing.assert_close(grouped_sum(y, ends(sizes)), total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_sums_on_a_gpu_are_those_of_a_cpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """The form that never reads the offsets on the host, run on a CPU."""
    x = randn(sum(sizes), F, dtype=dtype)
    torch.testing.assert_close(experts._sum_by_product(x, ends(sizes)), grouped_sum(x, ends(sizes)))


@pytest.fixture
def like_a_recent_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Take torch's grouped kernel for bf16, with the demands of its CUDA form, which its meta form has too. Gives the
    shapes of what it multiplied."""
    taken, kernel = [], torch.nn.functional.grouped_mm

    def demanding(x: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
        kernel(*(t.to("meta") for t in (x, w)), offs=offs.to("meta"))
        taken.append(w.shape)
        return kernel(x, w, offs=offs)

    monkeypatch.setattr(experts, "_has_grouped_kernel", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", demanding)
    return taken


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("width", "to"), [(16, 24), (16, 34), (34, 16), (33, 35)])
def test_the_grouped_kernel_takes_any_width(
    width: int, to: int, transposed: bool, like_a_recent_gpu: list[torch.Size]
) -> None:
    sizes = SIZES[0]
    x = randn(sum(sizes), width, dtype=torch.bfloat16).requires_grad_()
    w = randn(len(sizes), *((to, width) if transposed else (width, to)), dtype=torch.bfloat16).requires_grad_()
    found = grouped_mm(x, w, ends(sizes), transposed)
    gradients = torch.autograd.grad(found.square().sum(), (x, w))
    assert len(like_a_recent_gpu) == 3  # the product, and a gradient of each factor: none reads the offsets
    plain = torch.stack([x[i] @ (w[e].T if transposed else w[e]) for i, e in enumerate(numbers(sizes))])
    expected = torch.autograd.grad(plain.square().sum(), (x, w))
    for one, other in zip((found, *gradients), (plain, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.detach().abs().max()))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("sizes", SIZES[:3])
def test_the_gradients_of_a_grouped_product_are_its_differences(sizes: tuple[int, ...], transposed: bool) -> None:
    x, w = randn(sum(sizes), D).requires_grad_(), weights(sizes, transposed).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, ends(sizes), transposed), (x, w))


@pytest.mark.parametrize("transposed", [True, False])
def test_a_grouped_product_takes_rows_and_gradients_that_are_not_contiguous(transposed: bool) -> None:
    sizes = SIZES[1]
    x, w = randn(D, sum(sizes)).T.requires_grad_(), weights(sizes, transposed).requires_grad_()
    out = grouped_mm(x, w, ends(sizes), transposed)
    found = torch.autograd.grad(out.sum(), (x, w))  # the gradient of a sum is one expanded number
    plain = sum(x[i] @ (w[e].T if transposed else w[e]) for i, e in enumerate(numbers(sizes)))
    torch.testing.assert_close(found, torch.autograd.grad(plain.sum(), (x, w)))


@pytest.mark.parametrize("sizes", SIZES[:3])
def test_every_row_gets_its_groups_bias_and_the_bias_the_sum_of_its_rows(sizes: tuple[int, ...]) -> None:
    x, bias, which = randn(sum(sizes), F).requires_grad_(), randn(len(sizes), F).requires_grad_(), numbers(sizes)
    assert torch.equal(grouped_add(x, bias, ends(sizes)), x + bias[which])
    assert torch.autograd.gradcheck(lambda x, bias: grouped_add(x, bias, ends(sizes)), (x, bias))


COUNTS_RE = torch.tensor([[2, 0, 1], [0, 3, 2], [1, 0, 0]])  # rows of each rank for each expert


@pytest.mark.parametrize("counts_RE", [COUNTS_RE, torch.zeros(2, 3, dtype=torch.int64)])
def test_rows_are_regrouped_by_expert_and_back(counts_RE: Tensor) -> None:
    ranks, experts = counts_RE.shape
    came = [(e, r) for r in range(ranks) for e in range(experts) for _ in range(counts_RE[r, e])]
    x = torch.tensor(came, dtype=torch.float64).view(-1, 2).requires_grad_()
    found = regrouped(x, counts_RE)
    assert found.tolist() == [list(row) for row in sorted(came)]
    assert torch.equal(regrouped(found, counts_RE.t()), x)
    assert torch.autograd.gradcheck(lambda x: regrouped(x, counts_RE), (x,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scaled_and_summed_in_another_order_as_torch_does_step_by_step(dtype: torch.dtype) -> None:
    """To the bit; rows of a gradient may be read several times, or not at all."""
    order, index = torch.tensor([2, 0, 3, 1]), torch.tensor([4, 0, 0, 2])
    rows, grads = (randn(n, D).to(dtype) for n in (4, 5))
    scores = randn(4, 1).to(dtype)
    assert torch.equal(scored_rows(rows, scores, order), (rows * scores)[order])
    assert torch.equal(sums_of_rows(rows, order, 2), rows[order].view(2, 2, D).sum(1))
    leaves = rows.clone().requires_grad_(), scores.clone().requires_grad_()
    expected = torch.autograd.grad(leaves[0] * leaves[1], leaves, grads[index])
    assert all(map(torch.equal, scored_rows_backward(grads, index, rows, scores), expected))
    assert not torch.equal(scored_rows(rows, scores, order.flip(0)), (rows * scores)[order])


def test_the_host_reads_how_many_rows_go_to_each_rank_and_come_from_it() -> None:
    assert row_splits(COUNTS_RE, COUNTS_RE.T.contiguous()).tolist() == [[3, 5, 1], [3, 3, 3]]


@pytest.mark.parametrize("copies", [1, 3])
def test_rows_are_permuted_and_their_gradients_back(copies: int) -> None:
    order = torch.randperm(4 * copies, generator=torch.Generator().manual_seed(0))
    x = randn(4, D).requires_grad_()
    found = permuted(x, order, order.argsort(), copies)
    for i, slot in enumerate(order.tolist()):
        assert torch.equal(found[i], x[slot // copies])
    assert torch.autograd.gradcheck(lambda x: permuted(x, order, order.argsort(), copies), (x,))


@pytest.mark.parametrize(("op", "multiple"), [(scaled_grouped_outer, 16), (blocked_grouped_outer, 32)])
def test_outer_products_of_columns_are_recorded_unless_the_host_reads(op: object, multiple: int) -> None:
    declared, columns = operator_of(op), torch.empty(2048, 48 + multiple * 4)
    assert declared.records(*[0] * 5, False) and not declared.records(*[0] * 5, True)  # type: ignore[operator]
    examples = declared.examples([columns], 4)  # type: ignore[misc]
    assert examples[-1] == 48 and aligned_ends(examples, multiple)[-1] <= columns.shape[1]


# The checker of torch 2.15 looks at it itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("transposed", [True, False])
def test_the_operators_keep_torchs_rules_for_operators(transposed: bool) -> None:
    """Their shapes on fake tensors are the real ones, and their gradients work under tracing."""
    sizes = SIZES[1]
    x, w = randn(sum(sizes), D).requires_grad_(), weights(sizes, transposed).requires_grad_()
    torch.library.opcheck(grouped_mm, (x, w, ends(sizes), transposed))
    torch.library.opcheck(grouped_outer, (x.detach(), randn(sum(sizes), F), ends(sizes)))
    torch.library.opcheck(grouped_sum, (x.detach(), ends(sizes)))
    torch.library.opcheck(grouped_add, (randn(sum(sizes), F).requires_grad_(), randn(len(sizes), F), ends(sizes)))
    x, form = randn(sum(sizes), 32), torch.float8_e4m3fn
    of_columns, of_blocks = scaled_columns(x, ends(sizes), form), columns_in_blocks(x, ends(sizes), form)
    for op, arguments in (
        (scaled_columns, (x, ends(sizes), form)),
        (columns_in_blocks, (x, ends(sizes), form)),
        (scaled_blocks, (randn(2, 3, 40), form)),
        (scaled_grouped_outer, (*of_columns, *of_columns, ends(sizes), True)),
        (blocked_grouped_outer, (*of_blocks, *of_blocks, ends(sizes), True)),
    ):
        torch.library.opcheck(op, arguments, test_utils="test_faketensor")  # others compare by operators without float8
    torch.library.opcheck(turned_order, (randn(int(COUNTS_RE.sum()), D), COUNTS_RE))
    torch.library.opcheck(sums_of_rows, (randn(4, D), torch.arange(4), 2))
    torch.library.opcheck(scored_rows, (randn(4, D), randn(4, 1), torch.arange(4)))
    torch.library.opcheck(scored_rows_backward, (randn(3, D), torch.arange(3), randn(3, D), randn(3, 1)))
    torch.library.opcheck(row_splits, (COUNTS_RE, COUNTS_RE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_columns_of_each_group_are_rows_of_their_own(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, form = randn(sum(sizes), F, dtype=dtype), torch.float8_e4m3fn
    numbers_FP, scale_EF = scaled_columns(x, ends(sizes), form)
    begin = 0
    for rows, scale_F in zip(x.split(sizes), scale_EF, strict=True):
        of_rows, scale_F1 = scaled_rows(torch.cat([rows, rows.new_zeros(1, F)]).t(), form)  # zeros, for a group without
        assert torch.equal(scale_F, scale_F1.squeeze(1))
        end = begin + -(-len(rows) // 16) * 16
        found, expected = numbers_FP[:, begin:end].float(), of_rows[:, : len(rows)].float()
        assert torch.equal(found[:, : len(rows)], expected) and not found[:, len(rows) :].any()
        begin = end
    assert not numbers_FP[:, begin:].float().any()
    if len(x):
        x[0, 0] = float("nan")  # and so the loss: a run stops
        assert scaled_columns(x, ends(sizes), form)[1].isnan().sum() == 1
