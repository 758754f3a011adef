"""The warm-up, stable, decay learning-rate schedule."""

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_graph.config import job
from torchtitan_graph.log import logger

# The factor of the learning rate by the fraction `left` of the decay to come (1 at its start, 0 at its end).
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "sqrt": lambda left: 1 - math.sqrt(1 - left),
    "cosine": lambda left: 0.5 * (1 + math.cos(math.pi * (1 - left))),
}


def build_lr_scheduler(
    optimizer: torch.optim.Optimizer, config: job.LRScheduler, total_steps: int
) -> "WarmupStableDecay":
    """Build the `[lr_scheduler]` table's schedule for a run of `total_steps` optimizer steps.

    Call `step()` once after each `optimizer.step()`. `lr_scheduler.total_steps`, where it is set, replaces
    `total_steps`. With W warm-up steps, D decay steps and S steps in total, step s (the first is 1) is taken at
    `optimizer.lr` times

        s / W                                       for s <= W
        m + (1 - m) * decay((S + 1 - s) / D)        for s > S + 1 - D   (the argument never below 0)
        1                                           between

    where m is `min_lr_factor`, D is `round(decay_ratio * S)`, or all that follows the warm-up if `decay_ratio` is not
    set, and decay(x) is x (linear), 1 - sqrt(1 - x) (sqrt) or (1 + cos(pi * (1 - x))) / 2 (cosine). Neither the first
    nor the last step is lost on a learning rate of 0: the minimum would be reached at step S + 1.
    """
    return WarmupStableDecay(optimizer, config, total_steps)


def _factor_of(config: job.LRScheduler, total_steps: int) -> Callable[[int], float]:
    """Return the function from the number of steps done to the factor of the next one's learning rate."""
    if config.total_steps is not None:
        total_steps = config.total_steps
    num_warmup, num_decay = _phases(config, total_steps)
    decay, min_factor = DECAYS[config.decay_type], config.min_lr_factor

    def factor(num_done: int) -> float:
        step = num_done + 1
        if step <= num_warmup:
            return step / num_warmup
        if num_decay == 0 or step <= total_steps + 1 - num_decay:
            return 1.0
        left = max(total_steps + 1 - step, 0) / num_decay
        return min_factor + (1 - min_factor) * decay(left)

    return factor


def _phases(config: job.LRScheduler, total_steps: int) -> tuple[int, int]:
    """Return the numbers of warm-up and decay steps, cut to what `total_steps` has room for."""
    num_warmup = min(config.warmup_steps, total_steps)
    if num_warmup < config.warmup_steps:
        logger.warning(
            f"lr_scheduler.warmup_steps = {config.warmup_steps} is longer than the run: "
            f"all {total_steps} steps warm up and none decays"
        )
    num_rest = total_steps - num_warmup
    if config.decay_ratio is None:
        return num_warmup, num_rest
    num_decay = round(config.decay_ratio * total_steps)
    if num_decay > num_rest:
        logger.warning(
            f"lr_scheduler.decay_ratio = {config.decay_ratio} asks for {num_decay} of {total_steps} steps, "
            f"but only {num_rest} follow the warm-up: the decay is cut to those"
        )
    return num_warmup, min(num_decay, num_rest)


class WarmupStableDecay(LambdaLR):
    """A learning-rate schedule whose only state is the number of steps done.

    Everything else comes from the configuration: a run resumed with another `optimizer.lr` uses the new one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: job.LRScheduler, total_steps: int) -> None:
        self._config = config
        self.factor = _factor_of(config, total_steps)
        super().__init__(optimizer, self.factor)

    def set_total_steps(self, total_steps: int) -> None:
        """Set the number of steps that the schedule spans; the next step's rate follows it."""
        self.factor = _factor_of(self._config, total_steps)
        self.lr_lambdas = [self.factor] * len(self.lr_lambdas)
        self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, int]:
        """Return `{"num_steps_done": n}`."""
        return {"num_steps_done": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Set the optimizer to the learning rate of the step that follows the saved one."""
        self.last_epoch = state_dict["num_steps_done"]
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * self.factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
