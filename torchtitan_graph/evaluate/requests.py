"""What an evaluation asks a model on all its ranks: scores of the last tokens of texts, and continuations of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_graph.data.batch import IGNORE_INDEX, PADDING, Batch
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_graph.data.turn_ends import ends_of_texts
from torchtitan_graph.data.whole_lane import best_fit
from torchtitan_graph.evaluate.model import Evaluated
from torchtitan_graph.generate.generation import Options, generate
from torchtitan_graph.generate.samples import gathered
from torchtitan_graph.generate.texts import Text
from torchtitan_graph.parallel.agree import files_group, gather_from_ranks
from torchtitan_graph.parallel.layout import TP


class Request(NamedTuple):
    """Token ids, at most one more than a row holds, of which the last `num_scored` are scored."""

    tokens: list[int]
    num_scored: int


class Score(NamedTuple):
    """The sum of the scored tokens' log-probabilities, and whether each was the likeliest."""

    log_likelihood: float
    is_greedy: bool


class Writing(NamedTuple):
    """Prompts to continue together in batches, by the same options."""

    prompts: list[list[int]]
    options: Options


class Scorer:
    """Scores requests and continues prompts on all ranks; rank 0 has them, and the others `follow` it."""

    def __init__(self, evaluated: Evaluated) -> None:
        blueprint, self._scoring = evaluated.blueprint, evaluated.scoring
        self._blueprint = blueprint
        config, dims = blueprint.config, blueprint.dims
        self.reading = RowFormat.of(config.training, blueprint.tokenizer)
        self.tokenizer: Tokenizer = blueprint.tokenizer
        self.longest = config.validation.seq_len  # tokens of a row
        self._alone = config.training.one_document_per_row
        self._rows, self._dp_rank, self._dp_degree = (
            config.validation.local_batch_size,
            self._scoring.layout.data_rank,
            dims.data,
        )
        self._device = blueprint.target.device
        self._assets = config.model.hf_assets_path

    def ends(self) -> frozenset[int]:
        """Return the ids of the tokens that end a text; raises UserError like `ends_of_texts`."""
        return frozenset(ends_of_texts(self.reading, [self._blueprint.assets]))

    def tokenizer_of_prompts(self) -> Tokenizer:
        """Return the tokenizer that reads special tokens in text."""
        return load_tokenizer(self._assets, special_tokens_in_text=True)

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the scores of requests in their order; called by rank 0 alone."""
        dist.broadcast_object_list([list(requests)], src=0, group=files_group())
        return self._score(requests)

    def write(self, prompts: Sequence[list[int]], options: Options) -> list[str]:
        """Return the continuations of prompts in their order; called by rank 0 alone."""
        writing = Writing([*prompts], options)
        dist.broadcast_object_list([writing], src=0, group=files_group())
        return self._write(writing)

    def follow(self) -> None:
        """Do what rank 0 does, until it closes; called by the other ranks."""
        while (asked := self._receive()) is not None:
            if isinstance(asked, Writing):
                self._write(asked)
            else:
                self._score(asked)

    def close(self) -> None:
        """Let the other ranks return; called by rank 0."""
        dist.broadcast_object_list([None], src=0, group=files_group())

    def _receive(self) -> list[Request] | Writing | None:
        received: list[list[Request] | Writing | None] = [None]
        dist.broadcast_object_list(received, src=0, group=files_group())
        return received[0]

    def _write(self, writing: Writing) -> list[str]:
        model, step = self._blueprint.model, self._blueprint.options
        options = writing.options.in_parts(self._scoring.layout.degree(TP))
        size = self._rows if model.mixes_documents is None else 1
        order = sorted(range(len(writing.prompts)), key=lambda number: len(writing.prompts[number]))
        texts: dict[int, str] = {}
        with gathered(model, step.precision.compute, self._device, step.mode == "eager"):
            for batch in (order[i : i + size] for i in range(0, len(order), size)):
                found: list[tuple[Text, str]] = []
                prompts = [writing.prompts[number] for number in batch]
                for found in generate(model, self.tokenizer, prompts, options, self._device):  # noqa: B007  (the last)
                    pass
                texts |= {number: text.text for number, (text, _) in zip(batch, found, strict=True)}
        return [texts[number] for number in range(len(order))]

    def _score(self, requests: Sequence[Request]) -> list[Score]:
        packed = pack([len(request.tokens) - 1 for request in requests], self.longest, self._alone)
        found: dict[int, Score] = {}
        for first in range(0, len(packed), self._rows * self._dp_degree):
            begin = first + self._dp_rank * self._rows
            rows = packed[begin : begin + self._rows]
            on_host = _batch([[requests[i] for i in row] for row in rows], self._rows, self.longest, self.tokenizer)
            scores_2BL = self._scoring(on_host.to(self._device), on_host).double().cpu()
            for row, scores_2L in zip(rows, scores_2BL.unbind(1)[: len(rows)], strict=True):
                found |= _of_row(row, requests, scores_2L)
        by_rank = gather_from_ranks(lambda: found, files_group())
        merged = {number: score for of_rank in by_rank for number, score in of_rank.items()}
        return [merged[i] for i in range(len(requests))]


def pack(lengths: Sequence[int], longest: int, alone: bool = False) -> list[list[int]]:
    """Return rows of at most `longest` tokens as lists of the documents' numbers; with `alone` each has its own."""
    assert all(0 < length <= longest for length in lengths), "requests are cut to the length of a row"
    return [[number] for number in range(len(lengths))] if alone else best_fit([*lengths], longest, len(lengths))


def _batch(rows: Sequence[Sequence[Request]], num_rows: int, length: int, tokenizer: Tokenizer) -> Batch:
    """Return rows of documents, padded as those of a corpus are."""
    row_4BL = torch.empty(4, num_rows, length, dtype=torch.int64)
    tokens_BL, labels_BL, positions_BL, documents_BL = row_4BL
    tokens_BL.fill_(tokenizer.eos_id)
    labels_BL.fill_(IGNORE_INDEX)
    for number in range(num_rows):
        begin = 0
        for document, request in enumerate(rows[number] if number < len(rows) else ()):
            end = begin + len(request.tokens) - 1
            tokens_BL[number, begin:end] = torch.tensor(request.tokens[:-1])
            labels_BL[number, end - request.num_scored : end] = torch.tensor(request.tokens[-request.num_scored :])
            positions_BL[number, begin:end] = torch.arange(end - begin)
            documents_BL[number, begin:end] = document
            begin = end
        positions_BL[number, begin:] = torch.arange(length - begin)
        documents_BL[number, begin:] = PADDING
    return Batch(tokens_BL, labels_BL, positions_BL, documents_BL)


def _of_row(row: Sequence[int], requests: Sequence[Request], scores_2L: Tensor) -> Iterator[tuple[int, Score]]:
    """Yield the number and the score of each request in a row."""
    end = 0
    for number in row:
        request = requests[number]
        end += len(request.tokens) - 1
        likely_S, greedy_S = scores_2L[:, end - request.num_scored : end]
        yield number, Score(float(likely_S.sum()), bool(greedy_S.all()))
