"""Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

Of two answers to a prompt one was chosen. The model is trained to prefer it more than its reference does, from which
the loss keeps it from going far. Shapes: P pairs a row at most, 2 answers, the chosen one first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.data.batch import IGNORE_INDEX, PAIRS_PER_ROW


def dpo(model: Any, batch: Any, *, beta: float = 0.1, label_smoothing: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the loss over this rank's pairs, and sums to log.

    The reference is the model of `[reference]`; without one, the trained model without its adapters.

    Args:
        beta: how much it costs to leave the reference.
        label_smoothing: the share of pairs whose two answers are taken to be swapped (conservative DPO).
    """
    before = model.without_adapters if model.has_adapters and not model.has_reference else model.reference
    reference_BP2 = log_probabilities(before(batch), batch)  # first: nothing is kept for backward yet
    rewards_BP2 = beta * (log_probabilities(model(batch), batch) - reference_BP2)
    chosen_BP, rejected_BP = rewards_BP2.unbind(-1)
    margin_BP, is_pair_BP = chosen_BP - rejected_BP, pairs_of(batch)

    def over_pairs(x_BP: Tensor) -> Tensor:
        return torch.where(is_pair_BP, x_BP, 0.0).sum()

    loss_BP = -(1 - label_smoothing) * F.logsigmoid(margin_BP) - label_smoothing * F.logsigmoid(-margin_BP)
    return over_pairs(loss_BP), {
        "preference_accuracy": over_pairs((margin_BP > 0).to(margin_BP.dtype)),
        "reward_chosen": over_pairs(chosen_BP),
        "reward_rejected": over_pairs(rejected_BP),
        "reward_margin": over_pairs(margin_BP),
    }


def log_probabilities(logits_BLV: Tensor, batch: Any) -> Tensor:
    """Return the log-probability of each answer, the sum of its targets' (B, P, 2), in fp32 at least; 0 where a row has
    fewer pairs. A sum over a mask has one shape for every row, and one order of summation."""
    logits_TV = logits_BLV.flatten(0, 1).to(torch.promote_types(logits_BLV.dtype, torch.float32))
    losses_T = F.cross_entropy(logits_TV, batch.labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    targets_B1L = -losses_T.view_as(batch.labels_BL)[:, None]
    return torch.where(_answers(batch), targets_B1L, 0.0).sum(-1).unflatten(1, (-1, 2))


def pairs_of(batch: Any) -> Tensor:
    """Return which of the P pairs each row has (B, P)."""
    has_target_BA = (_answers(batch) & (batch.labels_BL != IGNORE_INDEX)[:, None]).any(-1)
    return has_target_BA[:, ::2]


def _answers(batch: Any) -> Tensor:
    """Return which positions each of the 2P answers has (B, 2P, L): pair k is the documents 2k and 2k + 1."""
    numbers_A = torch.arange(2 * PAIRS_PER_ROW, device=batch.documents_BL.device)
    return batch.documents_BL[:, None] == numbers_A[:, None]  # type: ignore[no-any-return]
