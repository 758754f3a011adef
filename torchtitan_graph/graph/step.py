"""The training step as a function to trace, and the traced step as a function that trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.graph.state import sharing_memory
from torchtitan_graph.graph.torch_private import annotated, free_gradient_dtype
from torchtitan_graph.graph.trace import TracedResult, minimal_fx_tracer, run_traced


class Inputs(Protocol):
    """What a step reads of a batch."""

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (logits_BLV, labels_BL, num_tokens) -> scalar


class StepOutput(NamedTuple):
    """What a training step gives beside the gradients.

    loss   of this rank's microbatch
    loads  by block, how many slots went to each of its experts: state that a step changes leaves it as a value
    """

    loss: Tensor
    loads: dict[str, Tensor]


def _forward(model: nn.Module, loss: Loss, batch: Inputs, masks: Any, num_tokens: Tensor) -> StepOutput:
    logits_BLV, routings = model(batch.tokens_BL, batch.positions_BL, masks, with_routing=True)
    value = loss(logits_BLV, batch.labels_BL, num_tokens)
    for routing in routings.values():
        if routing.loss is not None:
            value = value + routing.loss
    return StepOutput(value, {name: routing.load_E for name, routing in routings.items()})


def make_train_step(
    model: nn.Module, loss: Loss
) -> Callable[[Inputs, Any, Tensor], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """Give `step(batch, masks, num_tokens) -> (loss, gradients by name in parameter order, loads)`, to be traced.

    The loss function is in the step's closure: a constant of the trace. Another loss is another trace.
    """

    def train_step(batch: Inputs, masks: Any, num_tokens: Tensor) -> Any:
        parameters = dict(model.named_parameters())
        free_gradient_dtype(parameters.values())
        value, loads = _forward(model, loss, batch, masks, num_tokens)
        gradients = torch.autograd.grad(value, list(parameters.values()))
        with annotated(phase="backward"):
            laid_out = [_as_parameter(g, p) for g, p in zip(gradients, parameters.values(), strict=True)]
        return value, dict(zip(parameters, laid_out, strict=True)), loads

    return train_step


def _as_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Finish a gradient that tensor parallelism left as partial sums: a replicated norm's, from its sequences."""
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient


def trace_train_step(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    masks: Any,
    num_tokens: Tensor,
    *,
    device: Any,
    stack_traces: bool = False,
) -> TracedResult:
    """Trace the step of a model on meta as if it lay on `device`; its outputs are named: the loss, gradients and loads
    by name."""
    tracer = minimal_fx_tracer(make_train_step(model, loss), module=model, device=device, stack_traces=stack_traces)
    traced = tracer(batch, masks, num_tokens)
    signature = signature_of(traced.gm)
    kinds = [("loss", "loss")] + [("grad", name) for name, _ in model.named_parameters()]
    kinds += [("state", f"{slot.name} load") for slot in signature.outputs[len(kinds) :]]
    outputs = tuple(
        dataclasses.replace(slot, kind=kind, name=name)
        for slot, (kind, name) in zip(signature.outputs, kinds, strict=True)
    )
    traced.gm.meta["signature"] = dataclasses.replace(signature, outputs=outputs)
    return traced


def trace_eval_step(
    model: nn.Module, loss: Loss, batch: Any, masks: Any, num_tokens: Tensor, *, device: Any
) -> TracedResult:
    """Trace the loss alone: no backward."""
    traced = minimal_fx_tracer(make_eval_step(model, loss), module=model, device=device)(batch, masks, num_tokens)
    signature = signature_of(traced.gm)
    (slot,) = signature.outputs
    outputs = (dataclasses.replace(slot, kind="loss", name="loss"),)
    traced.gm.meta["signature"] = dataclasses.replace(signature, outputs=outputs)
    return traced


def make_eval_step(model: nn.Module, loss: Loss) -> Callable[[Inputs, Any, Tensor], Tensor]:
    """Give `step(batch, masks, num_tokens) -> loss`, to be traced or, in eager mode, called."""

    @torch.no_grad()
    def step(batch: Inputs, masks: Any, num_tokens: Tensor) -> Tensor:
        return loss(model(batch.tokens_BL, batch.positions_BL, masks), batch.labels_BL, num_tokens)

    return step


def bind_train_step(traced: TracedResult, model: nn.Module) -> Callable[[Inputs, Any, Tensor], StepOutput]:
    """Give `step(batch, masks, num_tokens) -> StepOutput` that adds the gradients to the live parameters' `.grad`."""
    run = run_traced(traced, module=model)
    parameters = dict(model.named_parameters())
    shared: set[str] | None = None  # a graph shares the same memory in every step

    @torch.no_grad()
    def step(batch: Inputs, masks: Any, num_tokens: Tensor) -> StepOutput:
        nonlocal shared
        value, gradients, loads = run(batch, masks, num_tokens)
        if shared is None:
            held = [x for x in tree_leaves((batch, masks, num_tokens)) if isinstance(x, Tensor)]
            shared = sharing_memory(gradients, [*held, *parameters.values(), *model.buffers()])
        for name, gradient in gradients.items():
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient.clone() if name in shared else gradient
            else:
                parameter.grad += gradient
        return StepOutput(value, loads)

    return step


def make_eager_step(model: nn.Module, loss: Loss) -> Callable[[Inputs, Any, Tensor], StepOutput]:
    """Give the same step without a graph: forward, loss and `backward` on a model under FSDP2. The reference."""

    def step(batch: Inputs, masks: Any, num_tokens: Tensor) -> StepOutput:
        value, loads = _forward(model, loss, batch, masks, num_tokens)
        value.backward()
        return StepOutput(value.detach(), loads)

    return step
