"""An exponential moving average of the weights, kept in the optimizer's state, and so sharded and saved like that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_graph.capture.state import local_part

AVERAGE, AVERAGE_DTYPE = "average", torch.float32  # its key in the state of a parameter, and its dtype


class Average:
    """The exponential moving average of the parameters that an optimizer steps. It begins as the weights before the
    first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._decay = decay
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._weights = [local_part(p).detach() for p in params]
        self._averages = [local_part(optimizer.state[p][AVERAGE]) for p in params]

    def begin(self) -> None:
        """Set it to the weights."""
        _copy(self._averages, self._weights)

    def update(self) -> None:
        """Add the weights after a step: average = decay * average + (1 - decay) * weights."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.lerp_(weight.to(AVERAGE_DTYPE), 1 - self._decay)

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Have it in the place of the weights, for validation and exports; then put the weights back, bit for bit."""
        weights = [weight.clone() for weight in self._weights]
        try:
            _copy(self._weights, self._averages)
            yield
        finally:
            _copy(self._weights, weights)


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    for x, value in zip(into, values, strict=True):
        x.copy_(value)
