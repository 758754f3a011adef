"""A batch of token sequences that grow by a token at a time, with a cache of attention's keys and values.

Note [The cache]
Every attention passes its keys and values, or the latents they come from, through its `Seen`, at which context
parallelism gathers those of the whole row. A cache does the same over time: a hook on each `Seen` keeps what passes,
and returns it with all that came before. Queries at some places of a row, and a mask for them, are what models compute
under context parallelism anyway, so no model knows of the cache, and a step that is traced has no part of it.

Note [Left padding]
Prompts of different lengths are padded on the left, so that the next token of all is at one place. Padding is a
document of its own, which no token of the text sees, and positions count from the text's first token: what is computed
for a prompt is what it is alone, but for the order of some sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_graph.data.batch import PADDING
from torchtitan_graph.models.layers.attention import Seen
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.masks import Mask, build_mask


def why_no_cache(model: Decoder) -> str | None:
    """Return why a model can't have a cache, None if it can: all that a token sees must pass through a `Seen`."""
    if model.mixes_documents is not None:
        return f"{model.mixes_documents} of this model sees earlier tokens by other means than attention's keys"
    for name, block in model.blocks.items():
        if not any(isinstance(module, Seen) for module in block.modules()):
            return f"{name} has no module `Seen`, through which attention passes keys and values"
    return None


class Decoding:
    """Sequences of tokens, and the model's logits for the next token of each. See Note [Left padding]."""

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        device: torch.device,
        *,
        cache: bool = True,
        multiple: int = 1,
        whole_logits: bool = False,
    ):
        """Start from prompts, each of at least one token.

        Args:
            cache: keep keys and values; else each token runs the model on the whole sequences.
            multiple: the tokens of a forward pass must be a multiple of it. It then ends with tokens of no meaning,
                which no token before them sees, and which the next pass replaces.
            whole_logits: compute logits of all tokens of a pass: tensor parallelism divides the tokens before that.
        """
        self.model, self.multiple, self.whole_logits = model, multiple, whole_logits
        self.end = max(map(len, prompts))
        room = self.end + max_new_tokens + multiple
        padding_B1 = torch.tensor([[self.end - len(prompt)] for prompt in prompts], device=device)
        places_L = torch.arange(room, device=device)
        self.tokens_BL = torch.zeros(len(prompts), room, dtype=torch.int64, device=device)
        for row_L, prompt in zip(self.tokens_BL, prompts, strict=True):
            row_L[self.end - len(prompt) : self.end] = torch.tensor(prompt, device=device)
        self.documents_BL = torch.where(places_L < padding_B1, PADDING, 0)
        self.positions_BL = torch.where(self.documents_BL == 0, places_L - padding_B1, places_L)
        self.cache = Cache(room) if cache else None

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Return the logits (B, V) of the next token of each sequence."""
        begin = 0 if self.cache is None else self.cache.length
        end = self.end + (begin - self.end) % self.multiple
        last = self.end - begin - 1

        def project(output: nn.Module, x_BLD: Tensor, ahead: int) -> Tensor:
            return output(x_BLD) if self.whole_logits else output(x_BLD[:, last : last + 1])  # type: ignore[no-any-return]

        with contextlib.nullcontext() if self.cache is None else self.cache.used_by(self.model):
            logits_BLV = self.model(
                self.tokens_BL[:, begin:end], self.positions_BL[:, begin:end], self._masks(begin, end), loss=project
            )
        if self.cache is not None:
            self.cache.length = self.end
        if isinstance(logits_BLV, DTensor):  # in training, tensor parallelism leaves the vocabulary divided
            logits_BLV = logits_BLV.full_tensor()
        return logits_BLV[:, last if self.whole_logits else 0]  # type: ignore[no-any-return]

    def append(self, tokens_B: Tensor) -> None:
        """Append a token to each sequence."""
        self.tokens_BL[:, self.end] = tokens_B
        self.end += 1

    def _masks(self, begin: int, end: int) -> dict[str, Mask]:
        """Return the masks of the queries from `begin` to `end`, and the keys up to `end`."""
        attn = "flex" if self.model.changes_scores else "sdpa"  # a query at a time needs no kernel of blocks
        rules = self.model.mask_rules(self.documents_BL[:, :end], self.positions_BL[:, :end])
        device, B = self.tokens_BL.device, len(self.tokens_BL)
        places_L = torch.arange(begin, end, device=device)
        return {name: build_mask(attn, rule, B, end, device, places_L) for name, rule in rules.items()}


class Cache:
    """What has passed through each `Seen`, in order of their calls. See Note [The cache].

    length  the number of tokens whose keys and values are kept
    """

    def __init__(self, room: int):
        self.length = 0
        self._room, self._call = room, 0
        self._kept: list[list[Tensor]] = []  # by call: keys and values of `room` tokens

    @contextlib.contextmanager
    def used_by(self, model: nn.Module) -> Iterator[None]:
        """Use the cache in one forward pass of a model, on the tokens that follow."""
        self._call = 0
        handles = [m.register_forward_hook(self._extend) for m in model.modules() if isinstance(m, Seen)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _extend(self, seen: nn.Module, args: object, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep the new tokens' keys and values after those of `length` tokens, and return all."""
        if self._call == len(self._kept):
            self._kept.append([x.new_empty(x.shape[0], self._room, *x.shape[2:]) for x in new])
        kept, end = self._kept[self._call], self.length + new[0].shape[1]
        self._call += 1
        for all_BL, new_BL in zip(kept, new, strict=True):
            all_BL[:, self.length : end] = new_BL
        return tuple(all_BL[:, :end] for all_BL in kept)
