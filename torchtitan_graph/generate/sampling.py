"""The choice of the next token from logits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, in this order, which is that of transformers' generation.

    temperature  divides the logits; at 0 the likeliest token is taken
    top_k        draw among the k likeliest, and all that are as likely as the last of these; 0: among all
    top_p        draw among the fewest likeliest whose probabilities sum to at least this; 1: among all
    seed         of the draws
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Return the probabilities (B, V) of the next tokens, in fp64; temperature is above 0."""
        logits_BV = logits_BV.double() / self.temperature
        if 0 < self.top_k < logits_BV.shape[1]:
            least_B1 = logits_BV.topk(self.top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
        if self.top_p < 1:
            # A token stays while the likelier ones don't sum to top_p yet: the likeliest always does.
            sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
            shares_BV = sorted_BV.softmax(-1)
            goes_BV = shares_BV.cumsum(-1) - shares_BV >= self.top_p
            goes_BV[:, 0] = False
            logits_BV = logits_BV.masked_fill(goes_BV.scatter(1, order_BV, goes_BV), float("-inf"))
        return logits_BV.softmax(-1)

    def generator(self, sample: int) -> torch.Generator:
        """Return the random numbers of a prompt's n-th sample. They depend on nothing else: a prompt has the same
        samples in every batch."""
        digest = hashlib.sha256(f"{self.seed}/{sample}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def choose(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Return the next token (B) of each sequence, drawn by its own generator.

        The tokens' probabilities are laid one after the other in the order of their numbers, and the token at a random
        place is drawn. Rounding of the logits so moves only the ends of tokens.
        """
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        ends_BV = self.probabilities(logits_BV).cumsum(-1)
        places_B1 = torch.tensor([[torch.rand((), generator=g, dtype=torch.float64).item()] for g in generators])
        sums_B1 = ends_BV[:, -1:]
        places_B1 = torch.minimum(places_B1.to(ends_BV) * sums_B1, sums_B1.nextafter(torch.zeros_like(sums_B1)))
        return torch.searchsorted(ends_BV, places_B1, right=True).squeeze(1)
