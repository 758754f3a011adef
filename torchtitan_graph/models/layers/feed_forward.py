"""The SwiGLU feed-forward layer (Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    PLAN = {
        "": {"tp": "partial"},
        "w1.weight": {"tp": "shard 0"},
        "w2.weight": {"tp": "shard 1"},
        "w3.weight": {"tp": "shard 0"},
    }

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))
