"""The loss some rows at a time has torch's bits."""

import pytest
import torch

from torchtitan_graph.ops.row_loss import cross_entropy, cross_entropy_backward_

aten, SUM, IGNORED = torch.ops.aten, 2, -100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("T", "V"), [(1000, 509), (77, 3011), (1, 2)])
def test_bits(T: int, V: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(T, V, generator=generator) * 3).to(dtype)
    labels = torch.randint(V, (T,), generator=generator)
    labels[1::3] = IGNORED
    wide = torch.promote_types(dtype, torch.float32)
    logs = aten._log_softmax(x.to(wide), 1, False)
    loss, total = aten.nll_loss_forward(logs, labels, None, SUM, IGNORED)
    dloss = torch.tensor(0.123, dtype=wide)
    of_logs = aten.nll_loss_backward(dloss, logs, labels, None, SUM, IGNORED, total)
    expected = aten._log_softmax_backward_data(of_logs, logs, 1, wide).to(dtype)
    assert [torch.equal(*pair) for pair in zip(cross_entropy(x, labels, IGNORED), (loss, total), strict=True)] == [
        True
    ] * 2
    found = cross_entropy_backward_(x, dloss, labels, total, IGNORED)
    assert found.data_ptr() == x.data_ptr() and torch.equal(found, expected)
    other = labels.roll(1) if T > 1 else 1 - labels
    assert not torch.equal(cross_entropy_backward_(x.clone(), dloss, other, total, IGNORED), expected)


def test_the_ignored_label_may_be_a_class() -> None:
    x, labels = torch.randn(40, 5), torch.arange(40) % 5
    expected = aten.nll_loss_forward(aten._log_softmax(x, 1, False), labels, None, SUM, 0)
    assert all(map(torch.equal, cross_entropy(x, labels, 0), expected))


def test_a_label_that_is_no_class_is_refused() -> None:
    for label in (-5, 7):
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy(torch.zeros(2, 7), torch.tensor([1, label]), IGNORED)
