"""The loss: torch's cross entropy, bit for bit on a CPU; in the logits' memory, in chunks, of a sharded vocabulary."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pool import run_on
from torchtitan_graph import loss as losses
from torchtitan_graph.check import kernels
from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.ops.loss import cross_entropy_backward, cross_entropy_backward_, cross_entropy_terms

ONE = torch.ones(())
NONE = losses.Regularizers()
# Of the sum in fp32 or fp64, relative; and of the gradient, which is rounded to the logits' dtype.
CLOSE = {torch.float64: (1e-14, 1e-14), torch.float32: (1e-6, 1e-6), torch.bfloat16: (1e-6, 3e-3)}


def inputs(T: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels_T = torch.randint(V, (T,), generator=generator)
    labels_T[1::3] = IGNORE_INDEX
    return (torch.randn(T, V, generator=generator) * 3).to(dtype), labels_T


def errors(
    found: tuple[Tensor, Tensor], logits_TV: Tensor, labels_T: Tensor, added: losses.Regularizers = NONE
) -> tuple[float, float]:
    """Give how far a sum and a third of its gradient are from torch's in fp64."""
    exact_TV = logits_TV.double().clone().requires_grad_()
    exact = F.cross_entropy(exact_TV, labels_T, reduction="sum", label_smoothing=added.label_smoothing)
    exact = exact + added.z_loss * exact_TV[labels_T != IGNORE_INDEX].logsumexp(1).square().sum()
    (exact / 3).backward()
    pairs = zip(found, (exact.detach(), exact_TV.grad), strict=True)
    return tuple(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)  # type: ignore[union-attr, return-value]


def loss_and_gradient(logits_TV: Tensor, labels_T: Tensor, added: losses.Regularizers = NONE) -> tuple[Tensor, Tensor]:
    logits_TV = logits_TV.detach().requires_grad_()
    loss = losses.cross_entropy(logits_TV[None], labels_T[None], ONE, regularizers=added)
    loss = loss if isinstance(loss, Tensor) else loss[0]
    return loss.detach(), *torch.autograd.grad(loss / 3, [logits_TV])


def of_ranks(
    logits_TV: Tensor,
    labels_T: Tensor,
    degree: int,
    first: int | None = None,
    added: losses.Regularizers = NONE,
) -> tuple[Tensor, Tensor]:
    """Compute on one process what ranks do with a part of the classes each, whose first the second rank takes to be
    `first`. The loss is the first rank's."""
    parts = logits_TV.detach().chunk(degree, dim=1)
    begins = [rank * parts[0].shape[1] for rank in range(degree)]
    begins[1] = begins[1] if first is None else first
    sums = bool(added.label_smoothing)
    gathered = [cross_entropy_terms(part, labels_T - begin, sums) for part, begin in zip(parts, begins, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_gathered", lambda terms_3T, part: torch.cat(gathered))
        made = []
        for part, begin in zip(parts, begins, strict=True):
            leaf = part.clone().requires_grad_()
            of_rank = losses._Part(begin, degree, "of the test")
            loss = losses._CrossEntropy.apply(leaf, labels_T, of_rank, added, False)[0]
            made.append((loss.detach(), *torch.autograd.grad(loss / 3, [leaf])))
    assert all(torch.equal(loss, made[0][0]) for loss, _ in made)
    return made[0][0], torch.cat([gradient for _, gradient in made], dim=1)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("T", "V"), [(1000, 509), (77, 3011), (1, 2)])
def test_numbers(T: int, V: int, dtype: torch.dtype) -> None:
    logits_TV, labels_T = inputs(T, V, dtype)
    found = loss_and_gradient(logits_TV, labels_T)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32) and found[1].dtype == dtype
    far = errors(found, logits_TV, labels_T)
    assert all(x <= bound for x, bound in zip(far, CLOSE[dtype], strict=True)), far
    other_T = labels_T.roll(1) if T > 1 else 1 - labels_T
    assert min(errors(found, logits_TV, other_T)) > 0.001


@pytest.mark.parametrize("dtype", CLOSE)
def test_on_a_cpu_it_has_the_bits_of_torchs(dtype: torch.dtype) -> None:
    logits_TV, labels_T = inputs(300, 509, dtype)
    leaf = logits_TV.clone().requires_grad_()
    expected = F.cross_entropy(leaf.to(torch.promote_types(dtype, torch.float32)), labels_T, reduction="sum")
    (expected / 3).backward()
    loss, gradient_TV = loss_and_gradient(logits_TV, labels_T)
    assert torch.equal(loss, expected.detach()) and torch.equal(gradient_TV, leaf.grad)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("chunks", [3, 50])
