"""Optimizer, learning-rate schedule and gradient clipping on the live (sharded) parameters."""

from torchtitan_graph.optim.average import AVERAGE, AVERAGE_DTYPE, Average
from torchtitan_graph.optim.clip import clip_grad_norm, ranks_with_non_finite_gradients
from torchtitan_graph.optim.muon import Muon
from torchtitan_graph.optim.optimizer import (
    build_optimizer,
    check_first_step,
    check_optimizer,
    is_fused,
    state_of,
    takes_stops,
)
from torchtitan_graph.optim.own_class import forget_rehearsal
from torchtitan_graph.optim.schedule import build_lr_scheduler

__all__ = [
    "AVERAGE",
    "AVERAGE_DTYPE",
    "Average",
    "Muon",
    "build_lr_scheduler",
    "build_optimizer",
    "check_first_step",
    "check_optimizer",
    "clip_grad_norm",
    "forget_rehearsal",
    "is_fused",
    "ranks_with_non_finite_gradients",
    "state_of",
    "takes_stops",
]
