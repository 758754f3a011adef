"""llama3 with a feed-forward layer of squared ReLU (https://arxiv.org/abs/2109.08668), which is an operator."""

import torch
from torch import nn

from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import decoder_plan
from torchtitan_graph.models.layers.init import RESIDUAL
from torchtitan_graph.models.llama3 import FLAVORS
from torchtitan_graph.ops.operator import operator

__all__ = ["FLAVORS", "HF_KEYS", "PLAN", "Model"]

# Both are elementwise: they have no FLOPs of products, read their arguments once, may be recomputed, and a compiled
# region may contain them. `records` says the same of CUDA graphs: nothing in them waits for the device.
FACTS = {"namespace": "own_operator", "elementwise": True, "recompute": "any", "compiles": True, "records": True}


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    return squared_relu_backward(gradient, *ctx.saved_tensors)


def _like(*args):
    return torch.empty_like(args[-1], memory_format=torch.contiguous_format)


@operator(_like, setup=_save, backward=_backward, num_bytes=lambda x, out_val: 2 * x.nbytes, **FACTS)
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return relu(x)^2, rounded once."""
    return _like(x).copy_(_wide(x).relu().square())


@operator(_like, num_bytes=lambda gradient, x, out_val: 3 * x.nbytes, **FACTS)
def squared_relu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x, 2 relu(x) times that of the result."""
    return _like(x).copy_(2 * _wide(x).relu() * gradient)


class FeedForward(nn.Module):
    PLAN = {"": {"tp": "partial"}, "w1.weight": {"tp": "shard 0"}, "w2.weight": {"tp": "shard 1"}}
    INITIAL = {"w2.weight": RESIDUAL}

    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BLD):
        return self.w2(squared_relu(self.w1(x_BLD)))


PLAN = decoder_plan(attention=Attention.PLAN, feed_forward=FeedForward.PLAN)
HF_KEYS = {name: key for name, key in llama3.HF_KEYS.items() if not name.endswith("w3.weight")}


class Model(llama3.Model):
    def __init__(self, config, attn="sdpa"):
        super().__init__(config, attn)
        for block in self.layers:
            block.feed_forward = FeedForward(config.dim, config.ffn_dim)
