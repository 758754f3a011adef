"""The end of an optimizer step as a graph: clipping, and the optimizer's update of the live parameters."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from torchtitan_graph.compiler import Extra, Inspection, run_passes, update_passes
from torchtitan_graph.graph.cost import Costs
from torchtitan_graph.graph.pieces import Replayed
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.graph.torch_private import count_step
from torchtitan_graph.graph.trace import TracedResult, minimal_fx_tracer, run_traced
from torchtitan_graph.log import logger
from torchtitan_graph.steps.build import Steps

c10d = torch.ops._c10d_functional


class Update:
    """Clip the gradients in `.grad`, and take the optimizer's step, as one graph. Bitwise `clip`, then `step()`.

    It is traced when it is first called: then the gradients are there, each as the training step lays it out.
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
        """Take a fused Adam or AdamW with its state."""
        self._steps, self._live, self._max_norm = steps, optimizer, max_norm
        self._extra, self._dump_to, self._stack_traces = extra, dump_to, stack_traces
        self._costs, self._verify = costs, verify
        self._twin = _twin_of(optimizer)
        self._run: Callable[[dict[str, Tensor], Tensor], Tensor] | None = None

    def __call__(self, loss: Tensor) -> Tensor:
        """Return the norm of all gradients before they were clipped; all ranks call together.

        If it, or a rank's loss, is not finite, no parameter and no state changes.
        """
        self._follow()
        gradients = {n: p.grad for n, p in self._steps.model.named_parameters() if p.grad is not None}
        if self._run is None:
            recorders, make_run = self._steps.recorders, {}
            if recorders is not None:
                make_run = {"make_run": partial(Replayed, new_recorder=recorders.new)}
            self._run = run_traced(self.trace(gradients, loss), self._steps.model, self._twin, **make_run)
            count_step(self._live)
        return self._run(gradients, loss)

    def trace(self, gradients: dict[str, Tensor], loss: Tensor, device: torch.device | None = None) -> TracedResult:
        """Trace the step for gradients like these, and run the passes on it; all may be on meta, and count as on
        `device`."""
        begin, model, device = time.perf_counter(), self._steps.model, device or loss.device

        def update(gradients: dict[str, Tensor], loss: Tensor) -> Tensor:
            parameters = dict(model.named_parameters())
            for name, gradient in gradients.items():
                parameters[name].grad = gradient
            norm = self._steps.clip(self._max_norm)
            # The kernel's own way to take no step: torch's gradient scaler sets it.
            self._twin.found_inf = _is_not_finite(loss, norm)  # type: ignore[attr-defined]
            with _on_parts(self._twin):
                self._twin.step()
            return norm

        tracer = partial(minimal_fx_tracer, device=device, stack_traces=self._stack_traces, donated=("gradients",))
        try:
            traced = tracer(update, model, self._twin)(gradients, loss)
        finally:
            vars(self._twin).pop("found_inf", None)
        logger.info(f"optimizer step: traced in {time.perf_counter() - begin:.1f} s")
        watch = Inspection("optimizer step", self._dump_to, _made_up(traced.gm) if self._verify else None, self._costs)
        gm = run_passes(traced.gm, update_passes(self._extra), (), device, watch)
        return dataclasses.replace(traced, gm=gm)

    def _follow(self) -> None:
        """Let the traced optimizer have the settings of the live one, which schedules and checkpoints know."""
        self._twin.state = self._live.state
        for group, live in zip(self._twin.param_groups, self._live.param_groups, strict=True):
            group["lr"].fill_(live["lr"])
            group.update({key: value for key, value in live.items() if key != "lr"})


def _made_up(gm: GraphModule) -> list[Tensor]:
    """Give numbers for what a step reads beside parameters and buffers, none below 0, as second moments are."""
    kinds = [slot.kind for slot in signature_of(gm).inputs for _ in range(slot.layout.num_tensors)]
    owners = zip(kinds, gm.graph.find_nodes(op="placeholder"), strict=True)
    values = [node.meta["val"] for kind, node in owners if kind not in ("param", "buffer")]
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(x.shape, generator=generator).to(x.device, x.dtype) for x in values]


def _twin_of(optimizer: Optimizer) -> Optimizer:
    """Give an optimizer of the same parameters and state whose learning rates are tensors, and so inputs of a graph.

    A CPU's kernel reads a rate in fp64, and so loses no bit of it; that of a GPU takes one in fp32.
    """
    twin = copy.copy(optimizer)
    device = next(p.device for group in optimizer.param_groups for p in group["params"])  # a group may be empty
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    twin.param_groups = [
        group | {"lr": torch.tensor(group["lr"], dtype=dtype, device=device)} for group in optimizer.param_groups
    ]
    return twin


@contextlib.contextmanager
def _on_parts(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer of DTensors step on the parts that this rank has, in the same order: its update is elementwise.

    On torch 2.11 a trace of DTensors' own update has a second one, of tensors of the whole shape that nobody has.
    """
    groups, state = optimizer.param_groups, optimizer.state
    parts: dict[Tensor, Tensor] = {}
    for p in (p for group in groups for p in group["params"] if p.grad is not None):
        parts[p] = _part(p).detach()
        parts[p].grad = _part(p.grad)
    optimizer.param_groups = [g | {"params": [parts[p] for p in g["params"] if p in parts]} for g in groups]
    optimizer.state = collections.defaultdict(
        dict, {part: {key: _part(x) for key, x in state[p].items()} for p, part in parts.items()}
    )
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_not_finite(loss: Tensor, norm: Tensor) -> Tensor:
    """Tell, as the kernel wants it, whether a rank's loss or the norm is not finite: 1.0 or 0.0, equal on all ranks."""
    bad_ranks = (~loss.isfinite()).float()
    if dist.get_world_size() > 1:
        bad_ranks = c10d.wait_tensor(c10d.all_reduce(bad_ranks, "sum", dist.group.WORLD.group_name))  # type: ignore[union-attr]
    return ((bad_ranks > 0) | ~norm.isfinite()).float()
