"""What a run tells while it trains: console, metrics.jsonl, TensorBoard, and traces of single steps."""

from torchtitan_graph.metrics.metrics import Metrics
from torchtitan_graph.metrics.profiler import maybe_profile

__all__ = ["Metrics", "maybe_profile"]
