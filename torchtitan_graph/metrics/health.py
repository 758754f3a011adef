"""Alarms on outlying values, and detection of stragglers."""

import collections
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_graph.device import device
from torchtitan_graph.log import logger

WINDOW, FEWEST = 100, 20  # steps that a value is compared with; and how many are needed first
# The least deviation, as a share of the median, for values that hardly vary.
LEAST_DEVIATION = 0.01
# Seconds. A rank that delays the others by less is not a straggler: the operating system alone takes that much now and
# then, which is a large share of a short step.
LEAST_WAIT_S = 0.1


def limit(recent: Sequence[float], threshold: float) -> float:
    """Return the value that lies `threshold` deviations above the median of recent ones; infinity for 0, and while
    there are few. The deviation is as in `Alarm`."""
    if len(recent) < FEWEST or not threshold:
        return math.inf
    median, deviation = _spread(recent)
    return median + threshold * deviation


def _spread(recent: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the deviation from it."""
    median = statistics.median(recent)
    deviation = 1.4826 * statistics.median(abs(x - median) for x in recent)
    return median, max(deviation, LEAST_DEVIATION * abs(median), 1e-12)


class Alarm:
    """Warnings of outliers: values above the median of the last 100 by more than `threshold` deviations.

    The deviation is the median distance to that median, scaled to a normal distribution's standard deviation. One
    outlier is one warning, however many steps it lasts. After a resume the window starts empty.
    """

    def __init__(self, name: str, option: str, threshold: float) -> None:
        self.name, self.option, self.threshold = name, option, threshold
        self._recent: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._is_raised = False

    def watch(self, step: int, value: float) -> None:
        """Compare a step's value with the window, and add it."""
        if len(self._recent) >= FEWEST and self.threshold > 0:
            median, deviation = _spread(self._recent)
            distance = (value - median) / deviation
            if distance > self.threshold and not self._is_raised:
                logger.warning(
                    f"step {step}: the {self.name} leaps to {value:.4g}, {distance:.0f} deviations above the median "
                    f"{median:.4g} of the last {len(self._recent)} steps ({self.option} = {self.threshold:g})"
                )
            self._is_raised = distance > self.threshold
        self._recent.append(value)


class Leaps:
    """The losses and gradient norms of the last 100 steps, skipped ones too, and the limits of the next step's.

    A lasting rise is therefore not skipped for ever. Saved and restored, so that a resumed run skips the same steps.
    After `patience` skipped steps in a row the run `is_lost`; 0: never. The weights are those after step `weights_of`.
    """

    def __init__(self, threshold: float, patience: int = 0) -> None:
        self.threshold, self.patience = threshold, patience
        self.num_skipped = self.num_in_a_row = self.num_roll_backs = self.weights_of = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._norms: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def limits(self) -> tuple[float, float]:
        """Return the largest loss and norm of a step that is taken."""
        return limit(self._losses, self.threshold), limit(self._norms, self.threshold)

    def add(self, step: int, loss: float, grad_norm: float, skipped: bool) -> None:
        """Add a step, and warn on rank 0 if it was skipped."""
        if skipped and not (dist.is_initialized() and dist.get_rank()):
            limits = " and ".join(f"{x:.4g}" for x in self.limits())
            logger.warning(
                f"step {step} is skipped: its loss {loss:.4g} or its gradient norm {grad_norm:.4g} is above {limits}, "
                f"{self.threshold:g} deviations above the medians (training.skip_leaps)"
            )
        self.num_skipped += skipped
        self.num_in_a_row = self.num_in_a_row + 1 if skipped else 0
        self.weights_of = self.weights_of if skipped else step
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def is_lost(self) -> bool:
        """Return whether so many steps in a row were skipped that the run is to go back."""
        return 0 < self.patience <= self.num_in_a_row

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_skipped": self.num_skipped,
            "in_a_row": self.num_in_a_row,
            "roll_backs": self.num_roll_backs,
            "weights_of": self.weights_of,
            "losses": [*self._losses],
            "norms": [*self._norms],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped = state["num_skipped"]
        self.num_in_a_row, self.num_roll_backs = state.get("in_a_row", 0), state.get("roll_backs", 0)
        self.weights_of = state.get("weights_of", 0)
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])


def compare_ranks(step: int, step_s: float, work_s: float, data_s: float, share: float) -> dict[str, float]:
    """Return the busy seconds of the slowest and the median rank in a step, all-gathered; rank 0 warns of a straggler,
    a rank busy longer than the median rank by more than `share` of the step, and by a tenth of a second.

    Args:
        step_s: seconds that the step took, much the same on all ranks.
        work_s: seconds in which this rank's graphs worked, waits for other ranks left out.
        data_s: seconds in which this rank waited for its own data.
    """
    times = torch.empty(dist.get_world_size(), 2, device=device())
    dist.all_gather(list(times.split(1)), torch.tensor([[work_s, data_s]], device=device()))
    busy = times.sum(1).tolist()
    slowest = max(range(len(busy)), key=busy.__getitem__)
    work, data = times[slowest].tolist()
    median = statistics.median_low(busy)
    if busy[slowest] - median > max(share * step_s, LEAST_WAIT_S) and dist.get_rank() == 0:
        logger.warning(
            f"step {step}: the others wait for rank {slowest}: it worked {work:.3f} s and waited {data:.3f} s for its "
            f"data, the median rank took {median:.3f} s for both, of a step of {step_s:.3f} s "
            f"(metrics.straggler_share = {share:g})"
        )
    return {"slowest_rank": slowest, "slowest_busy_s": busy[slowest], "slowest_data_s": data, "median_busy_s": median}
