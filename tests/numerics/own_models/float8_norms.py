"""A family with float8 layers of its author's: llama3, each norm's result quantised once for all that read it."""

from typing import Any

from torch import Tensor, nn

from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers.attention import Attention, attend
from torchtitan_graph.models.layers.decoder import decoder_plan
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.quantize import LayerNormLinear, LayerNormMLP, Recipe

FLAVORS, HF_KEYS = llama3.FLAVORS, llama3.HF_KEYS
RECIPE = Recipe("tensorwise_delayed")
_QKV = {f"qkv.layers.w{each}.weight": {"tp": "shard 0"} for each in "qkv"}
PLAN = decoder_plan(
    attention=Attention.PLAN | _QKV | {"qkv.norm.weight": {"tp": "replicate"}},
    feed_forward=FeedForward.PLAN | {"norm.weight": {"tp": "replicate"}},
)


class _Attention(Attention):
    def __init__(self, config: llama3.Config, norm: nn.Module):
        super().__init__(config.dim, config.num_heads, config.num_kv_heads, config.head_dim)
        parts = {name: self._modules.pop(name) for name in ("wq", "wk", "wv")}
        self.qkv = LayerNormLinear(norm, parts, RECIPE)

    def forward(self, x_BLD: Tensor, *, rope: Any, mask: Any) -> Tensor:
        q_BLNH, k_BLKH, v_BLKH = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x_BLD))
        return self.wo(attend(*self.placed(q_BLNH, k_BLKH, rope), v_BLKH, mask).flatten(-2))


class Model(llama3.Model):
    def __init__(self, config: llama3.Config, attn: str = "sdpa"):
        super().__init__(config, attn)
        for block in self.blocks.values():
            block.attention = _Attention(config, block.attention_norm)
            block.feed_forward = LayerNormMLP(block.ffn_norm, block.feed_forward, RECIPE)
            block.attention_norm = block.ffn_norm = nn.Identity()
