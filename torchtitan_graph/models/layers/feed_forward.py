"""The SwiGLU feed-forward layer (Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_graph.models.layers.init import RESIDUAL
from torchtitan_graph.ops.elementwise import swiglu


class SwiGLU(nn.Module):
    """The activation: a module, so that it has a name in the graph.

    is_fused  computed by one operator, see elementwise.py
    """

    is_fused = False

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.is_one_operator(gate, up):
            return swiglu(gate, up, False)
        return F.silu(gate) * up

    def is_one_operator(self, gate: Tensor, up: Tensor) -> bool:
        """Return whether one operator computes it, which neither broadcasts nor promotes dtypes."""
        return self.is_fused and gate.shape == up.shape and gate.dtype == up.dtype


class FeedForward(nn.Module):
    PLAN = {
        "": {"tp": "partial"},
        "w1.weight": {"tp": "shard 0"},
        "w2.weight": {"tp": "shard 1"},
        "w3.weight": {"tp": "shard 0"},
    }
    INITIAL = {"w2.weight": RESIDUAL}

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)
        self.activation = SwiGLU()

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(x_BLD), self.w3(x_BLD)))
