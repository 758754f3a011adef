"""Optimizers as users write them, good and bad."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Sign(torch.optim.Optimizer):
    """Go by the sign of the momentum; a new weight by chance, so that the random state counts."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = param.grad.clone()  # not zeros: the first step makes it
                    state["noise"] = torch.rand(())
                state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                param.sub_(state["momentum"].sign() * float(state["noise"]), alpha=group["lr"])


class CountsInPython(Sign):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["count"] = 1


class CountsInGroup(Sign):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class KeepsLocal(Sign):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for param, state in self.state.items():
            state["own"] = torch.zeros_like(param.to_local() if isinstance(param, DTensor) else param)


class HasGlobal(Sign):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        self.state["everything"] = {"count": torch.zeros(())}  # type: ignore[index]


class NeedsClosure(Sign):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class WithoutRate(Sign):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
