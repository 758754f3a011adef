"""A family whose forward fails on its own."""

from typing import Any

from torch import Tensor

from torchtitan_graph.models import llama3
from torchtitan_graph.models.llama3 import HF_KEYS, PLAN

from .tiny import FLAVORS

__all__ = ["FLAVORS", "HF_KEYS", "PLAN", "Model"]


class Model(llama3.Model):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (B,) = args[0].shape  # it has two
        return super().forward(*args, **kwargs)
