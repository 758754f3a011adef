"""Adam and AdamW on this rank's shards, with moments in another dtype than the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from torchtitan_graph.capture.state import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")


class RoundedAdam(torch.optim.Adam):
    """Adam or AdamW whose moments have a dtype of their own, see `step_adam`."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step, unless `found_inf` is 1.0."""
        for group in self.param_groups:
            step_adam(group["params"], self.state, group, getattr(self, "found_inf", None))


@torch.no_grad()
def step_adam(
    params: Sequence[Tensor],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Update parameters by torch's own Adam on their local shards, with a group's settings, unless `found_inf` is 1.0.

    Moments of another dtype than the parameter's are converted to fp32, updated there, and rounded to the nearest; one
    parameter after the other, so that the fp32 copies are of one.
    """
    alike: list[list[Tensor]] = []
    for p in params:
        if p.grad is None:
            continue
        held = [local_part(x).detach() for x in (p, p.grad, *(state[p][key] for key in MOMENTS))]
        step = local_part(state[p]["step"])
        if len({x.dtype for x in held}) == 1:
            alike.append([*held, step])
            continue
        wide = torch.promote_types(held[0].dtype, torch.float32)
        used = [x.to(wide) for x in held]
        _adam([[*used, step]], group, found_inf)
        for kept, new in zip(held, used, strict=True):
            if kept is not new and kept is not held[1]:
                kept.copy_(new)
    if alike:
        _adam(alike, group, found_inf)


def _adam(tensors: Sequence[Sequence[Tensor]], group: Mapping[str, Any], found_inf: Tensor | None) -> None:
    """Call torch's Adam. Each parameter comes with its gradient, moments and step count."""
    params, gradients, means, squares, steps = (list(x) for x in zip(*tensors, strict=True))
    beta1, beta2 = group["betas"]
    adam(
        params,
        gradients,
        means,
        squares,
        [],
        steps,
        fused=group["fused"],
        foreach=group["foreach"],
        found_inf=found_inf,
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )
