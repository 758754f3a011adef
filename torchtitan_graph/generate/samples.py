"""Texts that a model writes as training goes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch

from torchtitan_graph.config import job
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.generate.generation import Options, check_length, generate, to_tokens
from torchtitan_graph.generate.sampling import Sampling
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

    def write(self, layout: Layout, dtype: torch.dtype, device: torch.device, is_eager: bool) -> list[str]:
        """Return the continuations; all ranks together. Nothing that training reads changes, random numbers included.

        Args:
            dtype: of the gathered parameters that are floats.
            is_eager: the model gathers its parameters itself.
        """
        model, options = self._model, self._options.in_parts(layout.degree(TP))
        batches = [self._tokens] if model.mixes_documents is None else [[tokens] for tokens in self._tokens]
        with nullcontext() if is_eager else gathered_for_forward(model, model.blocks, dtype, device):
            texts = [
                text.text
                for batch in batches
                for text, _ in list(generate(model, self._tokenizer, batch, options, device))[-1]
            ]
        if is_eager:
            reshard_eager(model)
        return texts
