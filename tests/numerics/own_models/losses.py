"""Losses of the user's own, and one that is wrong."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def focal(logits_BLV: Tensor, labels_BL: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The focal loss, larger at later positions, and how many targets are the likeliest tokens."""
    logits_BLV = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32))
    loss_BL = F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL, reduction="none")
    loss_BL = (1 - (-loss_BL).exp()) ** 2 * loss_BL * (1 + 0.1 * batch.positions_BL)
    is_right_BL = logits_BLV.argmax(-1) == labels_BL
    return loss_BL.sum(), {"accuracy": is_right_BL.sum().to(loss_BL.dtype)}


def mean(logits_BLV: Tensor, labels_BL: Tensor, batch: Any) -> Tensor:
    """A mean where a sum is wanted."""
    return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten())
