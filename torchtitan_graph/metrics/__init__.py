"""What a run tells while it trains: console, metrics.jsonl, dashboards, and traces of single steps."""

from torchtitan_graph.metrics.health import Alarm, compare_ranks
from torchtitan_graph.metrics.metrics import Metrics
from torchtitan_graph.metrics.model_table import model_table
from torchtitan_graph.metrics.profiler import maybe_profile
from torchtitan_graph.metrics.weights_and_biases import check_wandb

__all__ = ["Alarm", "Metrics", "check_wandb", "compare_ranks", "maybe_profile", "model_table"]
