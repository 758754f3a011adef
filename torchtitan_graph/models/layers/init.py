"""Initial weights that depend on the seed and the parameter's name alone, not on layout, rank or device count."""

import hashlib

import torch
from torch import Tensor, nn

from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.storage import set_local


def generator_for(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Give the parameter's own generator."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_weight(
    name: str, shape: torch.Size, std: float | None, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Draw one parameter in full: normal, cut at three standard deviations; ones where `std` is None; zeros where 0."""
    full = torch.empty(shape, device=device, dtype=dtype)
    if std is None:
        return full.fill_(1.0)
    if std == 0.0:
        return full.zero_()
    return nn.init.trunc_normal_(full, 0.0, std, -3 * std, 3 * std, generator=generator_for(seed, name, device))


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Draw every parameter of a materialized model in full, one at a time, and keep this rank's part of it; buffers
    are zero."""
    for name, parameter in model.named_parameters():
        std = model.initial_std(name)
        full = initial_weight(name, parameter.shape, std, seed, parameter.device, torch.float32)
        set_local(parameter, full)  # type: ignore[arg-type]
    for buffer in model.buffers():
        buffer.zero_()
