"""Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a frozen weight W acts as W + scale * B @ A.

Note [Adapters]
A weight keeps its name, so plans, checkpoints and Hugging Face keys of the base model stay as they are. Its adapter is
two parameters next to it: `NAME.lora_A.weight` (r, in) and `NAME.lora_B.weight` (out, r) of a linear layer NAME, or of
a stack W of experts `W_lora_A` (E, r, in) and `W_lora_B` (E, out, r). Since B starts as zeros, so does the change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_graph.ops.experts import grouped_mm

FACTORS = ("lora_A", "lora_B")


class Factor(nn.Linear):
    """One of the two matrices of an adapter."""


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: (..., D) -> (..., F). Its own parameters are those of the layer it replaces.

    Args:
        old: the layer.
        rank: columns of B and rows of A.
        scale: multiplies their product.
    """

    def __init__(self, old: nn.Linear, rank: int, scale: float):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = old.in_features, old.out_features, scale
        self.weight, self.bias = old.weight, old.bias
        self.lora_is_off = False
        self.lora_A = Factor(old.in_features, rank, bias=False, device=old.weight.device)
        self.lora_B = Factor(rank, old.out_features, bias=False, device=old.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.lora_is_off:
            return super().forward(x)
        # The scale multiplies the narrow product: fewer numbers than the layer's result.
        return super().forward(x) + self.lora_B(self.lora_A(x) * self.scale)


def add_to_stack(experts: nn.Module, weight: str, rank: int, scale: float, *, is_transposed: bool) -> None:
    """Add an adapter to a stack of experts' weights, (E, out, in), or (E, in, out) where `is_transposed`."""
    E, F, D = experts.get_parameter(weight).shape
    if is_transposed:
        F, D = D, F
    stack = experts.get_parameter(weight)
    experts.register_parameter(f"{weight}_lora_A", nn.Parameter(stack.new_empty(E, rank, D)))
    experts.register_parameter(f"{weight}_lora_B", nn.Parameter(stack.new_empty(E, F, rank)))
    experts.lora_scale = scale  # type: ignore[assignment]
    experts.lora_is_off = False  # type: ignore[assignment]


def add_adapter(experts: nn.Module, weight: str, x_SD: Tensor, y_SF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return experts' products with a stack of weights, plus its adapter's, if it has one."""
    if (A_ERD := getattr(experts, f"{weight}_lora_A", None)) is None or experts.lora_is_off:
        return y_SF
    low_SR = grouped_mm(x_SD, A_ERD, offsets_E, transposed=True) * experts.lora_scale
    return y_SF + grouped_mm(low_SR, getattr(experts, f"{weight}_lora_B"), offsets_E, transposed=True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Have a model compute inside as if it had no adapters."""
    adapted = [module for module in model.modules() if hasattr(module, "lora_is_off")]
    for module in adapted:
        module.lora_is_off = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in adapted:
            module.lora_is_off = False  # type: ignore[assignment]


class Adapter(NamedTuple):
    """The adapter of a weight: the names of its matrices, their scale, and whether the weight is (in, out)."""

    A: str
    B: str
    scale: float
    is_transposed: bool = False


def merged(weight: Tensor, A: Tensor, B: Tensor, adapter: Adapter) -> Tensor:
    """Return a whole weight, or a stack of them, with its adapter's change, in fp32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    change = adapter.scale * (B.to(wide) @ A.to(wide))
    return weight.to(wide) + (change.transpose(-1, -2) if adapter.is_transposed else change)


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return a model's adapters, by the names of the weights that they change."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            found[f"{name}.weight"] = Adapter(f"{name}.lora_A.weight", f"{name}.lora_B.weight", module.scale)
        elif hasattr(module, "lora_scale"):
            weights = [leaf.removesuffix("_lora_A") for leaf in module._parameters if leaf.endswith("_lora_A")]
            is_transposed = bool(getattr(module, "is_transposed", False))
            for weight in (f"{name}.{leaf}" for leaf in weights):
                found[weight] = Adapter(f"{weight}_lora_A", f"{weight}_lora_B", module.lora_scale, is_transposed)  # type: ignore[arg-type]
    return found


def adapter_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters of a model's adapters."""
    return {name for adapter in adapters_of(model).values() for name in (adapter.A, adapter.B)}


def is_adapter(model: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return isinstance(module, Factor) or (leaf.endswith(FACTORS) and hasattr(module, "lora_scale"))
