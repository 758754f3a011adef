"""The end of an optimizer step: clipping, and the optimizer's update of the live parameters."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.capture.state import local_part
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.compiler import Extra, Inspection, run_passes, update_passes
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.log import logger
from torchtitan_graph.optim import Muon, is_fused, takes_stops
from torchtitan_graph.parallel.verify import Numbers
from torchtitan_graph.runtime.pieces import Replayed
from torchtitan_graph.steps.build import Steps
from torchtitan_graph.torch_private.tensors import count_step

c10d = torch.ops._c10d_functional


class Update(Protocol):
    """The end of an optimizer step, in the order of its calls. All ranks call together.

    No parameter changes, and no state of the optimizer, if a rank's loss or the norm is not finite, or if one is above
    its limit.
    """

    stops: Tensor | None = None  # after `clip`: 1.0 if it has skipped the step; None where it has not decided that

    def clip(self, loss: Tensor, limits: Tensor | None = None) -> Tensor:
        """Clip the gradients, and return the norm of all before. `loss` is this rank's; `limits` are those of the sum
        of all ranks' and of the norm, in fp64."""

    def step(self, stops: Tensor) -> None:
        """Launch the optimizer's step, if the device can skip it by itself: where `stops` is 1.0."""

    def finish(self, skips: bool = False) -> None:
        """Step now if that has not been done and the step is not skipped, and release the gradients: the host knows
        that all numbers are finite."""


class EagerUpdate:
    """Clipping, then the optimizer's own `step()`."""

    def __init__(self, steps: Steps, optimizer: Optimizer, max_norm: float) -> None:
        self._steps, self._optimizer, self._max_norm = steps, optimizer, max_norm
        self._skips = takes_stops(optimizer, torch.device(steps.layout.mesh.device_type))

    stops: Tensor | None = None

    def clip(self, loss: Tensor, limits: Tensor | None = None) -> Tensor:
        return self._steps.clip(self._max_norm)

    def step(self, stops: Tensor) -> None:
        if self._skips:
            self._optimizer.found_inf = stops  # type: ignore[attr-defined]
            self._optimizer.step()

    def finish(self, skips: bool = False) -> None:
        if not self._skips and not skips:
            self._optimizer.step()
        self._optimizer.zero_grad()


