"""Cross entropy's operators: they read the logits once in forward and once in backward, and copy none in fp32.

On a GPU each is one kernel, see loss_kernels.py. On a CPU torch's own log-softmax kernels compute some rows at a time,
with the bits of `torch.nn.functional.cross_entropy`. A row's results do not depend on the other rows. A rank may hold a
shard of the classes: the ranks combine what `cross_entropy_terms` returns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import declare, operator

_LIBRARY = "torchtitan_graph"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a loss is computed in: fp32, or fp64 for logits in it."""
    return torch.promote_types(dtype, torch.float32)


@operator(lambda logits_TV, columns_T: logits_TV.new_empty((3, columns_T.shape[0]), dtype=wide(logits_TV.dtype)))
def cross_entropy_terms(logits_TV: Tensor, columns_T: Tensor) -> Tensor:
    """Return (3, T): each row's largest logit m, the logarithm of the sum of exp(x - m), and the logit in its column.

    The latter is -inf where there is no such column: the target is another rank's, or no class. In a row of -inf, m is
    the least finite number.
    """
    logits_TV = logits_TV.contiguous()
    terms_3T = logits_TV.new_empty((3, len(columns_T)), dtype=wide(logits_TV.dtype))
    if logits_TV.is_cuda:
        from torchtitan_graph.ops.loss_kernels import write_terms

        write_terms(terms_3T, logits_TV, columns_T)
        terms_3T[1].log_()
        return terms_3T
    largest_T, log_T, target_T = terms_3T
    is_elsewhere_T = _is_elsewhere(logits_TV, columns_T)
    held_T1 = columns_T.masked_fill(is_elsewhere_T, 0).unsqueeze(1)
    for part in _parts(logits_TV):
        x = logits_TV[part].to(terms_3T.dtype)
        largest_T[part] = x.amax(1)
        log_T[part] = torch.log_softmax(x, 1).amax(1).neg_()  # that of the largest logit is -log(sum)
        target_T[part] = x.gather(1, held_T1[part]).squeeze(1)
    target_T.masked_fill_(is_elsewhere_T, -torch.inf)
    log_T.masked_fill_(largest_T == -torch.inf, -torch.inf)  # the sum is 0, not NaN
    largest_T.clamp_(min=torch.finfo(terms_3T.dtype).min)
    return terms_3T


@operator(lambda logits_TV, *rows: torch.empty_like(logits_TV, memory_format=torch.contiguous_format))
def cross_entropy_backward(
    logits_TV: Tensor, columns_T: Tensor, largest_T: Tensor, log_T: Tensor, scale_T: Tensor
) -> Tensor:
    """Return the gradient of the sum of the rows' losses, each times its scale.

    `largest_T` and `log_T`, the logarithm of the sum of exp(x - largest), are over all classes.
    """
    gradient_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    _write_gradient(gradient_TV, logits_TV.contiguous(), columns_T, largest_T, log_T, scale_T)
    return gradient_TV


def _write_gradient(
    out_TV: Tensor, logits_TV: Tensor, columns_T: Tensor, largest_T: Tensor, log_T: Tensor, scale_T: Tensor
) -> None:
    if logits_TV.is_cuda:
        from torchtitan_graph.ops.loss_kernels import write_gradient

        write_gradient(out_TV, logits_TV, columns_T, largest_T, log_T, scale_T)
        return
    V, dtype = logits_TV.shape[1], log_T.dtype
    at_T1 = columns_T.masked_fill(_is_elsewhere(logits_TV, columns_T), V).unsqueeze(1)
    rows_T3 = torch.stack((largest_T, log_T, -scale_T), 1)
    for part in _parts(logits_TV):
        largest_T1, log_T1, minus_T1 = rows_T3[part].split(1, 1)
        # One more column, whose exponential is 0, has the targets that are elsewhere.
        logs = logits_TV.new_full((len(minus_T1), V + 1), -torch.inf, dtype=dtype)
        torch.sub(logits_TV[part].to(dtype), largest_T1, out=logs[:, :V]).sub_(log_T1)
        of_logs = torch.zeros_like(logs).scatter_(1, at_T1[part], minus_T1)
        out_TV[part] = torch.ops.aten._log_softmax_backward_data(of_logs, logs, 1, dtype)[:, :V]


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
    "cross_entropy_backward_(Tensor(a!) logits_TV, Tensor columns_T, Tensor largest_T, Tensor log_T, Tensor scale_T)"
    " -> Tensor(a!)"
)


def _in_place(logits_TV: Tensor, *rows: Tensor) -> Tensor:
    _write_gradient(logits_TV, logits_TV, *rows)
    return logits_TV


_IN_PLACE.impl("cross_entropy_backward_", _in_place, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_LIBRARY}::cross_entropy_backward_", lambda logits_TV, *rows: logits_TV, lib=_IN_PLACE)
cross_entropy_backward_ = torch.ops.torchtitan_graph.cross_entropy_backward_.default
declare(cross_entropy_backward_, overwrites=True)
