"""A training step of the user's: a function of a model and a batch, which may run the model, and others, several
times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_graph.errors import UserError

REFERENCE = "reference"  # the name of the frozen model next to the trained one, and the prefix of its state and masks
PAGE = "see docs/train/goals.md"


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A step in place of a loss of the logits.

    name          as the user gives it, for messages
    function      (model, batch) -> the sum of the loss over this rank's targets, or a pair of it and a dict of sums
    reference     the frozen model that `model.reference` runs, if there is one
    adapters_off  returns a context in which a model's adapters have no effect; None: it has none
    """

    name: str
    function: Callable[..., Any]
    reference: nn.Module | None = None
    adapters_off: Callable[[nn.Module], AbstractContextManager[None]] | None = None

    def sums(self, model: StepModel, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Run the function; return the sum of the loss, and the sums to log by name.

        Raises:
            UserError: it does not return such sums.
        """
        returned = self.function(model, batch)
        loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not _is_sum(loss) or not isinstance(metrics, Mapping) or not all(map(_is_sum, metrics.values())):
            raise UserError(
                f"training.step = {self.name!r}: must return the sum of the loss over the targets, a floating-point"
                f" tensor without dimensions, or a pair of it and a dict of such sums by name; {PAGE}"
            )
        return loss, metrics


def _is_sum(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not x.dim()


class StepModel:
    """The argument `model` of a user's step. Each call takes a batch, whose tokens may be others, and returns whole
    logits (B, L, V).

    Args:
        run: function of the trained model's batch and masks: its logits, and its side outputs, which are collected.
        masks: of the step's rows, by name; those of the reference model begin with its name, unless they are the same.
    """

    def __init__(
        self, own: OwnStep, model: nn.Module, masks: Any, run: Callable[[Any, Any], tuple[Tensor, Any]]
    ) -> None:
        self._own, self._model, self._run = own, model, run
        self._masks, self._masks_of_reference = divided(masks)
        self.side_outputs: list[Any] = []  # of the calls with gradients

    @property
    def has_adapters(self) -> bool:
        """Whether `without_adapters` can be called."""
        return self._own.adapters_off is not None

    @property
    def has_reference(self) -> bool:
        """Whether `reference` can be called."""
        return self._own.reference is not None

    def __call__(self, batch: Any) -> Tensor:
        """Return the logits of the trained model."""
        logits_BLV, side = self._run(batch, self._masks)
        self.side_outputs.append(side)
        return logits_BLV

    def without_adapters(self, batch: Any) -> Tensor:
        """Return the logits of the trained model without its adapters; they have no gradient."""
        if self._own.adapters_off is None:
            raise UserError(
                f"training.step = {self._own.name!r}: calls model.without_adapters, and the model has no adapters; set"
                " model.lora.rank, or call model.reference"
            )
        with torch.no_grad(), self._own.adapters_off(self._model):
            return self._model(batch.tokens_BL, batch.positions_BL, self._masks)  # type: ignore[no-any-return]

    def reference(self, batch: Any) -> Tensor:
        """Return the logits of the reference model; they have no gradient."""
        if self._own.reference is None:
            raise UserError(
                f"training.step = {self._own.name!r}: needs a frozen model next to the trained one; name its Hugging"
                " Face folder in reference.path"
            )
        with torch.no_grad():
            return self._own.reference(batch.tokens_BL, batch.positions_BL, self._masks_of_reference)  # type: ignore[no-any-return]


def divided(masks: Any) -> tuple[Any, Any]:
    """Return the masks of the trained model, and those of the reference model."""
    if not isinstance(masks, Mapping):
        return masks, masks
    prefix = f"{REFERENCE}."
    own = {name: mask for name, mask in masks.items() if not name.startswith(prefix)}
    others = {name.removeprefix(prefix): mask for name, mask in masks.items() if name.startswith(prefix)}
    return own, others or own


class Together(nn.Module):
    """The trained model and its reference as one module: all of the trained model's state has its own name, that of the
    other begins with `reference.`. Both keep their modules: this one only names them."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers = model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._modules = {**model._modules, REFERENCE: reference}
        self.training = model.training


def together(model: nn.Module, reference: nn.Module | None) -> nn.Module:
    """Return a module with the state of both; without a reference, the model itself."""
    return model if reference is None else Together(model, reference)
