"""Generation: prompts in, texts out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.generate.decoding import Decoding, why_no_cache
from torchtitan_graph.generate.sampling import Sampling
from torchtitan_graph.generate.texts import Text
from torchtitan_graph.models.layers.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Options:
    """How texts are generated.

    ends      ids of the tokens that end a text
    stops     strings that end a text, which does not contain them
    cache     keep keys and values
    multiple  of the tokens of a forward pass: the degree of tensor parallelism
    """

    sampling: Sampling = Sampling()
    max_new_tokens: int = 100
    ends: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    cache: bool = True
    multiple: int = 1

    def in_parts(self, degree: int) -> Options:
        """Return these options for tensor parallelism of a degree."""
        return dataclasses.replace(self, multiple=degree)


def to_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return a prompt's tokens, at least one: an empty text begins where another ends."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return bos + tokenizer.encode(prompt) or [tokenizer.eos_id]


def check_length(
    model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, option: str = "--max_new_tokens"
) -> None:
    """Raise a UserError, which names the option, if a text could become longer than a model's rows."""
    longest = max(map(len, prompts)) + max_new_tokens
    if model.longest_row is not None and longest > model.longest_row[0]:
        most, why = model.longest_row
        raise UserError(f"{option} {max_new_tokens}: with the prompt at most {most} tokens: {why}")


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: Options,
    device: torch.device,
    samples: Sequence[int] | None = None,
) -> Iterator[list[tuple[Text, str]]]:
    """Continue prompts, as one batch; yield after each token the texts, and what is new of each.

    On several ranks all run this together, on the same prompts: rank 0 chooses the tokens. A caller on one rank may end
    a text; on several, all must.

    Args:
        samples: the number of each prompt's sample, for its random numbers; None: the first of each.

    Raises:
        UserError: a text could become longer than the model's rows, or prompts of different lengths are in one batch of
            a model that would mix them with their padding.
    """
    check_length(model, prompts, options.max_new_tokens)
    if model.mixes_documents is not None and len({*map(len, prompts)}) > 1:
        raise UserError(
            f"{model.mixes_documents} of this model sees all that is before a token, padding too: run prompts of "
            "different lengths one at a time"
        )
    decoding = Decoding(
        model,
        prompts,
        options.max_new_tokens,
        device,
        cache=options.cache and why_no_cache(model) is None,
        multiple=options.multiple,
        whole_logits=options.multiple > 1,
    )
    how = options.max_new_tokens
    texts = [Text(tokenizer, prompt, how, ends=options.ends, stops=options.stops) for prompt in prompts]
    generators = [options.sampling.generator(sample) for sample in samples or [0] * len(prompts)]
    while not all(text.ended for text in texts):
        tokens_B = _of_rank_0(options.sampling.choose(decoding.next_logits(), generators))
        decoding.append(tokens_B)
        each = zip(texts, tokens_B.tolist(), strict=True)
        yield [(text, "" if text.ended else text.push(token)) for text, token in each]


def _of_rank_0(tokens_B: Tensor) -> Tensor:
    """Return the tokens that rank 0 has chosen: hosts of different kinds may round differently."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tokens_B, src=0)
    return tokens_B