def test_in_chunks_the_loss_is_the_same_and_its_gradients_up_to_rounding(chunks: int, dtype: torch.dtype) -> None:
    """Nineteen chunks are the most of nineteen rows, and 3 don't divide them."""
    generator = torch.Generator().manual_seed(0)
    x_BLD, labels_BL = torch.randn(1, 19, 8, generator=generator).to(dtype), inputs(19, 509, dtype)[1][None]
    output = torch.nn.Linear(8, 509, bias=False, dtype=dtype)
    found = []
    for number in (1, chunks):
        x_BLD = x_BLD.detach().requires_grad_()
        loss = losses.cross_entropy(x_BLD, labels_BL, torch.tensor(7), output, chunks=number)
        found.append((loss.detach(), *torch.autograd.grad(loss, [x_BLD, output.weight])))
    (expected, *gradients), (loss, *others) = found
    torch.testing.assert_close(loss, expected, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
    for gradient, other in zip(gradients, others, strict=True):
        assert other.dtype == dtype
        assert (other - gradient).norm() <= 3 * CLOSE[dtype][1] * gradient.norm()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_in_chunks_the_gradient_of_a_frozen_output_is_not_kept(is_frozen: bool) -> None:
    output = torch.nn.Linear(4, 11, bias=False).requires_grad_(not is_frozen)
    x_BLD, labels_BL = torch.randn(2, 6, 4, requires_grad=True), torch.randint(11, (2, 6))
    kept: list[tuple[int, ...]] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    def gradient(chunks: int) -> Tensor:
        loss = losses.cross_entropy(x_BLD, labels_BL, torch.tensor(7), output, chunks=chunks)
        return torch.autograd.grad(loss, x_BLD)[0]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = gradient(3)
    assert ((11, 4) in kept) is not is_frozen and (12, 4) in kept
    torch.testing.assert_close(found, gradient(1))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("T", "V", "degree"), [(400, 510, 2), (77, 3012, 3), (1, 4, 4)])
