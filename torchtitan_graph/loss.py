"""The loss: cross entropy, or the user's own, divided by the global number of target tokens of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtitan_graph.capture.step import CROSS_ENTROPY, IGNORE_INDEX
from torchtitan_graph.errors import UserError
from torchtitan_graph.ops.loss import cross_entropy_backward, cross_entropy_backward_, cross_entropy_terms
from torchtitan_graph.parallel.plan import SEQUENCE_DIM

Z_LOSS = "z_loss"  # name of a part of the loss, as is CROSS_ENTROPY


class Regularizers(NamedTuple):
    """Additions to the cross entropy of a target, x being its logits and s their logsumexp.

    label_smoothing  a part of the cross entropy is replaced by the same part of its mean over all classes, s - mean(x)
                     (https://arxiv.org/abs/1512.00567)
    z_loss           weight of s**2, which keeps the logits' normalizer near 1 (https://arxiv.org/abs/2204.02311)
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


_NONE = Regularizers()


def cross_entropy(
    x: Tensor,
    labels_BL: Tensor,
    num_tokens: Tensor,
    output: nn.Module | None = None,
    batch: Any = None,
    *,
    chunks: int = 1,
    regularizers: Regularizers = _NONE,
) -> Any:
    """Return the sum of the targets' cross entropy, divided by `num_tokens`, which counts those of all ranks and
    microbatches: the losses of ranks and microbatches then add up, and every layout computes the same number.

    It is computed in fp32, in fp64 for logits in it. Logits sharded over the vocabulary (a DTensor) are never gathered:
    the ranks exchange a few numbers for each row. A label of IGNORE_INDEX is ignored; one that is not a class makes the
    loss infinite. With regularizers the result is a pair: the loss, and its parts by name, without gradients.

    Args:
        x: the logits (B, L, V); with `output` its input (B, L, D).
        output: the layer that projects to logits. Nothing else sees these, so their gradient is written over them.
        batch: not read: a loss of the user's may need more than the labels, see `own_loss`.
        chunks: number of parts of the rows that are projected one after another, so that only a part's logits exist.
    """
    labels_T = labels_BL.flatten()
    if output is not None and chunks > 1:
        x_TD, weight_VD, part = _local(x, output.weight)  # type: ignore[arg-type]
        sums = _InChunks.apply(x_TD, weight_VD, labels_T, part, regularizers, chunks)
    else:
        logits_BLV = x if output is None else output(x)
        part = _part_of(logits_BLV) if isinstance(logits_BLV, DTensor) else _WHOLE
        local_BLV = logits_BLV.to_local() if isinstance(logits_BLV, DTensor) else logits_BLV
        sums = _CrossEntropy.apply(local_BLV.flatten(0, 1), labels_T, part, regularizers, output is not None)
    total, *parts = (each / num_tokens for each in sums)
    return (total, dict(zip((CROSS_ENTROPY, Z_LOSS), parts, strict=False))) if parts else total


def own_loss(
    function: Callable[..., Any],
    x: Tensor,
    labels_BL: Tensor,
    num_tokens: Tensor,
    output: nn.Module | None = None,
    batch: Any = None,
) -> Any:
    """Return the result of the user's `function(logits_BLV, labels_BL, batch)`, a sum over this rank's targets, and its
    metrics if it returns any, divided by `num_tokens`.

    Raises:
        UserError: the function does not return a sum, or a sum and a dict of sums.
    """
    returned = function(x if output is None else output(x), labels_BL, batch)
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not is_number(loss) or not isinstance(metrics, Mapping) or not all(map(is_number, metrics.values())):
        name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        raise UserError(
            f"loss.name: {name} must return the sum of the loss over the targets, a floating-point tensor without"
            " dimensions, or a pair of it and a dict of such sums by name; see docs/train/losses.md"
        )
    scaled = {name: x / num_tokens for name, x in metrics.items()}
    return (loss / num_tokens, scaled) if scaled else loss / num_tokens


def is_number(x: Any) -> bool:
    """Return whether x is a floating-point tensor without dimensions."""
    return isinstance(x, Tensor) and x.is_floating_point() and not x.dim()


class _Part(NamedTuple):
    """The part of the vocabulary whose logits a rank has: its first class, and the ranks of all parts."""

    first: int = 0
    degree: int = 1
    group: str = ""


_WHOLE = _Part()


def _part_of(table: DTensor) -> _Part:
    """Return the part that a rank has of a table (V, D) or of logits, which the plan divides evenly."""
    (placement,), mesh = table.placements, table.device_mesh
    width = table.to_local().shape[placement.dim]  # type: ignore[attr-defined]
    return _Part(mesh.get_local_rank() * width, mesh.size(), mesh.get_group().group_name)


def _local(x_BLD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor, _Part]:
    """Return the rows that a rank projects, its part of the weight, and which part that is; tensor parallelism gathers
    the rows over the sequence."""
    if not isinstance(weight_VD, DTensor):
        return x_BLD.flatten(0, 1), weight_VD, _WHOLE
    sequence = DTensor.from_local(x_BLD, weight_VD.device_mesh, [Shard(SEQUENCE_DIM)], run_check=False)
    whole_BLD = sequence.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole_BLD.flatten(0, 1), weight_VD.to_local(), _part_of(weight_VD)


class _Rows(NamedTuple):
    """What the gradient of the logits needs of each row: its column, its largest logit m over all classes, the
    logarithm of the sum of exp(x - m), and whether it has no target."""

    columns_T: Tensor
    largest_T: Tensor
    log_T: Tensor
    is_ignored_T: Tensor


def _losses(logits_TV: Tensor, labels_T: Tensor, part: _Part, added: Regularizers) -> tuple[list[Tensor], _Rows]:
    """Return the loss of each row, also of those without a target; with regularizers also its cross entropy and, if
    there is one, its z-loss."""
    # Also where the first class is 0: ranks whose graphs have other nodes would order their collectives otherwise.
    columns_T = labels_T - part.first if part.degree > 1 else labels_T
    given = (logits_TV, columns_T, True) if added.label_smoothing else (logits_TV, columns_T)
    terms_NT = cross_entropy_terms(*given)
    largest_T, log_T, target_T, *sums = terms_NT.unbind() if part.degree == 1 else _of_all_ranks(terms_NT, part)
    rows = _Rows(columns_T, largest_T, log_T, labels_T == IGNORE_INDEX)
    plain_T = largest_T - target_T + log_T
    if added == _NONE:
        return [plain_T], rows
    total_T, of_z = plain_T, []
    if added.label_smoothing:
        even_T = largest_T - sums[0] / (part.degree * logits_TV.shape[1]) + log_T
        total_T = (1 - added.label_smoothing) * plain_T + added.label_smoothing * even_T
    if added.z_loss:
        of_z = [added.z_loss * (largest_T + log_T).square()]
        total_T = total_T + of_z[0]
    return [total_T, plain_T, *of_z], rows


def _of_all_ranks(terms_NT: Tensor, part: _Part) -> tuple[Tensor, ...]:
    largest_RT, log_RT, target_RT, *sums = _gathered(terms_NT, part).unflatten(0, (part.degree, -1)).unbind(1)
    largest_T = largest_RT.amax(0)
    log_T = (largest_RT - largest_T + log_RT).logsumexp(0)
    return largest_T, log_T, target_RT.amax(0), *(sum_RT.sum(0) for sum_RT in sums)  # one rank has the target


def _gathered(x: Tensor, part: _Part) -> Tensor:
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, part.degree, part.group))


def _sum(losses_T: Tensor, is_ignored_T: Tensor) -> Tensor:
    if losses_T.is_cuda:
        return losses_T.masked_fill(is_ignored_T, 0.0).sum()
    # Rows are added in the order of torch's own cross entropy, as log-probabilities of a single class.
    targets_T = is_ignored_T * IGNORE_INDEX
    return 0 - F.nll_loss(losses_T.unsqueeze(1), targets_T, ignore_index=IGNORE_INDEX, reduction="sum")


def _of_gradient(added: Regularizers, part: _Part, logits_TV: Tensor) -> tuple[Any, ...]:
    """Return the arguments of the gradient's operators that follow those of the rows."""
    if added == _NONE:
        return ()
    return added.label_smoothing, part.degree * logits_TV.shape[1], added.z_loss


class _CrossEntropy(torch.autograd.Function):
    """The sum of the targets' losses, and of their parts, which have no gradient; `is_own` says that nothing else reads
    the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, part: _Part, added: Regularizers, is_own: bool
    ) -> tuple[Tensor, ...]:
        logits_TV = logits_TV.contiguous()
        losses, rows = _losses(logits_TV, labels_T, part, added)
        ctx.save_for_backward(logits_TV, *rows)
        ctx.is_own, ctx.more = is_own, _of_gradient(added, part, logits_TV)
        total, *parts = (_sum(each_T, rows.is_ignored_T) for each_T in losses)
        ctx.mark_non_differentiable(*parts)
        return total, *parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_TV, *rows, is_ignored_T = ctx.saved_tensors
        write = cross_entropy_backward_ if ctx.is_own else cross_entropy_backward
        scale_T = torch.where(is_ignored_T, 0.0, grads[0])
        return write(logits_TV, *rows, scale_T, *ctx.more), None, None, None, None


class _InChunks(torch.autograd.Function):
    """The same of rows that are projected in chunks. Each chunk's gradients are computed at once in forward, when its
    logits are there: backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        part: _Part,
        added: Regularizers,
        chunks: int,
    ) -> tuple[Tensor, ...]:
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        losses: list[list[Tensor]] = []
        ignored, dxs, dweight_VD = [], [], None
        for x_RD, labels_R in zip(x_TD.chunk(chunks), labels_T.chunk(chunks), strict=True):
            logits_RV = x_RD @ weight_VD.t()
            of_chunk, rows = _losses(logits_RV, labels_R, part, added)
            losses.append(of_chunk)
            ignored.append(rows.is_ignored_T)
            if needs_dx or needs_dweight:
                scale_R = torch.where(rows.is_ignored_T, 0.0, torch.ones_like(of_chunk[0]))
                more = _of_gradient(added, part, logits_RV)
                dlogits_RV = cross_entropy_backward_(logits_RV, *rows[:3], scale_R, *more)
                if needs_dx:
                    dxs.append(dlogits_RV @ weight_VD)
                if needs_dweight:
                    dlogits_VR = dlogits_RV.t()
                    dweight_VD = dlogits_VR @ x_RD if dweight_VD is None else torch.addmm(dweight_VD, dlogits_VR, x_RD)
        made = ([torch.cat(dxs)] if needs_dx else []) + ([dweight_VD] if dweight_VD is not None else [])
        ctx.save_for_backward(*made)
        ctx.needs_dx, ctx.needs_dweight = needs_dx, needs_dweight
        is_ignored_T = torch.cat(ignored)
        total, *parts = (_sum(torch.cat(each), is_ignored_T) for each in zip(*losses, strict=True))
        ctx.mark_non_differentiable(*parts)
        return total, *parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        made = [x * grads[0] for x in ctx.saved_tensors]
        dx_TD = made[0] if ctx.needs_dx else None
        return dx_TD, made[-1] if ctx.needs_dweight else None, None, None, None, None


