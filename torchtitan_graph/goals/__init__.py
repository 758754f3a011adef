"""Training steps for `training.step`, beside the loss of a model's logits: see docs/train/goals.md."""

from torchtitan_graph.goals.distillation import distillation
from torchtitan_graph.goals.preference import dpo

__all__ = ["distillation", "dpo"]
