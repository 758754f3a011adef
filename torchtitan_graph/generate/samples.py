"""Texts that a model writes as training goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from torchtitan_graph.config import job
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.generate.generation import Options, check_length, generate, to_tokens
from torchtitan_graph.generate.sampling import Sampling
from torchtitan_graph.generate.texts import Text
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.gather import gathered_for_forward
from torchtitan_graph.parallel.layout import TP, Layout
from torchtitan_graph.parallel.storage import reshard_eager


class Samples:
    """The continuations of [samples] prompts: the same in every layout, but for rounding.

    Args:
        ends: ids of the tokens that end a text.

    Raises:
        UserError: a text could become longer than the model's rows.
    """

    def __init__(self, config: job.Samples, model: Decoder, tokenizer: Tokenizer, ends: Iterable[int]):
        self._model, self._tokenizer, self.prompts = model, tokenizer, config.prompts
        self._tokens = [to_tokens(tokenizer, prompt) for prompt in config.prompts]
        check_length(model, self._tokens, config.length, "samples.length")
        self._options = Options(Sampling(config.temperature), config.length, frozenset(ends))

    def write(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        is_eager: bool,
        is_to_stop: Callable[[], bool],
    ) -> list[str] | None:
        """Return the continuations; all ranks together. Nothing that training reads changes, random numbers included.

        Args:
            dtype: of the gathered parameters that are floats.
            is_eager: the model gathers its parameters itself.
            is_to_stop: called after each token, on all ranks together; if it returns true, the result is None.
        """
        size = len(self._tokens) if self._model.mixes_documents is None else 1
        batches = [self._tokens[i : i + size] for i in range(0, len(self._tokens), size)]
        texts: list[str] = []
        with gathered(self._model, dtype, device, is_eager):
            for batch in batches:
                found: list[tuple[Text, str]] = []
                options = self._options.in_parts(layout.degree(TP))
                for found in generate(self._model, self._tokenizer, batch, options, device):  # noqa: B007  (the last)
                    if is_to_stop():
                        return None
                texts += [text.text for text, _ in found]
        return texts


@contextmanager
def gathered(model: Decoder, dtype: torch.dtype, device: torch.device, is_eager: bool) -> Iterator[None]:
    """Let a sharded model run forward passes as it is, on all ranks together; see `Samples.write` for the arguments."""
    with nullcontext() if is_eager else gathered_for_forward(model, model.blocks, dtype, device):
        yield
    if is_eager:
        reshard_eager(model)