def score_labels(
    x: Tensor,
    labels_BL: Tensor,
    num_tokens: Tensor,
    output: nn.Module | None = None,
    batch: Any = None,
    *,
    chunks: int = 1,
) -> Tensor:
    """Return the log-probability of each label, and 1 where the label is the first of the likeliest classes, else 0;
    as (2, T) in fp32, in fp64 for logits in it. Both are 0 where a label is IGNORE_INDEX.

    The arguments are those of `cross_entropy`; `num_tokens` and `batch` are not used. There is no gradient.
    """
    labels_T = labels_BL.flatten()
    if output is not None and chunks > 1:
        x_TD, weight_VD, part = _local(x, output.weight)  # type: ignore[arg-type]
        pairs = zip(x_TD.chunk(chunks), labels_T.chunk(chunks), strict=True)
        return torch.cat([_scores(x_RD @ weight_VD.t(), labels_R, part) for x_RD, labels_R in pairs], dim=1)
    logits_BLV = x if output is None else output(x)
    part = _part_of(logits_BLV) if isinstance(logits_BLV, DTensor) else _WHOLE
    local_BLV = logits_BLV.to_local() if isinstance(logits_BLV, DTensor) else logits_BLV
    return _scores(local_BLV.flatten(0, 1), labels_T, part)


def _scores(logits_TV: Tensor, labels_T: Tensor, part: _Part) -> Tensor:
    (losses_T,), rows = _losses(logits_TV.contiguous(), labels_T, part, _NONE)
    largest_T, likeliest_T = logits_TV.max(1)
    if part.degree > 1:
        found_2T = torch.stack([largest_T.to(losses_T.dtype), (likeliest_T + part.first).to(losses_T.dtype)])
        largest_RT, likeliest_RT = _gathered(found_2T, part).unflatten(0, (part.degree, 2)).unbind(1)
        likeliest_T = torch.where(largest_RT == largest_RT.amax(0), likeliest_RT, torch.inf).amin(0)
    scores_2T = torch.stack([-losses_T, (likeliest_T == labels_T).to(losses_T.dtype)])
    return scores_2T.masked_fill(rows.is_ignored_T, 0.0)
