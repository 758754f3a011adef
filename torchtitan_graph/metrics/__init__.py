"""Outputs of a run during training: console, metrics.jsonl, dashboards, profiler traces, and out-of-memory reports."""

from torchtitan_graph.metrics import out_of_memory
from torchtitan_graph.metrics.health import Leaps
from torchtitan_graph.metrics.metrics import Metrics
from torchtitan_graph.metrics.mlflow import check_mlflow
from torchtitan_graph.metrics.model_table import model_table
from torchtitan_graph.metrics.profiler import check_profiling, maybe_profile
from torchtitan_graph.metrics.weights_and_biases import check_wandb

__all__ = [
    "Leaps",
    "Metrics",
    "check_mlflow",
    "check_profiling",
    "check_wandb",
    "maybe_profile",
    "model_table",
    "out_of_memory",
]
