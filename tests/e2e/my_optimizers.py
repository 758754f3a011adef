"""An optimizer of a user's own, found on PYTHONPATH by `optimizer.name = "my_optimizers.Lion"`."""

import errno
import resource
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Lion(torch.optim.Optimizer):
    """Go by the sign of an average of gradient and momentum (Chen et al., 2023)."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["momentum"].lerp(param.grad, 1 - group["betas"][0])
                param.sub_(update.sign(), alpha=group["lr"])
                state["momentum"].lerp_(param.grad, 1 - group["betas"][1])


class BreaksInStep3(Lion):
    """Raise an error of its own in the third step on the last rank, or at once."""

    steps = -1  # the first is the rehearsal

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        if weight_decay > 1:
            raise ValueError("too many values to unpack")
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("too many values to unpack")
        super().step()


class FillsTheDisk(Lion):
    """Leave no room for a file of more than 30 KB, as a full disk would."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class LosesItsStorage(Lion):
    """Raise what a file server that is away does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        raise OSError(errno.ESTALE, "Stale file handle")
