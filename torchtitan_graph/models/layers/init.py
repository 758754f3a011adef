"""Initial weights that depend on the seed and the parameter's name alone, not on layout, rank or device count.

Note [Initial values]
A module's class says how its parameters start, where that is not `STD`: `INITIAL` has the names of parameters, its own
and those of modules inside, as `PLAN` has; the outermost class that names a parameter decides. torch's classes are
below. Where none says it, a `bias` starts as zeros, and a `weight` of one dimension, another library's norm, as ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.lora import is_adapter, packed_weights
from torchtitan_graph.ops.packed import pack, wide_shape
from torchtitan_graph.parallel.storage import set_local
from torchtitan_graph.torch_private.tensors import num_writes


class Constant(NamedTuple):
    """Initial values that are all the same."""

    value: float


class Residual(NamedTuple):
    """Initial values of a weight whose product is added to the residual stream: their deviation, before it is divided
    by the square root of the number of such products, two a block, so that the stream's variance doesn't grow."""

    std: float


class Drawn(NamedTuple):
    """Initial values by a function of the shape and a seed, on the CPU."""

    draw: Callable[[torch.Size, int], Tensor]


STD = 0.02
RESIDUAL = Residual(STD)
Initial = float | Constant | Residual | Drawn | None  # a standard deviation, 0 for zeros; None for ones
_TORCH: Mapping[type[nn.Module], Mapping[str, Initial]] = {
    nn.Linear: {"weight": STD, "bias": 0.0},
    nn.Embedding: {"weight": STD},
    nn.RMSNorm: {"weight": None},
    nn.LayerNorm: {"weight": None, "bias": 0.0},
    nn.GroupNorm: {"weight": None, "bias": 0.0},
    nn.PReLU: {"weight": Constant(0.25)},
}


def said_initial(model: nn.Module, name: str) -> tuple[bool, Initial]:
    """Return whether a class says how a parameter starts, and how it does. See Note [Initial values]."""
    if is_adapter(model, name):
        return True, Drawn(_kaiming) if name.removesuffix(".weight").endswith("lora_A") else 0.0
    module, rest = model, name
    while True:
        torch_says = [says for kind, says in _TORCH.items() if isinstance(module, kind)]
        for says in (getattr(module, "INITIAL", {}), *torch_says):
            if rest in says:
                return True, says[rest]
        child, dot, below = rest.partition(".")
        if not dot:
            is_scale = child == "weight" and model.get_parameter(name).dim() == 1
            return False, 0.0 if child == "bias" else None if is_scale else STD
        module, rest = module.get_submodule(child), below


def _kaiming(shape: torch.Size, seed: int) -> Tensor:
    """Return values of a matrix that rows of `shape[-1]` numbers are multiplied by, as torch's linear layers and PEFT's
    adapters start: uniform, kaiming with a = sqrt(5)."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def generator_for(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Return the parameter's own generator."""
    return torch.Generator(device).manual_seed(_seed_of(seed, name))


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initial_weight(
    name: str, shape: torch.Size, initial: Initial, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return one parameter's full initial values: normal, cut at three standard deviations, or constant."""
    assert not isinstance(initial, Residual), name  # the model knows its depth
    if isinstance(initial, Drawn):
        return initial.draw(shape, _seed_of(seed, name)).to(device, dtype)
    full = torch.empty(shape, device=device, dtype=dtype)
    if initial is None or isinstance(initial, Constant):
        return full.fill_(1.0 if initial is None else initial.value)
    if initial == 0.0:
        return full.zero_()
    generator = generator_for(seed, name, device)
    return nn.init.trunc_normal_(full, 0.0, initial, -3 * initial, 3 * initial, generator=generator)


@torch.no_grad()
def initialize(model: nn.Module, seed: int, device: torch.device | None = None) -> None:
    """Draw every parameter of a materialized `Decoder` in full, one at a time, and keep this rank's shard; fill the
    buffers. The numbers depend on the kind of `device` that draws them: by default the parameter's."""
    for name, full in initial_values(model, seed, device):
        set_local(model.get_parameter(name), full)  # type: ignore[arg-type]
    initialize_buffers(model)


def initial_values(model: nn.Module, seed: int, device: torch.device | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and its initial values, whole: fp32, or the bytes of a packed weight."""
    packings = packed_weights(model)
    for name, parameter in model.named_parameters():
        drawn_on, initial = device or parameter.device, model.initial_std(name)  # type: ignore[operator]
        packing = packings.get(name)
        shape = wide_shape(parameter.shape, packing) if packing else parameter.shape
        full = initial_weight(name, shape, initial, seed, drawn_on, torch.float32)
        yield name, pack(full, packing) if packing else full


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


def allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Allocate memory for a model on meta: tied parameters stay tied, unlike with `to_empty`. Buffers are
    initialized."""
    new = {
        p: nn.Parameter(torch.empty(p.shape, dtype=dtype if p.is_floating_point() else p.dtype), p.requires_grad)
        for p in model.parameters()
    }
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = new[parameter]
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    initialize_buffers(model)
