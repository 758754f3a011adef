"""The way of tokens to their experts, and of results back.

Note [Route]
A mixture copies each token to a row for each of its experts, and adds up the results of a token's rows. These are a
linear map and its transpose: the gradient of one is the other. A `Way` says both, for tensors that need no gradients;
autograd knows them as a whole, so that each may take its own path between ranks. A result of `back` may be in
transit while other work runs; the number of rows on the experts' side may depend on data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchtitan_graph.ops.experts import permuted


class Slots(NamedTuple):
    """A mixture's choice.

    chosen_TA  the experts of each token
    order_S    the slots (token, choice) sorted by expert
    inverse_S  where each slot is in that order
    load_E     number of slots of each expert
    """

    chosen_TA: Tensor
    order_S: Tensor
    inverse_S: Tensor
    load_E: Tensor

    @property
    def copies(self) -> int:
        """Return the number of rows of each token."""
        return self.chosen_TA.shape[1]


def slots_of(chosen_TA: Tensor, num_experts: int) -> Slots:
    """Return the slots of a choice. See Note [Experts in a static graph]."""
    expert_S, order_S = chosen_TA.flatten().sort(stable=True)
    inverse_S = torch.empty_like(order_S).scatter(0, order_S, torch.arange(order_S.shape[0], device=order_S.device))
    offsets_E = torch.searchsorted(expert_S, torch.arange(num_experts, device=order_S.device), right=True)
    return Slots(chosen_TA, order_S, inverse_S, offsets_E.diff(prepend=offsets_E.new_zeros(1)))


# (number of equal parts of the experts) -> in how many of them a token's experts are, on average
Spread = Callable[[int], float]


class Way(Protocol):
    """A map from tokens to experts' rows, and its transpose. It takes tensors that `Route` holds."""

    def out(self, x_TD: Tensor, *tensors: Tensor) -> Tensor:
        """Return each token's row for each of its experts here, sorted by expert."""

    def back(self, y_SD: Tensor, *tensors: Tensor) -> Tensor:
        """Return such rows where their tokens are, in an order of its own; they may be in transit."""

    def home(self, rows: Tensor, *tensors: Tensor) -> Tensor:
        """Return the sum of each token's rows, (T, D), given the result of `back`."""


@dataclasses.dataclass(frozen=True)
class Route:
    """The route of a microbatch's tokens through a mixture of experts. See Note [Route].

    num_tokens  of this rank
    way         how rows travel
    tensors     what `way` needs: they have no gradients
    load_E      number of rows of each expert on this rank
    numbers     (number of each slot, (T, A)) -> that of each row, (S, 1), sorted by expert
    """

    num_tokens: int
    way: Way
    tensors: tuple[Tensor, ...]
    load_E: Tensor
    numbers: Callable[[Tensor], Tensor]

    def out(self, x_TD: Tensor) -> Tensor:
        """Return each token's row for each of its experts, sorted by expert."""
        return _Out.apply(self.way, x_TD, *self.tensors)  # type: ignore[no-untyped-call, no-any-return]

    def back(self, y_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Send the experts' results to their tokens; `home` takes what it returns. Other work may run in between."""
        return _Back.apply(self.way, self.num_tokens, y_SD, *self.tensors)  # type: ignore[no-untyped-call, no-any-return]

    def home(self, rows: Tensor, anchor_TD: Tensor) -> Tensor:
        """Return the sum of each token's results, (T, D)."""
        return _Home.apply(self.way, rows, anchor_TD, *self.tensors)  # type: ignore[no-untyped-call, no-any-return]


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, x_TD: Tensor, *tensors: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(*tensors)
        return way.out(x_TD, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        way, tensors = ctx.way, ctx.saved_tensors
        return None, way.home(way.back(grad_SD.contiguous(), *tensors), *tensors), *(None for _ in tensors)


class _Back(torch.autograd.Function):
    """The first half of the transpose. The gradient of the sum takes the way out as a whole, each token once: it comes
    to here as that of `anchor_TD`, which is never read."""

    @staticmethod
    def forward(ctx: Any, way: Way, num_tokens: int, y_SD: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.way = way
        ctx.save_for_backward(*tensors)
        rows = way.back(y_SD, *tensors)
        ctx.mark_non_differentiable(rows)
        return rows, y_SD.new_empty(1, 1).expand(num_tokens, y_SD.shape[1])

    @staticmethod
    def backward(ctx: Any, _: None, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors
        return None, None, ctx.way.out(grad_TD.contiguous(), *tensors), *(None for _ in tensors)


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, rows: Tensor, anchor_TD: Tensor, *tensors: Tensor) -> Tensor:
        ctx.num_tensors = len(tensors)
        return way.home(rows, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, grad_TD, *(None for _ in range(ctx.num_tensors))


def copied(x_TD: Tensor, order_S: Tensor, copies: int) -> Tensor:
    """Return each token's row for each slot, in their order."""
    return x_TD.index_select(0, order_S // copies)


def summed(rows_SD: Tensor, inverse_S: Tensor, copies: int) -> Tensor:
    """Return the sum of each token's rows, (T, D), given one for each slot in their order."""
    return rows_SD.index_select(0, inverse_S).unflatten(0, (-1, copies)).sum(1)


@dataclasses.dataclass(frozen=True)
class AtHome:
    """All experts are on this rank."""

    copies: int

    # Tensors: the slots' order and its inverse.

    def out(self, x_TD: Tensor, *tensors: Tensor) -> Tensor:
        return copied(x_TD, tensors[0], self.copies)

    def back(self, y_SD: Tensor, *tensors: Tensor) -> Tensor:
        return y_SD.view_as(y_SD)

    def home(self, rows: Tensor, *tensors: Tensor) -> Tensor:
        return summed(rows, tensors[1], self.copies)


def at_home(slots: Slots, spread: Spread) -> Route:
    """Return the route to experts that are all on this rank."""
    _, order_S, inverse_S, load_E = slots

    def numbers(x_TA: Tensor) -> Tensor:
        return permuted(x_TA.reshape(-1, 1), order_S, inverse_S)

    return Route(slots.chosen_TA.shape[0], AtHome(slots.copies), (order_S, inverse_S), load_E, numbers)
