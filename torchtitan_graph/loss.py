"""The training loss: cross entropy, divided by the global number of target tokens of the optimizer step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from torchtitan_graph.capture.step import IGNORE_INDEX
from torchtitan_graph.ops import fused_loss


def cross_entropy(logits_BLV: Tensor, labels_BL: Tensor, num_tokens: Tensor) -> Tensor:
    """Return the sum of the targets' cross entropy in fp32, divided by `num_tokens`, which counts those of all ranks
    and microbatches: the losses of ranks and microbatches then add up, and every layout computes the same number.

    Logits sharded over the vocabulary (a DTensor) are never gathered; in fp64 they stay so. A label of
    IGNORE_INDEX is no target.
    """
    logits_TV = logits_BLV.flatten(0, 1).to(torch.promote_types(logits_BLV.dtype, torch.float32))
    loss = F.cross_entropy(logits_TV, labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return (loss.to_local() if isinstance(loss, DTensor) else loss) / num_tokens


def fused_cross_entropy(logits_BLV: Tensor, labels_BL: Tensor, num_tokens: Tensor) -> Tensor:
    """Return `cross_entropy` up to rounding, by operators that hold no fp32 copy of the logits. For logits sharded over
    the vocabulary the ranks exchange three numbers a row. See torchtitan_graph/fused_loss.py."""
    part: dict[str, Any] = {}
    if isinstance(logits_BLV, DTensor):
        mesh, logits_BLV = logits_BLV.device_mesh, logits_BLV.to_local()
        first = mesh.get_local_rank() * logits_BLV.shape[-1]  # the plan splits the vocabulary evenly
        part = {"first": first, "degree": mesh.size(), "group": mesh.get_group().group_name}
    loss = fused_loss.fused_cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), IGNORE_INDEX, **part)
    return loss / num_tokens


def loss_context(vocabulary_sharded: bool) -> contextlib.AbstractContextManager:
    """Return the context that the loss and its backward must run in."""
    return loss_parallel() if vocabulary_sharded else contextlib.nullcontext()
