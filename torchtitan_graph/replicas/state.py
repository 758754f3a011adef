"""A rank's state as replicas exchange it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class TrainingState(NamedTuple):
    """Access to all state of a rank's training.

    tensors  returns this rank's parts of all tensors by name: they are sent to a replica that heals
    give     returns the rest, which can be written as JSON
    take     loads the tensors and the rest of another replica's same rank
    """

    tensors: Callable[[], dict[str, Tensor]]
    give: Callable[[], dict[str, Any]]
    take: Callable[[dict[str, Tensor], dict[str, Any]], None]