def test_numbers_of_a_sharded_vocabulary(T: int, V: int, degree: int, dtype: torch.dtype) -> None:
    """No rank but one has a row's target, and in the last case one has none at all."""
    logits_TV, labels_T = inputs(T, V, dtype)
    found = of_ranks(logits_TV, labels_T, degree)
    far = errors(found, logits_TV, labels_T)
    assert all(x <= bound for x, bound in zip(far, CLOSE[dtype], strict=True)), far
    wrong = of_ranks(logits_TV, labels_T.masked_fill(labels_T >= 0, V // degree), degree, first=V // degree + 1)
    assert not wrong[0].isfinite(), "no rank has the target then"
    if T > 1:
        assert min(errors(of_ranks(logits_TV, labels_T.roll(1), degree), logits_TV, labels_T)) > 0.001


REGULARIZED = [losses.Regularizers(0.1), losses.Regularizers(z_loss=0.01), losses.Regularizers(0.2, 0.01)]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("added", REGULARIZED)
def test_label_smoothing_and_z_loss_are_torchs(added: losses.Regularizers, dtype: torch.dtype) -> None:
    """Of a whole vocabulary, of a sharded one, and in chunks; without one of them it would be off."""
    logits_TV, labels_T = inputs(77, 510, dtype)
    for found in (loss_and_gradient(logits_TV, labels_T, added), of_ranks(logits_TV, labels_T, 3, added=added)):
        far = errors(found, logits_TV, labels_T, added)
        assert all(x <= bound for x, bound in zip(far, CLOSE[dtype], strict=True)), far
        assert min(errors(found, logits_TV, labels_T, NONE)) > 0.005


@pytest.mark.parametrize("added", REGULARIZED)
def test_they_are_the_same_in_chunks_and_so_are_the_parts_that_are_logged(added: losses.Regularizers) -> None:
    generator = torch.Generator().manual_seed(0)
    x_BLD = torch.randn(1, 19, 8, generator=generator, dtype=torch.float64).requires_grad_()
    labels_BL, output = inputs(19, 509, torch.float64)[1][None], torch.nn.Linear(8, 509, bias=False).double()
    found = []
    for chunks in (1, 3):
        loss, parts = losses.cross_entropy(x_BLD, labels_BL, ONE, output, chunks=chunks, regularizers=added)
        assert not any(x.requires_grad for x in parts.values())
        found.append([loss.detach(), *parts.values(), *torch.autograd.grad(loss, [x_BLD, output.weight])])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
    plain = losses.cross_entropy(x_BLD, labels_BL, ONE, output)
    torch.testing.assert_close(found[0][1], plain.detach(), rtol=1e-14, atol=0)


def test_a_rank_whose_logits_are_all_the_least_changes_nothing() -> None:
    """Classes that fill a vocabulary up to a size that divides."""
    logits_TV, labels_T = inputs(40, 6, torch.float32)
    loss, gradient_TV = of_ranks(F.pad(logits_TV, (0, 6), value=-torch.inf), labels_T, 2)
    expected, expected_TV = loss_and_gradient(logits_TV, labels_T)
    assert torch.equal(loss, expected) and torch.equal(gradient_TV, F.pad(expected_TV, (0, 6)))


@pytest.mark.parametrize("dtype", CLOSE)
def test_the_gradient_in_the_logits_memory(dtype: torch.dtype) -> None:
    logits_TV, labels_T = inputs(77, 3011, dtype)
    largest_T, log_T, _ = cross_entropy_terms(logits_TV, labels_T)
    rows = labels_T, largest_T, log_T, torch.full_like(log_T, 1 / 3)
    apart = cross_entropy_backward(logits_TV, *rows)
    written = cross_entropy_backward_(logits_TV, *rows)
    assert written.data_ptr() == logits_TV.data_ptr() and torch.equal(written, apart)


@pytest.mark.parametrize("label", [-5, 8])
def test_a_label_that_is_no_class_makes_the_loss_infinite(label: int) -> None:
    logits_TV, labels_T = torch.zeros(2, 8), torch.tensor([1, label])
    assert loss_and_gradient(logits_TV, labels_T)[0] == of_ranks(logits_TV, labels_T, 2)[0] == torch.inf


def test_torch_can_trace_and_differentiate_it() -> None:
    logits_TV, labels_T = inputs(7, 11, torch.float64)
    torch.library.opcheck(cross_entropy_terms, (logits_TV, labels_T))
    torch.library.opcheck(cross_entropy_backward, (logits_TV, labels_T, *torch.rand(3, 7, dtype=torch.float64)))
    torch.library.opcheck(cross_entropy_terms, (logits_TV, labels_T, True))
    rows = torch.rand(3, 7, dtype=torch.float64)
    torch.library.opcheck(cross_entropy_backward, (logits_TV, labels_T, *rows, 0.1, 11, 0.01))
    torch.autograd.gradcheck(lambda x: losses.cross_entropy(x[None], labels_T[None], ONE), logits_TV.requires_grad_())


@pytest.mark.slow
def test_a_kernel_that_is_off_is_found_by_what_check_gpu_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(kernels.kernels_off("cpu"))
    names = ["loss", "rotation", "rotation, interleaved", "SwiGLU", "ClampedSwiGLU"]
    names += ["rows with scores", "sums of rows", "varlen attention"]
    assert [*found] == names
    assert found.pop("loss") < 1e-6 and max(found.values()) < 1e-2
    for operator in ("cross_entropy", "rotate", "swiglu", "scored_rows", "permuted"):
        right = getattr(kernels, operator)
        monkeypatch.setattr(kernels, operator, lambda *args, right=right, **kwargs: 1.05 * right(*args, **kwargs))
    found = dict(kernels.kernels_off("cpu"))
    assert all(
        0.04 < found[name] < 0.06 for name in ("loss", "rotation", "SwiGLU", "rows with scores", "sums of rows")
    ), found


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_the_least_numbers_are_logits(dtype: torch.dtype) -> None:
    logits_TV = torch.full((2, 5), torch.finfo(dtype).min, dtype=dtype)
    logits_TV[1, :4] = -torch.inf
    found, _ = loss_and_gradient(logits_TV, torch.tensor([0, 4]))
    expected = F.cross_entropy(logits_TV.double(), torch.tensor([0, 4]), reduction="sum")
    assert float(found) == pytest.approx(float(expected))


def score_of_part(labels: list[int]) -> list[list[float]]:
    """Score rows whose classes 0 and 2 are equally likely, of which each of two ranks has one."""
    part = losses._Part(2 * dist.get_rank(), 2, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    return losses._scores(torch.tensor([[1.0, 0.0]] * len(labels)), torch.tensor(labels), part).tolist()


def test_of_equal_classes_of_two_ranks_the_first_is_the_likeliest() -> None:
    likely = 1 - math.log(2 * math.e + 2)
    for found in run_on(2, score_of_part, [0, 2]):
        assert found == [pytest.approx([likely, likely]), [1, 0]]
