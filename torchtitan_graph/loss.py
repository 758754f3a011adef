"""The loss: cross entropy, divided by the global number of target tokens of the optimizer step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtitan_graph.capture.step import IGNORE_INDEX
from torchtitan_graph.ops.loss import cross_entropy_backward, cross_entropy_backward_, cross_entropy_terms
from torchtitan_graph.parallel.plan import SEQUENCE_DIM


def cross_entropy(
    x: Tensor, labels_BL: Tensor, num_tokens: Tensor, output: nn.Module | None = None, chunks: int = 1
) -> Tensor:
    """Return the sum of the targets' cross entropy, divided by `num_tokens`, which counts those of all ranks and
    microbatches: the losses of ranks and microbatches then add up, and every layout computes the same number.

    It is computed in fp32, in fp64 for logits in it. Logits sharded over the vocabulary (a DTensor) are never gathered:
    the ranks exchange three numbers for each row. A label of IGNORE_INDEX is ignored; one that is not a class makes the
    loss infinite.

    Args:
        x: the logits (B, L, V); with `output` its input (B, L, D).
        output: the layer that projects to logits. Nothing else sees these, so their gradient is written over them.
        chunks: number of parts of the rows that are projected one after another, so that only a part's logits exist.
    """
    labels_T = labels_BL.flatten()
    if output is not None and chunks > 1:
        x_TD, weight_VD, part = _local(x, output.weight)  # type: ignore[arg-type]
        total = _InChunks.apply(x_TD, weight_VD, labels_T, part, chunks)
    else:
        logits_BLV = x if output is None else output(x)
        part = _part_of(logits_BLV) if isinstance(logits_BLV, DTensor) else _WHOLE
        local_BLV = logits_BLV.to_local() if isinstance(logits_BLV, DTensor) else logits_BLV
        total = _CrossEntropy.apply(local_BLV.flatten(0, 1), labels_T, part, output is not None)
    return total / num_tokens  # type: ignore[no-any-return]


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


def _losses(logits_TV: Tensor, labels_T: Tensor, part: _Part) -> tuple[Tensor, _Rows]:
    """Return the loss of each row, also of those without a target."""
    columns_T = labels_T - part.first if part.first else labels_T
    terms_3T = cross_entropy_terms(logits_TV, columns_T)
    largest_T, log_T, target_T = terms_3T.unbind() if part.degree == 1 else _of_all_ranks(terms_3T, part)
    return largest_T - target_T + log_T, _Rows(columns_T, largest_T, log_T, labels_T == IGNORE_INDEX)


def _of_all_ranks(terms_3T: Tensor, part: _Part) -> tuple[Tensor, Tensor, Tensor]:
    largest_RT, log_RT, target_RT = _gathered(terms_3T, part).unflatten(0, (part.degree, 3)).unbind(1)
    largest_T = largest_RT.amax(0)
    log_T = (largest_RT - largest_T + log_RT).logsumexp(0)
    return largest_T, log_T, target_RT.amax(0)  # one rank has the target


def _gathered(x: Tensor, part: _Part) -> Tensor:
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, part.degree, part.group))


def _sum(losses_T: Tensor, is_ignored_T: Tensor) -> Tensor:
    if losses_T.is_cuda:
        return losses_T.masked_fill(is_ignored_T, 0.0).sum()
    # Rows are added in the order of torch's own cross entropy, as log-probabilities of a single class.
    targets_T = is_ignored_T * IGNORE_INDEX
    return 0 - F.nll_loss(losses_T.unsqueeze(1), targets_T, ignore_index=IGNORE_INDEX, reduction="sum")


class _CrossEntropy(torch.autograd.Function):
    """The sum of the targets' losses; `is_own` says that nothing else reads the logits."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, part: _Part, is_own: bool) -> Tensor:
        logits_TV = logits_TV.contiguous()
        losses_T, rows = _losses(logits_TV, labels_T, part)
        ctx.save_for_backward(logits_TV, *rows)
        ctx.is_own = is_own
        return _sum(losses_T, rows.is_ignored_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, *rows, is_ignored_T = ctx.saved_tensors
        write = cross_entropy_backward_ if ctx.is_own else cross_entropy_backward
        return write(logits_TV, *rows, torch.where(is_ignored_T, 0.0, grads[0])), None, None, None


class _InChunks(torch.autograd.Function):
    """The same of rows that are projected in chunks. Each chunk's gradients are computed at once in forward, when its
    logits are there: backward only scales them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, part: _Part, chunks: int) -> Tensor:
        is_trained = any(ctx.needs_input_grad)
        losses, ignored, dxs, dweight_VD = [], [], [], None
        for x_RD, labels_R in zip(x_TD.chunk(chunks), labels_T.chunk(chunks), strict=True):
            logits_RV = x_RD @ weight_VD.t()
            losses_R, rows = _losses(logits_RV, labels_R, part)
            losses.append(losses_R)
            ignored.append(rows.is_ignored_T)
            if is_trained:
                scale_R = torch.where(rows.is_ignored_T, 0.0, torch.ones_like(losses_R))
                dlogits_RV = cross_entropy_backward_(logits_RV, *rows[:3], scale_R)
                dxs.append(dlogits_RV @ weight_VD)
                dlogits_VR = dlogits_RV.t()
                dweight_VD = dlogits_VR @ x_RD if dweight_VD is None else torch.addmm(dweight_VD, dlogits_VR, x_RD)
        if is_trained:
            ctx.save_for_backward(torch.cat(dxs), dweight_VD)
        return _sum(torch.cat(losses), torch.cat(ignored))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx_TD, dweight_VD = ctx.saved_tensors
        return dx_TD * grads[0], dweight_VD * grads[0], None, None, None


def score_labels(
    x: Tensor, labels_BL: Tensor, num_tokens: Tensor, output: nn.Module | None = None, chunks: int = 1
) -> Tensor:
    """Return the log-probability of each label, and 1 where the label is the first of the likeliest classes, else 0;
    as (2, T) in fp32, in fp64 for logits in it. Both are 0 where a label is IGNORE_INDEX.

    The arguments are those of `cross_entropy`; `num_tokens` is not used. There is no gradient.
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
    losses_T, rows = _losses(logits_TV.contiguous(), labels_T, part)
    largest_T, likeliest_T = logits_TV.max(1)
    if part.degree > 1:
        found_2T = torch.stack([largest_T.to(losses_T.dtype), (likeliest_T + part.first).to(losses_T.dtype)])
        largest_RT, likeliest_RT = _gathered(found_2T, part).unflatten(0, (part.degree, 2)).unbind(1)
        likeliest_T = torch.where(largest_RT == largest_RT.amax(0), likeliest_RT, torch.inf).amin(0)
    scores_2T = torch.stack([-losses_T, (likeliest_T == labels_T).to(losses_T.dtype)])
    return scores_2T.masked_fill(rows.is_ignored_T, 0.0)
