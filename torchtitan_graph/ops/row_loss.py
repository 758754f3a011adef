"""Cross entropy as operators that hold little memory besides the logits: they compute some rows at a time.

Each row is computed by torch's own kernels, which don't depend on the number of rows, and torch's kernels add the rows'
terms: bit for bit the result of the same kernels for all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import declare, num_bytes

_LIBRARY = torch.library.Library("torchtitan_graph", "FRAGMENT")
_SUM = 2  # ATen's number for this reduction
_NO_CLASS = -100  # replaces the ignored label, which may be the number of a class


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a loss is computed in: fp32, or fp64 for logits in it."""
    return torch.promote_types(dtype, torch.float32)


def parts_of(logits_TV: Tensor) -> Iterator[slice]:
    """Return slices of rows: few enough for a CPU's cache, or many enough to keep a GPU busy, at most a 32nd of all.

    Their number is a multiple of eight: a GPU's kernel adds in an order that depends on where in 16 bytes a row begins,
    which a part must not change.
    """
    T, V = logits_TV.shape
    fitting = (2**17 if logits_TV.device.type == "cpu" else 2**24) // V
    rows = max(min(fitting, T // 32) // 8 * 8, 8)
    return (slice(begin, begin + rows) for begin in range(0, T, rows))


def _cross_entropy(logits_TV: Tensor, labels_T: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    known_T = labels_T.masked_fill(labels_T == ignored, 0)
    found_T1 = logits_TV.new_empty((len(labels_T), 1), dtype=wide(logits_TV.dtype))
    for part in parts_of(logits_TV):
        logs = torch.log_softmax(logits_TV[part].to(found_T1.dtype), 1)
        torch.gather(logs, 1, known_T[part].unsqueeze(1), out=found_T1[part])
    first_T = torch.zeros_like(labels_T).masked_fill_(labels_T == ignored, _NO_CLASS)  # the one column's number
    return torch.ops.aten.nll_loss_forward(found_T1, first_T, None, _SUM, _NO_CLASS)


def _cross_entropy_backward_(logits_TV: Tensor, dloss: Tensor, labels_T: Tensor, total: Tensor, ignored: int) -> Tensor:
    aten = torch.ops.aten
    for part in parts_of(logits_TV):
        logs = torch.log_softmax(logits_TV[part].to(dloss.dtype), 1)
        of_logs = aten.nll_loss_backward(dloss, logs, labels_T[part], None, _SUM, ignored, total)
        logits_TV[part] = aten._log_softmax_backward_data(of_logs, logs, 1, dloss.dtype)
    return logits_TV


def _exponentials(logits_TV: Tensor, largest_T1: Tensor) -> Tensor:
    exps = torch.empty(logits_TV.shape, dtype=largest_T1.dtype, device=logits_TV.device)
    for part in parts_of(logits_TV):
        torch.exp(logits_TV[part].to(exps.dtype).sub(largest_T1[part]), out=exps[part])
    return exps


def _sharded_cross_entropy_backward_(
    logits_TV: Tensor, largest_T1: Tensor, log_T1: Tensor, column_T: Tensor, value_T: Tensor, scale_T1: Tensor
) -> Tensor:
    for part in parts_of(logits_TV):
        logs = logits_TV[part].to(largest_T1.dtype).sub(largest_T1[part]).sub_(log_T1[part])
        at_target = torch.zeros_like(logs).scatter_(1, column_T[part].unsqueeze(1), value_T[part].unsqueeze(1))
        logits_TV[part] = at_target.add_(logs.exp_()).mul_(scale_T1[part])
    return logits_TV


_LIBRARY.define("cross_entropy(Tensor logits_TV, Tensor labels_T, int ignored) -> (Tensor, Tensor)")
_LIBRARY.define(
    "cross_entropy_backward_(Tensor(a!) logits_TV, Tensor dloss, Tensor labels_T, Tensor total, int ignored)"
    " -> Tensor(a!)"
)
_LIBRARY.define("exponentials(Tensor logits_TV, Tensor largest_T1) -> Tensor")
_LIBRARY.define(
    "sharded_cross_entropy_backward_(Tensor(a!) logits_TV, Tensor largest_T1, Tensor log_T1, Tensor column_T,"
    " Tensor value_T, Tensor scale_T1) -> Tensor(a!)"
)
_LIBRARY.impl("exponentials", _exponentials, "CompositeExplicitAutograd")
_LIBRARY.impl("sharded_cross_entropy_backward_", _sharded_cross_entropy_backward_, "CompositeExplicitAutograd")
_LIBRARY.impl("cross_entropy", _cross_entropy, "CompositeExplicitAutograd")
_LIBRARY.impl("cross_entropy_backward_", _cross_entropy_backward_, "CompositeExplicitAutograd")


@torch.library.register_fake("torchtitan_graph::cross_entropy", lib=_LIBRARY)
def _(logits_TV: Tensor, labels_T: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    loss = logits_TV.new_empty((), dtype=wide(logits_TV.dtype))
    return loss, torch.empty_like(loss)


@torch.library.register_fake("torchtitan_graph::cross_entropy_backward_", lib=_LIBRARY)
def _(logits_TV: Tensor, dloss: Tensor, labels_T: Tensor, total: Tensor, ignored: int) -> Tensor:
    return logits_TV


@torch.library.register_fake("torchtitan_graph::exponentials", lib=_LIBRARY)
def _(logits_TV: Tensor, largest_T1: Tensor) -> Tensor:
    return torch.empty(logits_TV.shape, dtype=largest_T1.dtype, device=logits_TV.device)


@torch.library.register_fake("torchtitan_graph::sharded_cross_entropy_backward_", lib=_LIBRARY)
def _(
    logits_TV: Tensor, largest_T1: Tensor, log_T1: Tensor, column_T: Tensor, value_T: Tensor, scale_T1: Tensor
) -> Tensor:
    return logits_TV


cross_entropy = torch.ops.torchtitan_graph.cross_entropy.default  # (sum, number of targets); no gradients
cross_entropy_backward_ = torch.ops.torchtitan_graph.cross_entropy_backward_.default  # in place in the logits
# For logits x with sharded vocabulary, their maximum m over all ranks and the logarithm of the sum: exp(x - m), and the
# gradient in place in the logits: (value at a column, else 0) + exp(x - m - log), times a row's scale.
exponentials = torch.ops.torchtitan_graph.exponentials.default
sharded_cross_entropy_backward_ = torch.ops.torchtitan_graph.sharded_cross_entropy_backward_.default


def _bytes_by_rows(logits_TV: Tensor, *rest: object, out_val: object, of_fp32: int) -> int:
    """Return the bytes that several kernels read and write for some rows at a time: besides arguments and results
    `of_fp32` for each logit, 8 fewer for logits in fp32, which are not cast. A part exceeds a GPU's caches."""
    tensors = [x for x in (logits_TV, *rest) if isinstance(x, Tensor)]
    return num_bytes((*tensors, out_val)) + (of_fp32 - 8 * (logits_TV.itemsize >= 4)) * logits_TV.numel()


for op, of_fp32 in (
    (cross_entropy, 12),
    (cross_entropy_backward_, 32),
    (exponentials, 16),
    (sharded_cross_entropy_backward_, 56),
):
    declare(op, num_bytes=partial(_bytes_by_rows, of_fp32=of_fp32))
