"""Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a frozen weight W acts as W + scale * B @ A.

Note [Adapters]
A weight keeps its name, so plans, checkpoints and Hugging Face keys of the base model stay as they are. Its adapter is
two parameters next to it: `NAME.lora_A.weight` (r, in) and `NAME.lora_B.weight` (out, r) of a linear layer NAME, or of
a stack W of experts `W_lora_A` (E, r, in) and `W_lora_B` (E, out, r). Since B starts as zeros, so does the change.

W itself may be packed in 4 or 8 bits, see ops/packed.py: then the parameter of its name has the bytes, and it is
unpacked where it is used, in forward and again in backward (QLoRA, Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_graph.ops.experts import grouped_mm
from torchtitan_graph.ops.packed import packed_shape, unpack, wide_shape

FACTORS = ("lora_A", "lora_B")


class Factor(nn.Linear):
    """One of the two matrices of an adapter."""


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: (..., D) -> (..., F). Its own parameters are those of the layer it replaces.

    Args:
        old: the layer.
        rank: columns of B and rows of A.
        scale: multiplies their product.
        packing: of the weight, "" where it is plain numbers.
    """

    def __init__(self, old: nn.Linear, rank: int, scale: float, packing: str = ""):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = old.in_features, old.out_features, scale
        self.packing = packing
        self.weight, self.bias = _held(old.weight, packing), old.bias  # type: ignore[arg-type]
        self.lora_is_off = False
        self.lora_A = Factor(old.in_features, rank, bias=False, device=old.weight.device)
        self.lora_B = Factor(rank, old.out_features, bias=False, device=old.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.lora_is_off:
            return self._base(x)
        # The scale multiplies the narrow product: fewer numbers than the layer's result.
        return self._base(x) + self.lora_B(self.lora_A(x) * self.scale)

    def _base(self, x: Tensor) -> Tensor:
        if not self.packing:
            return super().forward(x)
        y = _Product.apply(x, self.weight, self.packing)
        return y if self.bias is None else y + self.bias


def _held(weight: nn.Parameter, packing: str) -> nn.Parameter:
    """Return the parameter that holds a weight, its values not yet those."""
    if not packing:
        return weight
    shape = packed_shape(weight.shape, packing)
    return nn.Parameter(weight.new_empty(shape, dtype=torch.uint8), requires_grad=False)


class _Product(torch.autograd.Function):
    """x @ W.T of a packed weight; backward unpacks it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed_FD: Tensor, packing: str) -> Tensor:
        ctx.save_for_backward(packed_FD)
        ctx.packing = packing
        return F.linear(x, unpack(packed_FD, packing, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (packed_FD,) = ctx.saved_tensors
        return grads[0] @ unpack(packed_FD, ctx.packing, grads[0].dtype), None, None


class _GroupedProduct(torch.autograd.Function):
    """The same of each group's rows and its own weight."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, packed_EFD: Tensor, offsets_E: Tensor, packing: str) -> Tensor:
        ctx.save_for_backward(packed_EFD, offsets_E)
        ctx.packing = packing
        return grouped_mm(x_SD, unpack(packed_EFD, packing, x_SD.dtype), offsets_E, transposed=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        packed_EFD, offsets_E = ctx.saved_tensors
        dy_SF = grads[0].contiguous()
        weight_EFD = unpack(packed_EFD, ctx.packing, dy_SF.dtype)
        return grouped_mm(dy_SF, weight_EFD, offsets_E, transposed=False), None, None, None


def product_of_stack(experts: nn.Module, weight: str, x_SD: Tensor, offsets_E: Tensor) -> Tensor:
    """Return rows times the transposed weights of a stack (E, out, in), plus its adapter's product, if it has one."""
    stack = getattr(experts, weight)
    if packing := packing_of_stack(experts, weight):
        y_SF = _GroupedProduct.apply(x_SD, stack, offsets_E, packing)
    else:
        y_SF = grouped_mm(x_SD, stack, offsets_E, transposed=True)
    return add_adapter(experts, weight, x_SD, y_SF, offsets_E)


def packing_of_stack(experts: nn.Module, weight: str) -> str:
    """Return how a stack of experts' weights is packed, "" where it is not."""
    return getattr(experts, "lora_packing", "") if hasattr(experts, f"{weight}_lora_A") else ""


def add_to_stack(
    experts: nn.Module, weight: str, rank: int, scale: float, packing: str = "", *, is_transposed: bool
) -> None:
    """Add an adapter to a stack of experts' weights, (E, out, in), or (E, in, out) where `is_transposed`."""
    E, out, D = experts.get_parameter(weight).shape
    if is_transposed:
        out, D = D, out
    stack = experts.get_parameter(weight)
    experts.register_parameter(f"{weight}_lora_A", nn.Parameter(stack.new_empty(E, rank, D)))
    experts.register_parameter(f"{weight}_lora_B", nn.Parameter(stack.new_empty(E, out, rank)))
    experts.register_parameter(weight, _held(stack, packing))
    experts.lora_scale, experts.lora_packing = scale, packing  # type: ignore[assignment]
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
    """The adapter of a weight: the names of its matrices, their scale, how the weight is packed, and whether it is (in,
    out)."""

    A: str
    B: str
    scale: float
    packing: str = ""
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
            A, B = (f"{name}.{factor}.weight" for factor in FACTORS)
            found[f"{name}.weight"] = Adapter(A, B, module.scale, module.packing)
        elif hasattr(module, "lora_scale"):
            weights = [leaf.removesuffix("_lora_A") for leaf in module._parameters if leaf.endswith("_lora_A")]
            is_transposed = bool(getattr(module, "is_transposed", False))
            how: Any = module.lora_scale, module.lora_packing, is_transposed
            for weight in (f"{name}.{leaf}" for leaf in weights):
                found[weight] = Adapter(f"{weight}_lora_A", f"{weight}_lora_B", *how)
    return found


def packed_weights(model: nn.Module) -> dict[str, str]:
    """Return how a model's packed weights are packed, by name."""
    return {name: adapter.packing for name, adapter in adapters_of(model).items() if adapter.packing}


def num_elements(model: nn.Module, only_trained: bool = False) -> int:
    """Return the number of a model's parameters; of packed weights the numbers, not the bytes."""
    packings = packed_weights(model)
    chosen = [(n, p) for n, p in model.named_parameters() if p.requires_grad or not only_trained]
    return sum(wide_shape(p.shape, packings[n]).numel() if n in packings else p.numel() for n, p in chosen)


def adapter_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters of a model's adapters."""
    return {name for adapter in adapters_of(model).values() for name in (adapter.A, adapter.B)}


def is_adapter(model: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return isinstance(module, Factor) or (leaf.endswith(FACTORS) and hasattr(module, "lora_scale"))
