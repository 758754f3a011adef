"""llama3 with the z-loss of PaLM (https://arxiv.org/abs/2204.02311): 1e-4 times the square of the logits' logsumexp."""

import torch

from torchtitan_graph.models import llama3
from torchtitan_graph.models.llama3 import FLAVORS, HF_KEYS, PLAN

__all__ = ["FLAVORS", "HF_KEYS", "PLAN", "Model"]

WEIGHT = 1e-4


class Model(llama3.Model):
    def forward(self, tokens_BL, *args, side_outputs=False, only=None, **more):  # without `loss`: it needs the logits
        if not side_outputs:
            return super().forward(tokens_BL, *args, only=only, **more)
        logits_BLV, side = super().forward(tokens_BL, *args, side_outputs=True, only=only, **more)
        if only is None or "output" in only:  # in a pipeline the last stage has the logits
            z_loss_BL = WEIGHT * log_of_sum(logits_BLV).square()
            side = side._replace(losses={**side.losses, "z_loss": z_loss_BL})
        return logits_BLV, side


def log_of_sum(x_BLV):
    """Return the logsumexp over the vocabulary, in fp32 at least. Torch's own gathers logits that are sharded over it;
    this exchanges numbers of rows."""
    x_BLV = x_BLV.to(torch.promote_types(x_BLV.dtype, torch.float32))
    largest_BL1 = x_BLV.detach().amax(-1, keepdim=True)
    return ((x_BLV - largest_BL1).exp().sum(-1, keepdim=True).log() + largest_BL1).squeeze(-1)
