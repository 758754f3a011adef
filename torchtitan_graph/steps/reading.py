"""The asynchronous device-to-host copy of a step's scalars, waited for once the device has its next work."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Read(NamedTuple):
    """The scalars of a step on the host, once the device has computed it.

    losses      of each rank
    of_saves    each rank's state of its saves
    signal      that asked a rank to stop, or 0
    grad_norm   of all ranks, before clipping
    num_tokens  targets of all ranks
    by_source   those of each corpus, where the data is a mixture of several
    skips       whether the step is skipped, for a number that is not finite or above its limit
    """

    losses: list[float]
    of_saves: list[int]
    signal: int
    grad_norm: float
    num_tokens: float
    by_source: list[float]
    skips: bool = False

    def not_finite(self) -> str:
        """Return a text with the ranks whose loss is not finite, and the norm if it is not; "" if all are finite."""
        ranks = [rank for rank, loss in enumerate(self.losses) if not math.isfinite(loss)]
        losses = [f"the loss is not finite on ranks {ranks}"] * bool(ranks)
        norm = [f"the gradient norm is {self.grad_norm}"] * (not math.isfinite(self.grad_norm))
        return ", ".join(losses + norm)


class Reading:
    """The asynchronous device-to-host copy of a step's scalars. `stops` is on the device, 1.0 to skip the step."""

    def __init__(
        self,
        gathered: Tensor,
        grad_norm: Tensor,
        num_tokens: Tensor,
        by_source: Tensor | None = None,
        limits: Tensor | None = None,
        stops: Tensor | None = None,
    ):
        """Start the copy.

        Args:
            gathered: (ranks, 3): loss, state of saves and signal of each.
            by_source: (corpora,) targets of all ranks; may be in the host's memory.
            limits: (2,) of the sum of the losses, and of the norm; above one the step is skipped.
            stops: whether it is, if that is decided.
        """
        device, self._num_ranks = gathered.device, len(gathered)
        parts = [gathered.T, grad_norm, num_tokens, *([] if by_source is None else [by_source])]
        # Counts are exact in fp64.
        there = torch.cat([x.to(device, torch.float64, non_blocking=True).flatten() for x in parts])
        if stops is None:
            checked = torch.stack([there[: self._num_ranks].sum(), there[3 * self._num_ranks]])
            stops = (~checked.isfinite() | (checked > (torch.inf if limits is None else limits))).any().float()
        self.stops = stops
        there = torch.cat([stops.to(device, torch.float64).reshape(1), there])
        self._here = there.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._copied = torch.cuda.Event() if there.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> Read:
        """Wait for the copy, not for work launched after it, and return the scalars."""
        if self._copied is not None:
            self._copied.synchronize()
        (stops, *numbers), ranks = self._here.tolist(), self._num_ranks
        losses, of_saves, signals = (numbers[i * ranks : (i + 1) * ranks] for i in range(3))
        grad_norm, num_tokens, *by_source = numbers[3 * ranks :]
        return Read(losses, [int(x) for x in of_saves], int(max(signals)), grad_norm, num_tokens, by_source, stops > 0)
