"""A family of a user's own with experts that are balanced by a correction bias: DeepSeek-V3 with a few weights."""

from torchtitan_graph.models import deepseek_v3
from torchtitan_graph.models.deepseek_v3 import HF_KEYS, PLAN, Model
from torchtitan_graph.models.spec import tiny_config

__all__ = ["FLAVORS", "HF_KEYS", "PLAN", "Model"]

FLAVORS = {"debugmodel": tiny_config(deepseek_v3.FLAVORS["debugmodel"])}
