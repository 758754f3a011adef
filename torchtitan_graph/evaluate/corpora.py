"""Loss and perplexity on corpora, per token and per byte."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from torchtitan_graph.config.job import VALIDATION_LOSS
from torchtitan_graph.data.counts import in_words
from torchtitan_graph.data.feed import Feed
from torchtitan_graph.data.open_corpus import list_corpora
from torchtitan_graph.data.token_bytes import token_bytes
from torchtitan_graph.errors import UserError
from torchtitan_graph.evaluate.model import Evaluated
from torchtitan_graph.parallel.agree import on_rank_0
from torchtitan_graph.parallel.layout import CP
from torchtitan_graph.trainer import count_rows, open_validation


class CorpusResult(NamedTuple):
    """A model's loss on a corpus.

    tokens      targets: all tokens but the first of each document; the one that ends a document is among them
    loss        mean negative log-likelihood of a target, in nats
    perplexity  exp(loss)
    bytes       of UTF-8 that the targets stand for, as the tokenizer has normalized the text; None if it doesn't say.
                A token that ends a document stands for none
    bits_per_byte    the negative log-likelihood of all targets, in bits, over `bytes`
    byte_perplexity  2 ** bits_per_byte
    accuracy    part of the targets that the model finds likeliest
    """

    tokens: int
    loss: float
    perplexity: float
    bytes: int | None
    bits_per_byte: float | None
    byte_perplexity: float | None
    accuracy: float


def evaluate_corpora(evaluated: Evaluated) -> dict[str, CorpusResult]:
    """Return the results of a job's validation corpora by name, the same on all ranks, which call it together.

    Raises:
        UserError: a corpus can't be read, or has no target.
    """
    blueprint, layout = evaluated.blueprint, evaluated.scoring.layout
    device = blueprint.target.device
    sizes_V = token_bytes(blueprint.tokenizer)
    results = {}
    listed = on_rank_0(partial(list_corpora, blueprint.config, to_validate=True))
    for metric, (data, most, option) in open_validation(blueprint, listed).items():
        count_rows(data)
        feed = Feed(data, layout, device, most=most)
        # log-likelihood, likeliest targets, targets, bytes: of this rank's rows
        totals = torch.zeros(4, dtype=torch.float64)
        while (batches := feed.next()) is not None:
            (batch,), (on_host,) = batches.on_device, batches.on_host
            scores_2BL = evaluated.scoring(batch, on_host).double()
            labels = on_host.labels_BL[on_host.labels_BL >= 0]
            num_bytes = 0 if sizes_V is None else int(sizes_V[labels].sum())
            totals[:2] += scores_2BL.sum((1, 2)).cpu()
            totals[2:] += torch.tensor([len(labels), num_bytes])
        if layout.rank(CP):
            totals.zero_()  # ranks that share rows have the same
        likelihood, likeliest, tokens, num_bytes = layout.sum_over_data(totals.to(device)).tolist()
        if not tokens:
            why = "; ".join(in_words(data.left_out)) or "none has text"
            raise UserError(f"{option}: no document has anything to measure: {why}")
        name = metric.partition("/")[2] or VALIDATION_LOSS.removesuffix("_loss")
        results[name] = _result(likelihood, int(likeliest), int(tokens), num_bytes if sizes_V is not None else None)
    return results


def _result(likelihood: float, likeliest: int, tokens: int, num_bytes: float | None) -> CorpusResult:
    bits = -likelihood / math.log(2) / num_bytes if num_bytes else None
    return CorpusResult(
        tokens=tokens,
        loss=-likelihood / tokens,
        perplexity=_power(math.e, -likelihood / tokens),
        bytes=None if num_bytes is None else int(num_bytes),
        bits_per_byte=bits,
        byte_perplexity=None if bits is None else _power(2.0, bits),
        accuracy=likeliest / tokens,
    )


def _power(base: float, exponent: float) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf
