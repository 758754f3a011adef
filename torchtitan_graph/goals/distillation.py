"""Distillation (Hinton et al. 2015, https://arxiv.org/abs/1503.02531): a model learns a teacher's probabilities."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.data.batch import IGNORE_INDEX


def distillation(
    model: Any, batch: Any, *, alpha: float = 0.5, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the loss over this rank's targets, and sums to log.

    The teacher is the model of `[reference]`. The loss of a target is alpha * T**2 * KL(teacher || student), both
    softened by the temperature T, plus (1 - alpha) times its cross entropy.

    Args:
        alpha: weight of the teacher's part, from 0 to 1.
        temperature: divides the logits of both; T**2 keeps the gradients' size.
    """
    # The teacher is first: nothing is kept for backward yet.
    teacher_TV, student_TV = (_wide(x_BLV.flatten(0, 1)) for x_BLV in (model.reference(batch), model(batch)))
    labels_T = batch.labels_BL.flatten()
    entropy = F.cross_entropy(student_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum")
    log_q_TV, log_p_TV = ((x_TV / temperature).log_softmax(-1) for x_TV in (student_TV, teacher_TV))
    divergence_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
    divergence = temperature**2 * torch.where(labels_T != IGNORE_INDEX, divergence_T, 0.0).sum()
    loss = alpha * divergence + (1 - alpha) * entropy
    return loss, {"kl_divergence": divergence, "target_cross_entropy": entropy}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
