"""Initial weights that depend on the seed and the parameter's name alone, not on layout, rank or device count."""

import hashlib

import torch
from torch import Tensor, nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.torch_private.tensors import num_writes
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.storage import set_local


def generator_for(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Return the parameter's own generator."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_weight(
    name: str, shape: torch.Size, std: float | None, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return one parameter's full initial values: normal, cut at 3 `std`; ones where `std` is None, zeros where 0."""
    full = torch.empty(shape, device=device, dtype=dtype)
    if std is None:
        return full.fill_(1.0)
    if std == 0.0:
        return full.zero_()
    return nn.init.trunc_normal_(full, 0.0, std, -3 * std, 3 * std, generator=generator_for(seed, name, device))


@torch.no_grad()
def initialize(model: Decoder, seed: int, device: torch.device | None = None) -> None:
    """Draw every parameter of a materialized model in full, one at a time, and keep this rank's shard; fill the
    buffers. The numbers depend on the kind of `device` that draws them: by default the parameter's."""
    for name, parameter in model.named_parameters():
        std = model.initial_std(name)
        full = initial_weight(name, parameter.shape, std, seed, device or parameter.device, torch.float32)
        set_local(parameter, full)  # type: ignore[arg-type]
    initialize_buffers(model)


@torch.no_grad()
def initialize_buffers(model: nn.Module) -> None:
    """Fill the buffers of every module that has an `init_buffers`.

    Raises:
        UserError: a buffer that none has filled: its values from building the model on meta are lost.
    """
    before = {name: (buffer, num_writes(buffer)) for name, buffer in model.named_buffers()}
    for module in model.modules():
        fill = getattr(module, "init_buffers", None)
        if fill is not None:
            fill()
    for name, buffer in model.named_buffers():
        if name in before and before[name][0] is buffer and before[name][1] == num_writes(buffer):
            raise UserError(
                f"the buffer {name} has no values: a model is built without memory, so what __init__ computes is lost; "
                "give its module a method init_buffers(self) that fills it in place, or compute it in forward"
            )
