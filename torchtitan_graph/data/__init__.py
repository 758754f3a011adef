"""Text to batches: corpora, tokenizers, packing, and a loader with a global position."""

from torchtitan_graph.data.batch import IGNORE_INDEX, PADDING, Batch
from torchtitan_graph.data.loader import DataLoader, build_dataloader
from torchtitan_graph.data.positions import merge_states
from torchtitan_graph.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "PADDING",
    "Batch",
    "DataLoader",
    "Tokenizer",
    "build_dataloader",
    "load_tokenizer",
    "merge_states",
]
