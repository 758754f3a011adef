"""Cross entropy that reads the logits once in forward and once in backward, and holds no copy of them in fp32.

On a GPU each is one kernel, see loss_kernels.py; on a CPU torch's operators compute some rows at a time. Eager mode and
the graph call the same operators, so they have the same bits. torch's own cross entropy has them up to rounding. What
is computed of a row does not depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_graph.row_loss import parts_of, wide

_LIBRARY = "torchtitan_graph"


@torch.library.custom_op(f"{_LIBRARY}::fused_cross_entropy", mutates_args=())
def fused_cross_entropy(logits_TV: Tensor, labels_T: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the cross entropy of all targets in fp32, fp64 for logits in it; `ignored` is the label that is no target.

    Also gives each row's largest logit m and the logarithm of the sum of exp(x - m), (T,) each, which backward reads.
    A label that is no class is an error on a CPU, and makes the sum not a number on a GPU.
    """
    logits_TV = logits_TV.contiguous()
    if logits_TV.is_cuda:
        from torchtitan_graph.loss_kernels import sums

        losses_T, largest_T, log_T = sums(logits_TV, labels_T, ignored, wide(logits_TV.dtype))
    else:
        losses_T, largest_T, log_T = (logits_TV.new_empty(len(labels_T), dtype=wide(logits_TV.dtype)) for _ in range(3))
        known_T = labels_T.masked_fill(labels_T == ignored, 0)
        for part in parts_of(logits_TV):
            x = logits_TV[part].to(losses_T.dtype)
            torch.amax(x, 1, out=largest_T[part])
            target_T = x.gather(1, known_T[part].unsqueeze(1)).squeeze(1)
            torch.log(x.sub(largest_T[part].unsqueeze(1)).exp_().sum(1), out=log_T[part])
            losses_T[part] = largest_T[part] - target_T + log_T[part]
        losses_T.masked_fill_(labels_T == ignored, 0.0)
    return losses_T.sum(), largest_T, log_T


@torch.library.custom_op(f"{_LIBRARY}::fused_cross_entropy_backward", mutates_args=())
def fused_cross_entropy_backward(
    logits_TV: Tensor, labels_T: Tensor, largest_T: Tensor, log_T: Tensor, dloss: Tensor, ignored: int
) -> Tensor:
    """Give `dloss` times the gradient of the sum."""
    logits_TV = logits_TV.contiguous()
    gradient_TV = torch.empty_like(logits_TV)
    _write(gradient_TV, logits_TV, labels_T, largest_T, log_T, dloss, ignored)
    return gradient_TV


def _write(
    out_TV: Tensor, logits_TV: Tensor, labels_T: Tensor, largest_T: Tensor, log_T: Tensor, dloss: Tensor, ignored: int
) -> None:
    if logits_TV.is_cuda:
        from torchtitan_graph.loss_kernels import write_gradient

        write_gradient(out_TV, logits_TV, labels_T, largest_T, log_T, dloss, ignored)
        return
    known_T1 = labels_T.masked_fill(labels_T == ignored, 0).unsqueeze(1)
    scale_T1 = torch.where(labels_T == ignored, 0.0, dloss).unsqueeze(1)
    for part in parts_of(logits_TV):
        x = logits_TV[part].to(log_T.dtype)
        shares = x.sub(largest_T[part].unsqueeze(1)).sub_(log_T[part].unsqueeze(1)).exp_()
        shares.scatter_add_(1, known_T1[part], shares.new_full(known_T1[part].shape, -1.0))
        out_TV[part] = shares.mul_(scale_T1[part])


def _in_place(
    logits_TV: Tensor, labels_T: Tensor, largest_T: Tensor, log_T: Tensor, dloss: Tensor, ignored: int
) -> Tensor:
    _write(logits_TV, logits_TV, labels_T, largest_T, log_T, dloss, ignored)
    return logits_TV


# The same into the memory of contiguous logits; `custom_op` can't say so.
_IN_PLACE = torch.library.Library(_LIBRARY, "FRAGMENT")
_IN_PLACE.define(
    "fused_cross_entropy_backward_(Tensor(a!) logits_TV, Tensor labels_T, Tensor largest_T, Tensor log_T, Tensor dloss,"
    " int ignored) -> Tensor(a!)"
)
_IN_PLACE.impl("fused_cross_entropy_backward_", _in_place, "CompositeExplicitAutograd")
fused_cross_entropy_backward_ = torch.ops.torchtitan_graph.fused_cross_entropy_backward_.default


@fused_cross_entropy.register_fake
def _(logits_TV: Tensor, labels_T: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    losses_T = logits_TV.new_empty(labels_T.shape, dtype=wide(logits_TV.dtype))
    return losses_T.new_empty(()), losses_T, torch.empty_like(losses_T)


@fused_cross_entropy_backward.register_fake
def _(logits_TV: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(logits_TV, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"{_LIBRARY}::fused_cross_entropy_backward_", lib=_IN_PLACE)
def _(logits_TV: Tensor, *rest: object) -> Tensor:
    return logits_TV


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits_TV, labels_T, ctx.ignored = inputs
    _, largest_T, log_T = output
    ctx.mark_non_differentiable(largest_T, log_T)
    ctx.save_for_backward(logits_TV, labels_T, largest_T, log_T)


def _backward(ctx, dloss: Tensor, *unused: None):  # type: ignore[no-untyped-def]
    return fused_cross_entropy_backward(*ctx.saved_tensors, dloss, ctx.ignored), None, None


fused_cross_entropy.register_autograd(_backward, setup_context=_save)
