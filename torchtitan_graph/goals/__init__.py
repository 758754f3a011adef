"""Training steps for `training.step`, in place of the loss of a model's logits alone: see docs/train/goals.md."""

from torchtitan_graph.goals.distillation import distillation
from torchtitan_graph.goals.preference import dpo

__all__ = ["distillation", "dpo"]
