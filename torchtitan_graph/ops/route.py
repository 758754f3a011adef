"""The way of tokens to their experts, and of results back.

Note [Route]
A mixture copies each token to a row for each of its experts, and adds up the results of a token's rows. These are a
linear map and its transpose: the gradient of one is the other. A `Way` says both, for tensors that need no gradients;
autograd knows them as a whole, so that each may take its own path between ranks. A result of `back` may be in
transit while other work runs; the number of rows on the experts' side may depend on data.

Where results return one by one, they are multiplied by their scores as they are put in the order in which they are
sent. In backward, the gradients that arrive are read in the order of the experts' rows by what computes the gradients
of both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchtitan_graph.ops.experts import permuted
from torchtitan_graph.ops.rows import scored_rows_backward, sums_of_rows
from torchtitan_graph.ops.wire import Wire


class Slots(NamedTuple):
    """A mixture's choice.

    chosen_TA  the experts of each token
    order_S    the slots (token, choice) sorted by expert, behind them those of padding
    inverse_S  where each slot is in that order
    load_E     number of slots of each expert, without padding
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
    """Return the slots of a choice; padding has chosen the expert `num_experts`, which is none. See Note [Experts in a
    static graph]."""
    expert_S, order_S = chosen_TA.flatten().sort(stable=True)
    inverse_S = torch.empty_like(order_S).scatter(0, order_S, torch.arange(order_S.shape[0], device=order_S.device))
    offsets_E = torch.searchsorted(expert_S, torch.arange(num_experts, device=order_S.device), right=True)
    return Slots(chosen_TA, order_S, inverse_S, offsets_E.diff(prepend=offsets_E.new_zeros(1)))


# (number of equal parts of the experts) -> in how many of them a token's experts are, on average
Spread = Callable[[int], float]


class Way(Protocol):
    """A map from tokens to experts' rows, and its transpose. It takes tensors that `Route` holds."""

    @property
    def wire(self) -> Wire:
        """Return how rows travel."""

    def out(self, x_TD: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens as they arrive, and where among them each row of each expert here is, sorted by expert."""

    def back(self, y_SD: Tensor, scores_S1: Tensor | None, *tensors: Tensor) -> Tensor:
        """Return such rows, times their scores, where their tokens are, in an order of its own; they may be in
        transit."""

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

    def back(self, y_SD: Tensor, scores_S1: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Send the experts' results, times their scores, to their tokens; `home` takes what it returns. Other work may
        run in between."""
        return _Back.apply(self.way, self.num_tokens, y_SD, scores_S1, *self.tensors)  # type: ignore[no-untyped-call, no-any-return]

    def home(self, rows: Tensor, anchor_TD: Tensor) -> Tensor:
        """Return the sum of each token's results, (T, D)."""
        return _Home.apply(self.way, rows, anchor_TD, *self.tensors)  # type: ignore[no-untyped-call, no-any-return]


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, x_TD: Tensor, *tensors: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(*tensors)
        return _arrived(way, x_TD, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        way, tensors = ctx.way, ctx.saved_tensors
        return None, way.home(way.back(grad_SD.contiguous(), None, *tensors), *tensors), *(None for _ in tensors)


def _arrived(way: Way, x_TD: Tensor, *tensors: Tensor) -> Tensor:
    rows, index_S = way.out(x_TD, *tensors)
    return way.wire.unpacked(rows.index_select(0, index_S), x_TD.dtype)


class _Back(torch.autograd.Function):
    """The first half of the transpose. The gradient of the sum takes the way out as a whole, each token once: it comes
    to here as that of `anchor_TD`, which is never read."""

    @staticmethod
    def forward(
        ctx: Any, way: Way, num_tokens: int, y_SD: Tensor, scores_S1: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.way, ctx.is_scored = way, scores_S1 is not None
        ctx.save_for_backward(*((y_SD, scores_S1) if ctx.is_scored else ()), *tensors)
        rows = way.back(y_SD, scores_S1, *tensors)
        ctx.mark_non_differentiable(rows)
        return rows, y_SD.new_empty(1, 1).expand(num_tokens, y_SD.shape[1])

    @staticmethod
    def backward(ctx: Any, _: None, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        way, saved, grad_TD = ctx.way, ctx.saved_tensors, grad_TD.contiguous()
        if not ctx.is_scored:
            return None, None, _arrived(way, grad_TD, *saved), None, *(None for _ in saved)
        y_SD, scores_S1, *tensors = saved
        rows, index_S = way.out(grad_TD, *tensors)
        grads = scored_rows_backward(way.wire.unpacked(rows, grad_TD.dtype), index_S, y_SD, scores_S1)
        return None, None, *grads, *(None for _ in tensors)


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, rows: Tensor, anchor_TD: Tensor, *tensors: Tensor) -> Tensor:
        ctx.num_tensors = len(tensors)
        return way.home(rows, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, grad_TD, *(None for _ in range(ctx.num_tensors))


@dataclasses.dataclass(frozen=True)
class AtHome:
    """All experts are on this rank."""

    copies: int
    wire: Wire

    # Tensors: the slots' order and its inverse.

    def out(self, x_TD: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD, tensors[0] // self.copies

    def back(self, y_SD: Tensor, scores_S1: Tensor | None, *tensors: Tensor) -> Tensor:
        return y_SD.view_as(y_SD) if scores_S1 is None else y_SD * scores_S1

    def home(self, rows: Tensor, *tensors: Tensor) -> Tensor:
        return sums_of_rows(rows, tensors[1], self.copies)


def at_home(slots: Slots, spread: Spread) -> Route:
    """Return the route to experts that are all on this rank."""
    _, order_S, inverse_S, load_E = slots

    def numbers(x_TA: Tensor) -> Tensor:
        return permuted(x_TA.reshape(-1, 1), order_S, inverse_S)

    return Route(slots.chosen_TA.shape[0], AtHome(slots.copies, Wire()), (order_S, inverse_S), load_E, numbers)
