"""Cross entropy's operators: they read the logits once in forward and once in backward, and copy none in fp32.

On a GPU each is one kernel, see loss_kernels.py. On a CPU torch's own log-softmax kernels compute some rows at a time,
with the bits of `torch.nn.functional.cross_entropy`. A row's results do not depend on the other rows. A rank may hold a
shard of the classes: the ranks combine what `cross_entropy_terms` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import declare, operator

_LIBRARY = "torchtitan_graph"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a loss is computed in: fp32, or fp64 for logits in it."""
    return torch.promote_types(dtype, torch.float32)


def _fake_terms(logits_TV: Tensor, columns_T: Tensor, sums: bool = False) -> Tensor:
    return logits_TV.new_empty((4 if sums else 3, columns_T.shape[0]), dtype=wide(logits_TV.dtype))


@operator(_fake_terms)
def cross_entropy_terms(logits_TV: Tensor, columns_T: Tensor, sums: bool = False) -> Tensor:
    """Return (3, T): each row's largest logit m, the logarithm of the sum of exp(x - m), and the logit in its column;
    with `sums` (4, T): the sum of its logits as well.

    The third is -inf where there is no such column: the target is another rank's, or no class. In a row of -inf, m is
    the least finite number.
    """
    logits_TV = logits_TV.contiguous()
    terms_NT = _fake_terms(logits_TV, columns_T, sums)
    if logits_TV.is_cuda:
        from torchtitan_graph.ops.loss_kernels import write_terms

        write_terms(terms_NT, logits_TV, columns_T)
        terms_NT[1].log_()
        return terms_NT
    largest_T, log_T, target_T = terms_NT[:3]
    is_elsewhere_T = _is_elsewhere(logits_TV, columns_T)
    held_T1 = columns_T.masked_fill(is_elsewhere_T, 0).unsqueeze(1)
    for part in _parts(logits_TV):
        x = logits_TV[part].to(terms_NT.dtype)
        largest_T[part] = x.amax(1)
        log_T[part] = torch.log_softmax(x, 1).amax(1).neg_()  # that of the largest logit is -log(sum)
        target_T[part] = x.gather(1, held_T1[part]).squeeze(1)
        if sums:
            terms_NT[3, part] = x.sum(1)
    target_T.masked_fill_(is_elsewhere_T, -torch.inf)
    log_T.masked_fill_(largest_T == -torch.inf, -torch.inf)  # the sum is 0, not NaN
    largest_T.clamp_(min=torch.finfo(terms_NT.dtype).min)
    return terms_NT


@operator(lambda logits_TV, *rows, **of_loss: torch.empty_like(logits_TV, memory_format=torch.contiguous_format))
def cross_entropy_backward(
    logits_TV: Tensor,
    columns_T: Tensor,
    largest_T: Tensor,
    log_T: Tensor,
    scale_T: Tensor,
    label_smoothing: float = 0.0,
    num_classes: int = 1,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the gradient of the sum of the rows' losses, each times its scale: of
    (1 - label_smoothing) * (s - x[column]) + label_smoothing * (s - mean(x)) + z_loss * s**2, where s is logsumexp(x).

    `largest_T` and `log_T`, the logarithm of the sum of exp(x - largest), are over all classes, as is the mean.
    """
    gradient_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    rows, of_loss = (columns_T, largest_T, log_T, scale_T), (label_smoothing, num_classes, z_loss)
    _write_gradient(gradient_TV, logits_TV.contiguous(), *rows, *of_loss)
    return gradient_TV


def _write_gradient(
    out_TV: Tensor,
    logits_TV: Tensor,
    columns_T: Tensor,
    largest_T: Tensor,
    log_T: Tensor,
    scale_T: Tensor,
    label_smoothing: float = 0.0,
    num_classes: int = 1,
    z_loss: float = 0.0,
) -> None:
    if logits_TV.is_cuda:
        from torchtitan_graph.ops.loss_kernels import write_gradient

        rows, of_loss = (columns_T, largest_T, log_T, scale_T), (label_smoothing, num_classes, z_loss)
        write_gradient(out_TV, logits_TV, *rows, *of_loss)
        return
    V, dtype = logits_TV.shape[1], log_T.dtype
    at_T1 = columns_T.masked_fill(_is_elsewhere(logits_TV, columns_T), V).unsqueeze(1)
    rows_T3 = torch.stack((largest_T, log_T, -scale_T), 1)
    for part in _parts(logits_TV):
        largest_T1, log_T1, minus_T1 = rows_T3[part].split(1, 1)
        # One more column, whose exponential is 0, has the targets that are elsewhere.
        logs = logits_TV.new_full((len(minus_T1), V + 1), -torch.inf, dtype=dtype)
        torch.sub(logits_TV[part].to(dtype), largest_T1, out=logs[:, :V]).sub_(log_T1)
        if label_smoothing or z_loss:
            of_logits = logs.exp_().mul_(1 + 2 * z_loss * (largest_T1 + log_T1)).sub_(label_smoothing / num_classes)
            of_logits.mul_(-minus_T1).scatter_add_(1, at_T1[part], (1 - label_smoothing) * minus_T1)
        else:
            of_logs = torch.zeros_like(logs).scatter_(1, at_T1[part], minus_T1)
            of_logits = torch.ops.aten._log_softmax_backward_data(of_logs, logs, 1, dtype)
        out_TV[part] = of_logits[:, :V]


def _is_elsewhere(logits_TV: Tensor, columns_T: Tensor) -> Tensor:
    return (columns_T < 0) | (columns_T >= logits_TV.shape[1])


def _parts(logits_TV: Tensor) -> Iterator[slice]:
    """Return slices of rows: few enough for a CPU's cache, enough for its threads, and at most a 32nd of all."""
    T, V = logits_TV.shape
    rows = max(min(2**17 // V, T // 32), 8)
    return (slice(begin, begin + rows) for begin in range(0, T, rows))


# The same in place, in contiguous logits: `custom_op` can't declare a result that is an argument.
_IN_PLACE = torch.library.Library(_LIBRARY, "FRAGMENT")
_IN_PLACE.define(
    "cross_entropy_backward_(Tensor(a!) logits_TV, Tensor columns_T, Tensor largest_T, Tensor log_T, Tensor scale_T,"
    " float label_smoothing=0.0, int num_classes=1, float z_loss=0.0) -> Tensor(a!)"
)


def _in_place(logits_TV: Tensor, *rows: Any) -> Tensor:
    _write_gradient(logits_TV, logits_TV, *rows)
    return logits_TV


_IN_PLACE.impl("cross_entropy_backward_", _in_place, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_LIBRARY}::cross_entropy_backward_", lambda logits_TV, *rows: logits_TV, lib=_IN_PLACE)
cross_entropy_backward_ = torch.ops.torchtitan_graph.cross_entropy_backward_.default
declare(cross_entropy_backward_, overwrites=True)
