"""Cross entropy that reads the logits once in forward and once in backward, and holds no copy of them in fp32.

On a GPU each is one kernel, see loss_kernels.py; on a CPU torch's operators compute some rows at a time. Eager mode and
the graph call the same operators, so they have the same bits. torch's own cross entropy is equal up to rounding. A
row's results do not depend on the others.

A rank may hold the logits of a shard of the classes: then the ranks gather three numbers for each row, in one message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.ops.row_loss import parts_of, wide

_LIBRARY = "torchtitan_graph"


def fused_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, ignored: int, first: int = 0, degree: int = 1, group: str = ""
) -> Tensor:
    """Return the sum of all targets' cross entropy in fp32, fp64 for logits in it; `ignored` is the label of no target.

    A label that is no class makes the sum infinite.

    Args:
        first: the class of the first column, where the logits are of a shard of the classes.
        degree: number of ranks with such shards, of equal width; `group` names their process group. Each gets the sum,
            and the gradient of its own logits.
    """
    total: Tensor = _FusedCrossEntropy.apply(logits_TV, labels_T, ignored, first, degree, group)
    return total


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, ignored: int, first: int, degree: int, group: str
    ) -> Tensor:
        columns_T = labels_T - first if first else labels_T
        terms_3T = fused_cross_entropy_terms(logits_TV, columns_T)
        largest_T, sum_T, target_T = terms_3T.unbind() if degree == 1 else _of_all_ranks(terms_3T, degree, group)
        log_T, is_ignored_T = sum_T.log(), labels_T == ignored
        ctx.save_for_backward(logits_TV, columns_T, largest_T, log_T, is_ignored_T)
        return (largest_T - target_T + log_T).masked_fill(is_ignored_T, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        *rows, is_ignored_T = ctx.saved_tensors
        scale_T = torch.where(is_ignored_T, 0.0, grads[0])
        return fused_cross_entropy_backward(*rows, scale_T), None, None, None, None, None


def _of_all_ranks(terms_3T: Tensor, degree: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    largest_RT, sum_RT, target_RT = _gathered(terms_3T, degree, group).unflatten(0, (degree, 3)).unbind(1)
    largest_T = largest_RT.amax(0)
    return largest_T, (sum_RT * (largest_RT - largest_T).exp()).sum(0), target_RT.amax(0)  # one rank has the target


def _gathered(x: Tensor, degree: int, group: str) -> Tensor:
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, degree, group))


@torch.library.custom_op(f"{_LIBRARY}::fused_cross_entropy_terms", mutates_args=())
def fused_cross_entropy_terms(logits_TV: Tensor, columns_T: Tensor) -> Tensor:
    """Return (3, T): each row's largest logit m, the sum of exp(x - m), and the logit in its column.

    The latter is -inf where there is no such column: the target is another rank's, or no class.
    """
    logits_TV = logits_TV.contiguous()
    terms_3T = logits_TV.new_empty((3, len(columns_T)), dtype=wide(logits_TV.dtype))
    if logits_TV.is_cuda:
        from torchtitan_graph.ops.loss_kernels import write_terms

        write_terms(terms_3T, logits_TV, columns_T)
        return terms_3T
    largest_T, sum_T, target_T = terms_3T
    held_T, is_elsewhere_T = _columns(logits_TV, columns_T)
    least = torch.finfo(terms_3T.dtype).min  # for a row of -inf: finite, so that the difference is no NaN
    for part in parts_of(logits_TV):
        x = logits_TV[part].to(terms_3T.dtype)
        largest_T[part] = x.amax(1).clamp_(min=least)
        sum_T[part] = x.sub(largest_T[part].unsqueeze(1)).exp_().sum(1)
        target_T[part] = x.gather(1, held_T[part].unsqueeze(1)).squeeze(1)
    target_T.masked_fill_(is_elsewhere_T, -torch.inf)
    return terms_3T


def _columns(logits_TV: Tensor, columns_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns, with 0 for those outside, and which are outside."""
    is_elsewhere_T = (columns_T < 0) | (columns_T >= logits_TV.shape[1])
    return columns_T.masked_fill(is_elsewhere_T, 0), is_elsewhere_T


@torch.library.custom_op(f"{_LIBRARY}::fused_cross_entropy_backward", mutates_args=())
def fused_cross_entropy_backward(
    logits_TV: Tensor, columns_T: Tensor, largest_T: Tensor, log_T: Tensor, scale_T: Tensor
) -> Tensor:
    """Return the gradient of the sum of the rows' losses, each times its scale.

    `largest_T` and `log_T`, the logarithm of the sum of exp(x - largest), are over all classes.
    """
    logits_TV = logits_TV.contiguous()
    gradient_TV = torch.empty_like(logits_TV)
    _write(gradient_TV, logits_TV, columns_T, largest_T, log_T, scale_T)
    return gradient_TV


def _write(
    out_TV: Tensor, logits_TV: Tensor, columns_T: Tensor, largest_T: Tensor, log_T: Tensor, scale_T: Tensor
) -> None:
    if logits_TV.is_cuda:
        from torchtitan_graph.ops.loss_kernels import write_gradient

        write_gradient(out_TV, logits_TV, columns_T, largest_T, log_T, scale_T)
        return
    held_T, is_elsewhere_T = _columns(logits_TV, columns_T)
    minus_T = is_elsewhere_T.to(log_T.dtype).sub_(1.0)
    for part in parts_of(logits_TV):
        x = logits_TV[part].to(log_T.dtype)
        shares = x.sub(largest_T[part].unsqueeze(1)).sub_(log_T[part].unsqueeze(1)).exp_()
        shares.scatter_add_(1, held_T[part].unsqueeze(1), minus_T[part].unsqueeze(1))
        out_TV[part] = shares.mul_(scale_T[part].unsqueeze(1))


def _in_place(logits_TV: Tensor, columns_T: Tensor, largest_T: Tensor, log_T: Tensor, scale_T: Tensor) -> Tensor:
    _write(logits_TV, logits_TV, columns_T, largest_T, log_T, scale_T)
    return logits_TV


# The same in place in contiguous logits; `custom_op` can't declare that.
_IN_PLACE = torch.library.Library(_LIBRARY, "FRAGMENT")
_IN_PLACE.define(
    "fused_cross_entropy_backward_(Tensor(a!) logits_TV, Tensor columns_T, Tensor largest_T, Tensor log_T,"
    " Tensor scale_T) -> Tensor(a!)"
)
_IN_PLACE.impl("fused_cross_entropy_backward_", _in_place, "CompositeExplicitAutograd")
fused_cross_entropy_backward_ = torch.ops.torchtitan_graph.fused_cross_entropy_backward_.default


@fused_cross_entropy_terms.register_fake
def _(logits_TV: Tensor, columns_T: Tensor) -> Tensor:
    return logits_TV.new_empty((3, columns_T.shape[0]), dtype=wide(logits_TV.dtype))


@fused_cross_entropy_backward.register_fake
def _(logits_TV: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(logits_TV, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{_LIBRARY}::fused_cross_entropy_backward_", lib=_IN_PLACE)
def _(logits_TV: Tensor, *rest: object) -> Tensor:
    return logits_TV
