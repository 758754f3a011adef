"""The float8 linear layer, and the state that belongs to it: workspaces, and what delayed scaling has seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_graph.parallel.layout import FSDP, Layout
from torchtitan_graph.parallel.storage import Precision, Storage
from torchtitan_graph.quantize.products import (
    DELAYED,
    E4M3,
    Recipe,
    largest,
    linear,
    quantize,
    scale_for,
)

AMAX = ".amax"  # ends the name of the state in which a layer tells the largest magnitudes of a step
HISTORY = 16  # steps whose largest magnitudes delayed scaling keeps


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8. Its parameters are the names and numbers of the layer that it replaces.

    weight_q, weight_scale  the weight's workspace; without, each call quantises the weight. Not saved
    amax, amax_history      with delayed scaling: what the gradient of the first tells, of activations and of the
                            result's gradient, the second keeps of the last steps. That is saved
    """

    weight_q: Tensor | None
    weight_scale: Tensor | None
    amax: Tensor | None
    amax_history: Tensor | None

    def __init__(self, old: nn.Linear, recipe: Recipe):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.recipe = old.in_features, old.out_features, recipe
        self.weight, self.bias, device = old.weight, old.bias, old.weight.device
        is_delayed = recipe.scaling == DELAYED
        slot = torch.zeros(2, device=device, requires_grad=True) if is_delayed else None
        self.register_buffer("weight_q", None, persistent=False)
        self.register_buffer("weight_scale", None, persistent=False)
        self.register_buffer("amax", slot, persistent=False)
        self.register_buffer("amax_history", torch.zeros(HISTORY, 2, device=device) if is_delayed else None)

    def init_buffers(self) -> None:
        """Have seen nothing; a workspace is filled before it is used."""
        for buffer in self._buffers.values():
            if buffer is not None:
                buffer.zero_()

    def add_workspace(self) -> None:
        """Hold a workspace, of this rank's part of the weight under tensor parallelism."""
        weight = _part(self.weight)
        self.weight_q = torch.empty_like(weight, dtype=E4M3, requires_grad=False)
        self.weight_scale = torch.empty((), device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        past = None if self.amax_history is None else self.amax_history.amax(0)
        y, *_ = linear(x, self.weight, self.recipe, self.weight_q, self.weight_scale, self.amax, past)
        return y if self.bias is None else y + self.bias


def _part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@dataclasses.dataclass(frozen=True)
class Float8:
    """Which linear layers of a model multiply in float8, by name, and how."""

    names: tuple[str, ...]
    recipe: Recipe


def convert(model: nn.Module, float8: Float8) -> None:
    """Replace linear layers by those that multiply in float8, in place; parameters stay the same ones."""
    for name in float8.names:
        owner, _, leaf = name.rpartition(".")
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear), name
        setattr(model.get_submodule(owner), leaf, Float8Linear(old, float8.recipe))


def add_workspaces(model: nn.Module, storages: Mapping[str, Storage]) -> dict[str, Storage]:
    """Let the layers whose weights have one scale hold workspaces, and give how these lie at rest, as their weights."""
    found = {}
    by_parameter: dict[Tensor, Storage] = dict(zip(model.parameters(), storages.values(), strict=True))
    for name, layer in _layers(model).items():
        if not layer.recipe.by_row:
            layer.add_workspace()
            storage = by_parameter[layer.weight]
            found[f"{name}.weight_q"] = dataclasses.replace(
                storage, precision=Precision(E4M3, E4M3, E4M3), is_trained=False
            )
    return found


def _layers(model: nn.Module) -> dict[str, Float8Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}


class Quantized:
    """The state of a model's float8 layers, which changes from one optimizer step to the next, outside the graph."""

    def __init__(self, model: nn.Module, layout: Layout, compute: torch.dtype) -> None:
        """Take a model at rest, and the dtype that its weights are computed in: a workspace is made as a call without
        one would make it."""
        layers = _layers(model)
        self._cached = [layer for layer in layers.values() if layer.weight_q is not None]
        self._delayed = {f"{name}{AMAX}": layer for name, layer in layers.items() if layer.amax is not None}
        self._layout, self._compute, self._is_fresh = layout, compute, False

    @torch.no_grad()
    def refresh(self, anew: bool = True) -> None:
        """Quantise the weights, in place; all ranks together. If not `anew`, only if a step was taken since.

        A scale is one of all ranks that hold a part of the weight. Under tensor parallelism each rank multiplies its
        own part, by that part's scale.
        """
        if not self._cached or (self._is_fresh and not anew):
            return
        weights = [_part(layer.weight) for layer in self._cached]
        magnitudes = torch.stack([_largest(weight.to(self._compute)) for weight in weights])
        if self._layout.degree(FSDP) > 1:
            dist.all_reduce(magnitudes, dist.ReduceOp.MAX, self._layout.group(FSDP))
        for layer, weight, scale in zip(self._cached, weights, scale_for(magnitudes, E4M3), strict=True):
            assert layer.weight_q is not None and layer.weight_scale is not None
            _part(layer.weight_q).copy_(quantize(weight.to(self._compute), scale, E4M3))
            layer.weight_scale.copy_(scale)
        self._is_fresh = True

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep the largest magnitudes of a step's microbatches, over all ranks, and give the rest of its state."""
        self._is_fresh = False
        if self._delayed:
            seen = torch.stack([state[name] for name in self._delayed])
            dist.all_reduce(seen, dist.ReduceOp.MAX)
            for layer, row in zip(self._delayed.values(), seen, strict=True):
                assert layer.amax_history is not None
                layer.amax_history.copy_(torch.cat([row[None], layer.amax_history[:-1]]))
        return {name: x for name, x in state.items() if name not in self._delayed}


def _largest(weight: Tensor) -> Tensor:
    return largest(weight) if weight.numel() else torch.zeros((), device=weight.device)


def combine(total: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add a microbatch's state to that of those before it: counts add up, of magnitudes the larger counts."""
    return {
        name: torch.maximum(total.get(name, torch.zeros_like(x)), x) if name.endswith(AMAX) else total.get(name, 0) + x
        for name, x in more.items()
    }