class GraphUpdate:
    """Clipping and the optimizer's step as one graph, which `clip` runs. Bitwise `EagerUpdate`.

    It is traced in its first call, when the gradients exist in the training step's layout.
    """

    def __init__(
        self,
        steps: Steps,
        optimizer: Optimizer,
        max_norm: float,
        *,
        costs: Costs | None = None,
        extra: Sequence[Extra] = (),
        dump_to: Path | None = None,
        stack_traces: bool = False,
        verify: bool = False,
    ) -> None:
        """Bind an optimizer of torch's; one that is not fused may be without its state.

        Raises:
            UserError: its update needs whole matrices, and ranks hold shards.
        """
        _check_parts(optimizer)
        self._steps, self._live, self._max_norm = steps, optimizer, max_norm
        self._extra, self._dump_to, self._stack_traces = extra, dump_to, stack_traces
        self._costs, self._verify = costs, verify
        self._is_fused = is_fused(optimizer)
        self._twin = _twin_of(optimizer, self._is_fused)
        self._begins = True
        self.stops: Tensor | None = None
        self._run: Callable[[dict[str, Tensor], Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def step(self, stops: Tensor) -> None:
        pass

    def finish(self, skips: bool = False) -> None:
        self._live.zero_grad()

    def clip(self, loss: Tensor, limits: Tensor | None = None) -> Tensor:
        if limits is None:
            limits = loss.new_full((2,), torch.inf, dtype=torch.float64)
        if self._begins and not any(self._live.state.values()):
            return self._make_state(loss, limits)
        self._follow()
        gradients = {n: p.grad for n, p in self._steps.model.named_parameters() if p.grad is not None}
        if self._run is None:
            recorders, make_run = self._steps.recorders, {}
            if recorders is not None:
                make_run = {"make_run": partial(Replayed, new_recorder=recorders.new)}
            self._run = run_traced(self.trace(gradients, loss), self._steps.model, self._twin, **make_run)
            count_step(self._live)
        norm, self.stops = self._run(gradients, loss, limits)
        return norm

    def trace(self, gradients: dict[str, Tensor], loss: Tensor, device: torch.device | None = None) -> TracedResult:
        """Trace the step for gradients like these, and run the passes on it; all may be on meta, with costs as on
        `device`."""
        limits = loss.new_empty(2, dtype=torch.float64)
        begin, model, device = time.perf_counter(), self._steps.model, device or loss.device

        def update(gradients: dict[str, Tensor], loss: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
            parameters = dict(model.named_parameters())
            for name, gradient in gradients.items():
                parameters[name].grad = gradient
            norm = self._steps.clip(self._max_norm)
            stops = _is_skipped(loss, norm, limits)
            if isinstance(self._twin, Muon):  # steps shards itself
                self._twin.found_inf = stops  # type: ignore[attr-defined]
                self._twin.step()
            elif self._is_fused:
                self._twin.found_inf = stops  # type: ignore[attr-defined]
                with _on_parts(self._twin, [parameters[name] for name in gradients]):
                    self._twin.step()
            else:
                self._step_on_copies(stops, {parameters[name]: name for name in gradients})
            return norm, stops

        tracer = partial(minimal_fx_tracer, device=device, stack_traces=self._stack_traces, donated=("gradients",))
        try:
            traced = tracer(update, model, self._twin)(gradients, loss, limits)
        finally:
            vars(self._twin).pop("found_inf", None)
        logger.info(f"optimizer step: traced in {time.perf_counter() - begin:.1f} s")
        watch = Inspection("optimizer step", self._dump_to, _made_up(traced.gm) if self._verify else None, self._costs)
        gm = run_passes(traced.gm, update_passes(self._extra), (), device, watch)
        return dataclasses.replace(traced, gm=gm)

    def _make_state(self, loss: Tensor, limits: Tensor) -> Tensor:
        """Run the first step outside the graph, since only the class knows its initial state."""
        norm = self._steps.clip(self._max_norm)
        self.stops = _is_skipped(loss, norm, limits)
        if not self.stops:
            self._live.step()
            self._begins = False
        return norm

    @torch.no_grad()
    def _step_on_copies(self, stops: Tensor, names: dict[Tensor, str]) -> None:
        """Step on copies, block by block, and write them back unless the step is skipped: only fused kernels skip."""
        blocks: dict[str, list[Tensor]] = {}  # parameters outside of blocks are large, and go alone
        for parameter, name in names.items():
            blocks.setdefault(block_of(name, self._steps.model.blocks) or name, []).append(parameter)
        is_kept = functools.cache(lambda device: (stops > 0).to(device))
        rates = [group["lr"].item() for group in self._twin.param_groups]  # read in each run, as plain numbers
        for parameters in blocks.values():
            with _on_parts(self._twin, parameters, Tensor.clone, rates) as parts:
                self._twin.step()
                made = [(p, parts[p], self._twin.state[parts[p]]) for p in parameters]
            for p, part, values in made:
                held = self._twin.state[p]
                assert held.keys() == values.keys(), f"state {values.keys() - held.keys()} is made in the first step"
                for old, new in ((p, part), *((held[key], new) for key, new in values.items())):
                    live = local_part(old).detach()
                    live.copy_(torch.where(is_kept(live.device), live, new))

    def _follow(self) -> None:
        """Copy the live optimizer's settings, which schedules and checkpoints change, to the traced one."""
        self._twin.state = self._live.state
        for group, live in zip(self._twin.param_groups, self._live.param_groups, strict=True):
            group["lr"].fill_(live["lr"])
            group.update({key: value for key, value in live.items() if key != "lr"})


def _made_up(gm: GraphModule) -> Numbers:
    """Return random numbers for inputs other than parameters and buffers; none below 0, like second moments.

    The last, the limits, are infinite: a step that is skipped would show nothing.
    """
    kinds = [slot.kind for slot in signature_of(gm).inputs for _ in range(slot.layout.num_tensors)]
    owners = zip(kinds, gm.graph.find_nodes(op="placeholder"), strict=True)
    values = [node.meta["val"] for kind, node in owners if kind not in ("param", "buffer")]
    generator = torch.Generator().manual_seed(0)
    *others, limits = values
    numbers = [torch.rand(x.shape, generator=generator).to(x.device, x.dtype) for x in others]
    return Numbers([*numbers, torch.full(limits.shape, torch.inf, dtype=limits.dtype, device=limits.device)])


def _check_parts(optimizer: Optimizer) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor))
    axes = ((p.device_mesh.size(i), each) for p in parameters for i, each in enumerate(p.placements))
    if isinstance(optimizer, torch.optim.Muon) and any(size > 1 and not each.is_replicate() for size, each in axes):
        raise UserError(
            "optimizer.name = 'torch.optim.Muon': not with compile.optimizer_in_graph where ranks hold parts of a "
            "parameter, for its update is of whole matrices; set that to false"
        )


def _twin_of(optimizer: Optimizer, is_fused: bool) -> Optimizer:
    """Return an optimizer of the same parameters and state whose learning rates are tensors, and so inputs of a graph.

    A CPU's kernel reads a rate in fp64, and so loses no bit of it; that of a GPU takes one in fp32. An optimizer that
    is not fused has it as a number, read on the host, and so have Muon's matrices.
    """
    twin = copy.copy(optimizer)
    device = next(p.device for group in optimizer.param_groups for p in group["params"])  # a group may be empty

    def rate_of(group: dict[str, Any]) -> Tensor:
        on_gpu = is_fused and device.type != "cpu" and not group.get("is_matrix")
        dtype, place = (torch.float32, device) if on_gpu else (torch.float64, torch.device("cpu"))
        return torch.tensor(group["lr"], dtype=dtype, device=place)

    twin.param_groups = [group | {"lr": rate_of(group)} for group in optimizer.param_groups]
    return twin


@contextlib.contextmanager
def _on_parts(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    taken: Callable[[Tensor], Tensor] = lambda x: x,
    rates: Sequence[float] = (),
) -> Iterator[dict[Tensor, Tensor]]:
    """Replace an optimizer's DTensors by their local shards, in the same order, inside the context: its update is
    elementwise, or the shards are whole. `taken` maps each shard and state first, to a copy for instance.

    On torch 2.11 a trace of DTensors' own update has a second one, of tensors of the whole shape that nobody has.
    """
    groups, state = optimizer.param_groups, optimizer.state
    parts: dict[Tensor, Tensor] = {}
    for p in parameters:
        parts[p] = taken(local_part(p).detach())
        assert p.grad is not None, "those without a gradient take no step"
        parts[p].grad = local_part(p.grad)
    of_parts = [g | {"params": [parts[p] for p in g["params"] if p in parts]} for g in groups]
    for group, rate in zip(of_parts, rates, strict=False):
        group["lr"] = rate
    optimizer.param_groups = of_parts
    optimizer.state = collections.defaultdict(
        dict, {part: {key: taken(local_part(x)) for key, x in state[p].items()} for p, part in parts.items()}
    )
    try:
        yield parts
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def _is_skipped(loss: Tensor, norm: Tensor, limits: Tensor) -> Tensor:
    """Return 1.0 if a rank's loss or the norm is not finite, or the sum of the losses or the norm is above its limit,
    else 0.0, equal on all ranks: the kernel's `found_inf`."""
    total = loss.double()  # sums of a few fp32 numbers are exact in fp64, and equal in any order
    if dist.get_world_size() > 1:
        total = c10d.wait_tensor(c10d.all_reduce(total, "sum", dist.group.WORLD.group_name))  # type: ignore[union-attr]
    numbers = torch.stack([total, norm.double()])
    return (~numbers.isfinite() | (numbers > limits)).any().float()
