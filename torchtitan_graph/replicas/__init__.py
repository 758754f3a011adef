"""Replica groups that outlive each other: who lives, the sum of their gradients, the vote, and healing.

torchft, an optional package, is imported by `manager`, `replicas`, `rounds` and `transport` alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported, which else logs ten lines a step


class TrainingState(NamedTuple):
    """Access to all state of a rank's training.

    tensors  returns this rank's parts of all tensors by name: they are sent to a replica that heals
    give     returns the rest, which can be written as JSON
    take     loads the tensors and the rest of another replica's same rank
    """

    tensors: Callable[[], dict[str, Tensor]]
    give: Callable[[], dict[str, Any]]
    take: Callable[[dict[str, Tensor], dict[str, Any]], None]
