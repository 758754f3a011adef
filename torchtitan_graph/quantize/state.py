"""The state of a model's float8 layers from step to step: workspaces, and delayed scaling's magnitudes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_graph.capture.state import local_part
from torchtitan_graph.capture.step import SLOT
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.moe import Experts
from torchtitan_graph.parallel.layout import DP_REPLICATE, FSDP, TP, Layout
from torchtitan_graph.parallel.storage import Precision, Storage
from torchtitan_graph.quantize.layers import Float8Experts, Kept, Linear, kept_weights
from torchtitan_graph.quantize.products import E4M3, Recipe, largest_of_weight, over, quantize, scale_for

_WORKSPACE = ".weight_q"


@dataclasses.dataclass(frozen=True)
class Float8:
    """The linear layers and experts of a model that multiply in float8, by name, with their recipes."""

    layers: Mapping[str, Recipe]


def convert(model: nn.Module, float8: Float8) -> None:
    """Replace layers by those that multiply in float8, in place, for those that a pipeline's stage has; parameters are
    reused."""
    there = dict(model.named_modules())
    new: dict[nn.Module, nn.Module] = {}
    for name in float8.layers.keys() & there.keys():
        old, recipe = there[name], float8.layers[name]
        new[old] = Float8Experts(old, recipe) if isinstance(old, Experts) else Linear(old, recipe)  # type: ignore[arg-type]
    for name, old in [*model.named_modules(remove_duplicate=False)]:  # a layer may have several
        if old in new:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, new[old])


def add_workspaces(model: nn.Module, storages: Mapping[str, Storage]) -> dict[str, Storage]:
    """Add workspaces to the layers with tensorwise scaling, and return the workspaces' storage layouts, those of the
    weights."""
    found = {}
    by_parameter: dict[Tensor, Storage] = dict(zip(model.parameters(), storages.values(), strict=True))
    for name, (kept, weight) in kept_weights(model).items():
        if not kept.recipe.by_row:
            kept.add_workspace(local_part(weight).detach())
            precision = Precision(E4M3, E4M3, E4M3)
            found[name + _WORKSPACE] = dataclasses.replace(by_parameter[weight], precision=precision, is_trained=False)
    return found


def refresh(model: nn.Module) -> None:
    """Quantise the weights of a model's float8 layers once, in a training loop of your own: all calls then use the
    result. Call it before the first step, and again whenever the optimizer or anything else has changed weights.

    With delayed scaling it also stores a backward pass' magnitudes, the `.grad` of the layers' `amax`, and clears it:
    call it after each backward pass. Layers that scale by rows quantise their weights in each call anyway.

    Raises:
        UserError: no such layer in the model, sharded weights, or delayed scaling of a layer that was called twice.
    """
    kept = kept_weights(model)
    if not kept:
        raise UserError("refresh: the model has no layer of torchtitan_graph.quantize; write refresh(model)")
    if sharded := [name for name, (_, weight) in kept.items() if isinstance(weight, DTensor)]:
        raise UserError(
            f"refresh: the weight of {sharded[0]} is a DTensor, and its scale would be this rank's alone: leave refresh"
            " out (each call then quantises its weight), or train by torchtitan_graph.train, which shares the scales"
        )
    for each, weight in kept.values():
        if each.weight_q is not None:
            each.fill_workspace(weight)
        elif not each.recipe.by_row:
            each.add_workspace(weight)
    delayed = {name: each for name, (each, _) in kept.items() if each.amax is not None and each.amax.grad is not None}
    if delayed:
        seen = torch.stack([each.amax.grad for each in delayed.values()])  # type: ignore[union-attr, misc]
        check_called_once(list(delayed), seen)
        for each, row in zip(delayed.values(), seen, strict=True):
            each.see(row)
            each.amax.grad = None  # type: ignore[union-attr]


def check_called_once(names: Sequence[str], seen: Tensor) -> None:
    """Raise a UserError if layers' magnitudes are sums over several calls. `seen` is (layers, 3), the third the number
    of calls."""
    if several := [(name, int(times)) for name, times in zip(names, seen[:, 2].tolist(), strict=True) if times > 1]:
        name, times = several[0]
        raise UserError(
            f"delayed scaling: the layer {name.removesuffix(SLOT)} was called {times} times before its largest"
            " magnitudes were read, and they add up: choose another recipe for it, or have a layer for each call; in a"
            " loop of your own, call refresh(model) after each backward pass"
        )


class Float8State:
    """The state of a model's float8 layers, which changes from one optimizer step to the next, outside the graph."""

    def __init__(self, model: nn.Module, storages: Mapping[str, Storage], layout: Layout, compute: torch.dtype) -> None:
        """Initialize from a model in its storage layout, or a pipeline stage of it, its workspaces' storage layouts,
        and the weights' compute dtype: a workspace equals that of a call without one."""
        kept = kept_weights(model)
        self._cached = [
            _Cached(*each, storages[name + _WORKSPACE]) for name, each in kept.items() if each[0].weight_q is not None
        ]
        self._delayed = {f"{name}{SLOT}": each for name, (each, _) in kept.items() if each.amax is not None}
        self._layout, self._compute, self._is_fresh, self._is_first = layout, compute, False, True

    @torch.no_grad()
    def refresh(self, always: bool = True) -> None:
        """Quantise the weights, in place; all ranks together. If not `always`, only if a step was taken since.

        A scale is shared by all ranks with a shard of the weight, or of an expert's. Under tensor parallelism each rank
        multiplies its own shard, with that shard's scale.
        """
        if self._is_fresh and not always:
            return
        by_axis: dict[str, list[_Cached]] = {}
        for each in self._cached:
            by_axis.setdefault(each.storage.shard_axis, []).append(each)
        for alike in by_axis.values():
            _refresh(alike, self._compute)
        self._is_fresh = True

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store the largest magnitudes of a step's microbatches, over all ranks, and return the rest of its state."""
        self._is_fresh = False
        if self._delayed:
            seen = torch.stack([state[name] for name in self._delayed])
            for axis in (FSDP, DP_REPLICATE, TP):  # of a pipeline, the ranks of this stage
                if self._layout.degree(axis) > 1:
                    dist.all_reduce(seen, dist.ReduceOp.MAX, self._layout.group(axis))
            if self._is_first:  # checking waits for the device, and a model calls its layers alike in each step
                check_called_once(list(self._delayed), seen)
                self._is_first = False
            for kept, row in zip(self._delayed.values(), seen, strict=True):
                kept.see(row)
        return {name: x for name, x in state.items() if name not in self._delayed}


