"""The focal loss (https://arxiv.org/abs/1708.02002): cross entropy, smaller for targets that the model is sure of."""

import torch.nn.functional as F


def focal_loss(logits_BLV, labels_BL, batch):
    """Return the sum over the targets, and how many of them are the likeliest token. A position without a target has
    the label -100, which cross_entropy ignores."""
    logits_BLV = logits_BLV.float()
    loss_BL = F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL, reduction="none")
    focal_BL = (1 - (-loss_BL).exp()) ** 2 * loss_BL
    return focal_BL.sum(), {"accuracy": (logits_BLV.argmax(-1) == labels_BL).sum().float()}
