"""The loss of a model that knows only the tokens' frequencies."""

import math

import torch

from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.data.loader import build_dataloader
from torchtitan_graph.data.tokenizer import Tokenizer


def unigram_entropy(
    *,
    dataset: str,
    dataset_path: str | None = None,
    split: str,
    tokenizer: Tokenizer,
    seq_len: int,
    num_rows: int | None = None,
    seed: int = 0,
) -> float:
    """Return the entropy, in nats per token, of the targets' frequencies in a split, or in its first `num_rows` rows.

    No prediction that ignores the context has a lower mean cross-entropy on these targets: a model whose validation
    loss is below has learned from the context.
    """
    loader = build_dataloader(
        dataset=dataset,
        dataset_path=dataset_path,
        split=split,
        tokenizer=tokenizer,
        seq_len=seq_len,
        seed=seed,
        local_batch_size=1,
        dp_rank=0,
        dp_degree=1,
        epochs=1,
        most_rows=math.inf if num_rows is None else num_rows,
    )
    counts_V = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
    rows = 0
    while rows != num_rows and not loader.has_ended:
        labels_L = next(loader).labels_BL[0]
        targets = labels_L[labels_L != IGNORE_INDEX]
        counts_V += torch.bincount(targets, minlength=tokenizer.vocab_size)
        rows += 1
    probabilities = counts_V[counts_V > 0].double() / counts_V.sum()
    return float(-(probabilities * probabilities.log()).sum())