class _Cached(NamedTuple):
    """A weight, its quantization state, and its workspace's storage layout."""

    kept: Kept
    weight: Tensor
    storage: Storage

    def own(self, scales: Tensor) -> Tensor:
        """Return the scales of the experts in this rank's shard; a view."""
        return scales.narrow(0, *self.storage.local_range) if scales.dim() and self.storage.dim == 0 else scales


def _refresh(weights: Sequence[_Cached], compute: torch.dtype) -> None:
    """Quantise weights that are sharded over the same ranks; one all-reduce gives their common scales."""
    magnitudes = []
    for each in weights:
        assert each.kept.weight_scale is not None
        magnitudes.append(torch.zeros_like(each.kept.weight_scale))
        if (part := local_part(each.weight).detach()).numel():
            each.own(magnitudes[-1]).copy_(largest_of_weight(part.to(compute)))
    agreed, storage = torch.cat([x.flatten() for x in magnitudes]), weights[0].storage
    if storage.shard_degree > 1:
        dist.all_reduce(agreed, dist.ReduceOp.MAX, storage.shard_group)
    scales = scale_for(agreed, E4M3).split([x.numel() for x in magnitudes])
    for each, scale in zip(weights, scales, strict=True):
        q, kept_scale = each.kept.weight_q, each.kept.weight_scale
        assert q is not None and kept_scale is not None
        kept_scale.copy_(scale.view_as(kept_scale))
        local_part(q).detach().copy_(
            quantize(local_part(each.weight).detach().to(compute), over(each.own(kept_scale)), E4M3)
        )
