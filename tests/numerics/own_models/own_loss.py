"""A family that adds terms of its author's to the loss: llama3, kept from large logits and from one kind of row."""

from typing import Any

from torch import Tensor

from torchtitan_graph.models import llama3

FLAVORS, HF_KEYS, PLAN = llama3.FLAVORS, llama3.HF_KEYS, llama3.PLAN


class Model(llama3.Model):
    def forward(self, tokens_BL: Tensor, *args: Any, side_outputs: bool = False, only: Any = None, **more: Any) -> Any:
        if not side_outputs:
            return super().forward(tokens_BL, *args, only=only, **more)
        logits_BLV, side = super().forward(tokens_BL, *args, side_outputs=True, only=only, **more)
        losses = dict(side.losses)
        if only is None or "output" in only:
            each_BL = logits_BLV.logsumexp(-1).square()
            of_row_BL = logits_BLV[..., 0].tanh().mean(1, keepdim=True).square().expand_as(each_BL)
            gain_BL = self.norm.weight.square().mean().expand(each_BL.shape)
            losses.update(large_logits=0.1 * each_BL, kind_of_row=0.3 * of_row_BL, gain=0.2 * gain_BL)
        if only is None or "tok_embeddings" in only:  # a term that depends on no parameter, in a pipeline's first stage
            losses["odd_tokens"] = 0.1 * (tokens_BL % 2).to(logits_BLV.dtype)
        metrics = {"token": tokens_BL.to(logits_BLV.dtype)} if only is None or "tok_embeddings" in only else {}
        return logits_BLV, side._replace(losses=losses, metrics=metrics)
