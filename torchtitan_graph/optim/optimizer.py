"""Build AdamW or Adam over a model's parameters."""

import torch
from torch import nn

from torchtitan_graph.config import job

OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


def build_optimizer(model: nn.Module, config: job.Optimizer) -> torch.optim.Optimizer:
    """Build the `[optimizer]` table's optimizer over every parameter of `model` that takes gradients.

    The optimizer holds the parameter objects themselves, so the model must be materialised: parameters on the meta
    device are refused. Its state (two moments of the parameter's layout, and a step count) is allocated here and not
    in the first step, so that running out of memory is found out now and a checkpoint can be read straight into it.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    assert not any(param.is_meta for param in params), "materialise the model before building its optimizer"
    optimizer = OPTIMIZERS[config.name](
        params,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
    for param in params:
        optimizer.state[param] = _initial_state(param, fused=config.implementation == "fused")
    return optimizer


def _initial_state(param: torch.Tensor, fused: bool) -> dict[str, torch.Tensor]:
    """Return what Adam's own first step would allocate for `param`."""
    # The fused kernel reads the step count on the parameter's device; the others read it on the host, where a CPU
    # tensor costs no synchronisation.
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(param, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
    }
