"""A step of the user's that runs the trained model twice with gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def two_passes(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy, and that of a copy whose tokens are partly masked."""
    masked_BL = torch.where(batch.positions_BL % 3 == 2, 0, batch.tokens_BL)
    plain, noisy = (_entropy(model(each), batch) for each in (batch, batch._replace(tokens_BL=masked_BL)))
    return plain + 0.5 * noisy, {"noisy": noisy}


def _entropy(logits_BLV: Tensor, batch: Any) -> Tensor:
    logits_TV = logits_BLV.flatten(0, 1).to(torch.promote_types(logits_BLV.dtype, torch.float32))
    return F.cross_entropy(logits_TV, batch.labels_BL.flatten(), reduction="sum")
