"""The training step as a function to trace, and the traced step as a function that trains."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from torchtitan_graph.capture.own_step import OwnStep, StepModel, together
from torchtitan_graph.capture.state import local_part, sharing_memory
from torchtitan_graph.capture.trace import Capture, InParts, capture_step, make_fx_capture
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import outputs_of, signature_of
from torchtitan_graph.runtime.gradients import has_sum
from torchtitan_graph.runtime.pieces import Recorder, Replayed
from torchtitan_graph.torch_private.tensors import accumulate, free_gradient_dtype
from torchtitan_graph.torch_private.tracing import annotated

SLOT = ".amax"  # suffix of slots' names, see `make_train_step`: they hold largest magnitudes
TERM = "loss/"  # prefix of the names of the loss's terms in a step's state
METRIC = "metric/"  # prefix of the names of metrics there
# Names of the terms that are not a model's own.
CROSS_ENTROPY, EXPERTS, AHEAD, STEP = "cross_entropy", "experts", "ahead", "step"
IGNORE_INDEX = -100  # a label that is not a target, as in torch's cross_entropy and data/batch.py
PADDING = -1  # the document of a position that is no token, as in data/batch.py


class Inputs(Protocol):
    """The fields of a batch that a step reads. `totals`, of all microbatches and ranks of the step, are as in
    steps/inputs.py; a batch without them is a step by itself."""

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    documents_BL: Tensor


# (logits_BLV, labels_BL, num_tokens, None, batch) or (x_BLD, labels_BL, num_tokens, output, batch) -> a scalar, this
# rank's part of the loss, or a pair of it and a dict of metrics, each its part of a mean over the targets.
# A step of the user's takes the place of both, the logits and the loss.
Loss = Callable[..., Any] | OwnStep


_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)
_PAGE = "see docs/extend/family.md"


class Real(NamedTuple):
    """Which positions of a microbatch are tokens, and not padding; and in all microbatches and ranks of the step, the
    number of tokens, and that of rows with any: the denominators of means."""

    is_token_BL: Tensor
    num_tokens: Tensor
    num_rows: Tensor

    @staticmethod
    def of(is_token_BL: Tensor) -> Real:
        """Return the same for a microbatch that is a step by itself."""
        return Real(is_token_BL, is_token_BL.sum().clamp(min=1), is_token_BL.any(1).sum().clamp(min=1))


def real_of(batch: Any) -> Real:
    """Return which positions of a batch are tokens, and the denominators of means."""
    is_token_BL, totals = batch.documents_BL != PADDING, getattr(batch, "totals", None)
    return Real.of(is_token_BL) if totals is None else Real(is_token_BL, totals[0], totals[1])


class SideOutputs(NamedTuple):
    """The results of a model's forward pass, other than the logits, when it is called with `side_outputs=True`.

    losses  terms of the training loss by name, a number for each token, (B, L): the mean of each over all tokens of the
            step is added to it, without padding, equal for every number of microbatches and ranks
    metrics  numbers to log, by name: the same means, which are no part of the loss
    state   new state, by name: it leaves the step as a value, and `model.after_step` applies it. Each is a count,
            summed over microbatches and over ranks with different data. (Slots of layers are state too, see
            `make_train_step`.)
    ahead   logits of the tokens further ahead, or their losses where the model was called with `loss`: the first's
            targets are the labels one position later, and so on
    ahead_weight  weight of the mean of their losses in the training loss
    experts  scalars of mixtures of experts: each is this microbatch's part of a mean over the step, see `Real`
    """

    losses: Mapping[str, Tensor] = {}  # none is changed; Dynamo can't read a MappingProxyType
    state: Mapping[str, Tensor] = {}
    ahead: Sequence[Tensor] = ()
    ahead_weight: float = 0.0
    experts: Sequence[Tensor] = ()
    metrics: Mapping[str, Tensor] = {}


class StepOutput(NamedTuple):
    """A training step's results other than gradients: this rank's loss, and `SideOutputs.state`.

    terms    of a whole step: the loss's terms by name, where there are several; summed over microbatches and ranks
    metrics  of a whole step: the metrics of the model and of the loss by name; summed in the same way
    """

    loss: Tensor
    state: dict[str, Tensor]
    terms: Mapping[str, Tensor] = MappingProxyType({})
    metrics: Mapping[str, Tensor] = MappingProxyType({})


class StageModules(NamedTuple):
    """The modules of a pipeline stage, by name, and whether it is the first and the last stage."""

    names: tuple[str, ...]
    first: bool
    last: bool


def takes_loss(model: nn.Module) -> bool:
    """Return whether a model computes the loss where it computes the logits, which then nothing else reads: its forward
    has an argument `loss`, a function of the output layer, its input, and the number of tokens further ahead."""
    return getattr(model, "projects_last", True) and "loss" in inspect.signature(model.forward).parameters


def takes_real(module: nn.Module) -> bool:
    """Return whether a module's forward has the argument `real`, by its name or among `**kwargs`."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(x.name == "real" or x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters)


def _real_given(model: nn.Module, batch: Inputs) -> dict[str, Real]:
    """Return the argument `real` of a model's forward, where it has one."""
    return {"real": real_of(batch)} if takes_real(model) else {}


class _Head:
    """The loss of a model's logits for a batch, computed in its forward or after it, and the loss's metrics."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any], batch: Inputs, num_tokens: Tensor) -> None:
        self._loss, self._num_tokens, self._batch = loss, num_tokens, batch
        self.metrics: Mapping[str, Tensor] = {}
        self.given: dict[str, Any] = {"loss": self.of_output} if takes_loss(model) else {}

    def of_output(self, output: nn.Module | None, x: Tensor, ahead: int = 0) -> Tensor:
        labels_BL, number = self._batch.labels_BL, self._num_tokens
        if ahead:
            labels_BL = labels_ahead(labels_BL, self._batch.documents_BL, ahead)
            number = self._number_ahead(labels_BL, ahead)
        result = self._loss(x, labels_BL, number, output, self._batch)
        if isinstance(result, Tensor):
            return result
        value, metrics = result
        if not ahead:
            self.metrics = metrics
        return value  # type: ignore[no-any-return]

    def __call__(self, result: Tensor, ahead: int = 0) -> Tensor:
        """Return the loss from a model's result: its logits, unless it took the loss."""
        return result if self.given else self.of_output(None, result, ahead)

    def _number_ahead(self, labels_BL: Tensor, ahead: int) -> Tensor:
        """Return the step's number of targets so many tokens further ahead."""
        totals = getattr(self._batch, "totals", None)
        return (labels_BL != IGNORE_INDEX).sum().clamp(min=1) if totals is None else totals[1 + ahead]


def _forward(
    model: nn.Module, loss: Loss, batch: Inputs, masks: Any, num_tokens: Tensor, under_fsdp: bool = False
) -> StepOutput:
    if isinstance(loss, OwnStep):
        return _forward_own(model, loss, batch, masks, num_tokens, under_fsdp)
    head = _Head(model, loss, batch, num_tokens)
    given = head.given | _real_given(model, batch)
    returned = model(batch.tokens_BL, batch.positions_BL, masks, side_outputs=True, **given)
    result, side = checked(model, returned)
    terms = {CROSS_ENTROPY: [head(result)], **_terms(model, batch, side)}
    if side.ahead:
        weight = side.ahead_weight / len(side.ahead)
        terms[AHEAD] = [weight * head(of_ahead, ahead) for ahead, of_ahead in enumerate(side.ahead, 1)]
    return StepOutput(_sum(terms), {**side.state, **_named(terms), **_metrics(model, batch, side, head.metrics)})


def _forward_own(
    model: nn.Module, own: OwnStep, batch: Inputs, masks: Any, num_tokens: Tensor, under_fsdp: bool
) -> StepOutput:
    """Run the user's step; to its loss are added the side losses of each call of the trained model with gradients."""
    # FSDP2 wants no view as a model's result; tensor parallelism's whole logits are one.
    projects = takes_loss(model) and under_fsdp
    given: dict[str, Any] = {"loss": lambda output, x, ahead: output(x).clone()} if projects else {}
    given |= _real_given(model, batch)

    def run(of_call: Inputs, own_masks: Any) -> tuple[Tensor, SideOutputs]:
        rows = of_call.tokens_BL, of_call.positions_BL, own_masks
        return checked(model, model(*rows, side_outputs=True, **given))

    step_model = StepModel(own, model, masks, run)
    loss, sums = own.sums(step_model, batch)
    terms: dict[str, list[Tensor]] = {STEP: [loss / num_tokens]}
    state: dict[str, Tensor] = {}
    metrics = {METRIC + name: _wide(x / num_tokens) for name, x in _checked_names(sums, "training.step").items()}
    for side in step_model.side_outputs:
        if side.ahead:
            raise UserError(
                f"training.step = {own.name!r}: not with layers that predict further tokens, whose losses are cross"
                " entropy; set model.num_mtp_layers = 0"
            )
        for name, parts in _terms(model, batch, side).items():
            terms[name] = [*terms.get(name, []), *parts]
        state = combine(state, side.state)
        metrics = combine(metrics, _metrics(model, batch, side, {}))
    return StepOutput(_sum(terms), {**state, **_named(terms), **metrics})


def checked(model: nn.Module, returned: Any) -> tuple[Tensor, SideOutputs]:
    """Return a model's results, after a check of their types; raise a UserError for others."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], SideOutputs)
    mappings = (returned[1].losses, returned[1].state, returned[1].metrics) if is_pair else ()
    if not is_pair or not all(isinstance(x, Mapping) for x in mappings):
        raise UserError(
            f"{type(model).__name__}.forward(..., side_outputs=True) must return the pair (logits, SideOutputs(losses, "
            f"state)), its losses, state and metrics each a dict of tensors by name, not {_kinds(returned)}; {_PAGE}"
        )
    if taken := [name for name in returned[1].state if name.startswith((TERM, METRIC))]:
        raise UserError(
            f"{type(model).__name__}: SideOutputs.state: {taken[0]}: names that begin with {TERM} are the loss's"
            f" terms, with {METRIC} metrics; give it another name"
        )
    return returned


def _kinds(value: Any) -> str:
    if isinstance(value, SideOutputs):
        return f"SideOutputs({_kinds(value.losses)}, {_kinds(value.state)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_kinds, value))})"
    return type(value).__name__


def _sum(terms: Mapping[str, Sequence[Tensor]]) -> Tensor:
    first, *others = itertools.chain.from_iterable(terms.values())
    return sum(others, first)


def _named(terms: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return the terms as state, unless the targets' own is the only one: then it is the loss."""
    if terms.keys() <= {CROSS_ENTROPY} or terms.keys() == {STEP}:
        return {}
    return {TERM + name: sum(parts[1:], parts[0]).detach() for name, parts in terms.items()}


def _terms(model: nn.Module, batch: Inputs, side: SideOutputs) -> dict[str, list[Tensor]]:
    """Return a microbatch's terms of the loss other than the targets' own.

    Raises:
        UserError: as `_means`; or a term has a name that the loss itself may use.
    """
    at = f"{type(model).__name__}: SideOutputs.losses"
    for name in side.losses:
        if name in (CROSS_ENTROPY, EXPERTS, AHEAD, STEP):
            raise UserError(f"{at}: {name} is a term that the loss itself may have; give yours another name; {_PAGE}")
    means = _means(model, batch, side.losses, "losses")
    return {name: [x] for name, x in means.items()} | ({EXPERTS: list(side.experts)} if side.experts else {})


def _metrics(model: nn.Module, batch: Inputs, side: SideOutputs, of_loss: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a microbatch's metrics, of the model and of the loss, as state.

    Raises:
        UserError: as `_means`; or two metrics have the same name.
    """
    if both := [name for name in side.metrics if name in of_loss]:
        raise UserError(
            f"{type(model).__name__}: SideOutputs.metrics: {both[0]} is a metric of the loss; give yours another name"
        )
    found = {**_means(model, batch, side.metrics, "metrics"), **_checked_names(of_loss, "loss.name")}
    return {METRIC + name: _wide(x) for name, x in found.items()}


def _checked_names(metrics: Mapping[str, Tensor], option: str) -> Mapping[str, Tensor]:
    for name in metrics:
        check_name(f"{option}: the metrics of the loss", name)
    return metrics


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def check_name(at: str, name: Any) -> None:
    """Raise UserError if a name can't be a metric's."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{at}: {name!r:.100} can't be a metric's name: use 1 to 100 ASCII letters, digits, _, - and .")


def _means(model: nn.Module, batch: Inputs, numbers: Mapping[str, Tensor], field: str) -> dict[str, Tensor]:
    """Return this microbatch's parts of the means over all tokens of a step.

    Raises:
        UserError: one has no name of its own, or is not a number for each token; sums and means over a microbatch
            would depend on the number of microbatches and ranks.
    """
    wanted, at = tuple(batch.tokens_BL.shape), f"{type(model).__name__}: SideOutputs.{field}"
    for name, term in numbers.items():
        check_name(at, name)
        if not isinstance(term, Tensor) or not term.is_floating_point():
            kind = str(term.dtype) if isinstance(term, Tensor) else type(term).__name__
            raise UserError(f"{at}: {name} is {kind}: must be a floating-point tensor {wanted}; {_PAGE}")
        if tuple(term.shape) != wanted:
            raise UserError(
                f"{at}: {name} has the shape {tuple(term.shape)}; each must have a number for each token, {wanted}. "
                "Leave out its sum or mean over tokens and rows: the step computes the mean over all tokens of its "
                "microbatches and ranks. A number for each row is expanded over the row's tokens, "
                f"x_B[:, None].expand_as(tokens_BL); {_PAGE}"
            )
    if not numbers:
        return {}
    real = real_of(batch)
    plain = {name: model.plain_term(name, term) for name, term in numbers.items()}  # type: ignore[operator]
    return {name: x.masked_fill(~real.is_token_BL, 0).sum() / real.num_tokens for name, x in plain.items()}


def labels_ahead(labels_BL: Tensor, documents_BL: Tensor, ahead: int) -> Tensor:
    """Return, for each position, the label so many positions later in its document, IGNORE_INDEX where there is none:
    whether a token is a target does not depend on the tokens before it."""
    if ahead >= labels_BL.shape[1]:
        return torch.full_like(labels_BL, IGNORE_INDEX)
    none_BK = torch.full_like(labels_BL[:, :ahead], IGNORE_INDEX)
    is_same_BL = documents_BL[:, ahead:] == documents_BL[:, :-ahead]
    return torch.cat((torch.where(is_same_BL, labels_BL[:, ahead:], IGNORE_INDEX), none_BK), dim=1)


def make_train_step(
    model: nn.Module, loss: Loss, sum_in: torch.dtype | None = None
) -> Callable[[Inputs, Any, Tensor], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """Return `step(batch, masks, num_tokens) -> (loss, gradients by name in parameter order, state)`, to be traced.

    As in autograd, a parameter that is frozen or that the loss does not depend on has no gradient. A buffer with a
    gradient is a slot: a layer passes a value out of the step through it, which is state.

    The loss function is in the step's closure: a constant of the trace. Another loss is another trace. `sum_in` is the
    dtype in which tensor parallelism's parts of a gradient are added, where the installed FSDP2 requires it.
    """

    def forward(batch: Inputs, masks: Any, num_tokens: Tensor) -> StepOutput:
        return _forward(model, loss, batch, masks, num_tokens)

    def train_step(forward: Callable[..., StepOutput], batch: Inputs, masks: Any, num_tokens: Tensor) -> Any:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        free_gradient_dtype(parameters.values(), sum_in)
        slots = _slots(model)
        value, state, *_ = forward(batch, masks, num_tokens)
        gradients, in_slots, _ = _differentiate([value], [None], parameters, slots)
        return value, gradients, state | in_slots

    return InParts(train_step, forward)


def _differentiate(
    outputs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    parameters: Mapping[str, Tensor],
    slots: Mapping[str, Tensor],
    x: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Return the gradients of parameters by name, the values in slots, and the gradient of x; `given` are those of the
    outputs, None for the loss."""
    wanted = {**parameters, **slots}
    inputs = [*wanted.values(), *([] if x is None else [x])]
    gradients = list(torch.autograd.grad(outputs, inputs, given, allow_unused=True))
    dx = None if x is None else gradients.pop()
    found = {name: g for name, g in zip(wanted, gradients, strict=True) if g is not None}
    in_slots = {name: _slot_value(slot, found.pop(name, None)) for name, slot in slots.items()}
    with annotated(phase="backward"):
        return {name: _as_parameter(g, parameters[name]) for name, g in found.items()}, in_slots, dx


def whole(model: nn.Module, loss: Loss) -> nn.Module:
    """Return the module with all state that a step reads: the trained model's, and that of a reference model."""
    return together(model, loss.reference if isinstance(loss, OwnStep) else None)


def _slots(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if buffer.requires_grad}


def combine(total: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Accumulate a microbatch's state, or some of it: counts and terms are added, of slots the larger counts."""

    def added(name: str, x: Tensor) -> Tensor:
        if name.endswith(SLOT) and not name.startswith((TERM, METRIC)):
            return torch.maximum(total.get(name, torch.zeros_like(x)), x)
        return total.get(name, 0) + x

    return {**total, **{name: added(name, x) for name, x in more.items()}}


def _as_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Reduce a gradient that tensor parallelism left as partial sums: a replicated norm's, over its parts of the
    sequence."""
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
    capture: Capture = make_fx_capture,
    sum_in: torch.dtype | None = None,
) -> TracedResult:
    """Trace the step of a model on meta as if it were on `device`; its outputs are named: the loss, gradients and state
    by name."""
    state = whole(model, loss)
    traced = capture_step(capture, make_train_step(model, loss, sum_in), state, device=device)(batch, masks, num_tokens)
    return _name_train_outputs(traced, [("loss", "loss")])


def _name_train_outputs(traced: TracedResult, first: Sequence[tuple[str, str]]) -> TracedResult:
    """Set the kind and name of a training step's outputs: the `first` ones, then gradients and state by name."""
    *_, gradients, state = pytree.tree_unflatten(range(traced.out_spec.num_leaves), traced.out_spec)
    _name_outputs(traced, [*first, *(("grad", name) for name in gradients), *(("state", name) for name in state)])
    _refuse_sums_in_slots(traced.gm)
    return traced


def _name_outputs(traced: TracedResult, kinds: Sequence[tuple[str, str]]) -> TracedResult:
    """Set the kind and name of each result, without those that are None."""
    names = [each for i, each in enumerate(kinds) if i not in traced.out_constants]
    signature = signature_of(traced.gm)
    named = zip(signature.outputs, names, strict=True)
    outputs = tuple(dataclasses.replace(slot, kind=kind, name=name) for slot, (kind, name) in named)
    traced.gm.meta["signature"] = dataclasses.replace(signature, outputs=outputs)
    return traced


def _refuse_sums_in_slots(gm: GraphModule) -> None:
    """Raise a UserError if a layer is called several times: the values in its slot would be added."""
    for slot, node in outputs_of(gm):
        while isinstance(node, Node) and node.target is torch.ops.aten.detach.default:
            node = node.args[0]
        is_slot = slot.name.endswith(SLOT) and not slot.name.startswith((TERM, METRIC))
        if is_slot and isinstance(node, Node) and node.target is torch.ops.aten.add.Tensor:
            raise UserError(
                f"delayed scaling: the layer {slot.name.removesuffix(SLOT)} is called several times in a forward pass,"
                " and the largest magnitudes of its calls would add up: choose another recipe_name for it, such as"
                " tensorwise, or have a layer for each call"
            )


def trace_eval_step(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    masks: Any,
    num_tokens: Tensor,
    *,
    device: Any,
    capture: Capture = make_fx_capture,
) -> TracedResult:
    """Trace the loss alone, without backward."""
    state = whole(model, loss)
    traced = capture_step(capture, make_eval_step(model, loss), state, device=device)(batch, masks, num_tokens)
    return _name_outputs(traced, [("loss", "loss")])


def make_eval_step(model: nn.Module, loss: Loss) -> Callable[[Inputs, Any, Tensor], Tensor]:
    """Return `step(batch, masks, num_tokens) -> loss`, to be traced or, in eager mode, called."""

    def step(batch: Inputs, masks: Any, num_tokens: Tensor) -> Tensor:
        with torch.no_grad():  # no decorator: Dynamo would begin in torch's own function
            if isinstance(loss, OwnStep):
                return _evaluate_own(model, loss, batch, masks, num_tokens)
            head = _Head(model, loss, batch, num_tokens)
            given = head.given | _real_given(model, batch)
            return head(model(batch.tokens_BL, batch.positions_BL, masks, **given))

    return step


def _evaluate_own(model: nn.Module, own: OwnStep, batch: Inputs, masks: Any, num_tokens: Tensor) -> Tensor:
    def run(of_call: Inputs, own_masks: Any) -> tuple[Tensor, None]:
        return model(of_call.tokens_BL, of_call.positions_BL, own_masks, **_real_given(model, batch)), None

    loss, _ = own.sums(StepModel(own, model, masks, run), batch)
    return loss / num_tokens


def make_stage_step(
    model: nn.Module, loss: Loss, stage: StageModules, sum_in: torch.dtype | None = None
) -> Callable[..., Any]:
    """Return a pipeline stage's `step(batch, masks, num_tokens, x, dy) -> (y, loss, dx, gradients by name, state)`, to
    be traced.

    x is the previous stage's activation and dx its gradient: None in the first stage. y is this stage's activation and
    dy its gradient: None in the last. The loss is this stage's part of it, None if there is none.
    """

    assert not isinstance(loss, OwnStep), "it runs whole models"

    def forward(batch: Inputs, masks: Any, num_tokens: Tensor, x: Tensor | None) -> Any:
        head = _Head(model, loss, batch, num_tokens)
        y, side = _run_stage(model, stage, batch, masks, x, head)
        terms = {CROSS_ENTROPY: [head(y)]} if stage.last else {}
        terms |= _terms(model, batch, side)
        metrics = _metrics(model, batch, side, head.metrics)
        return y, _sum(terms) if terms else None, {**side.state, **_named(terms), **metrics}

    def stage_step(
        forward: Callable[..., Any], batch: Inputs, masks: Any, num_tokens: Tensor, x: Tensor | None, dy: Tensor | None
    ) -> Any:
        own = {p for name in stage.names for p in model.get_submodule(name).parameters()}
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p in own}
        own_slots = {slot for name in stage.names for slot in _slots(model.get_submodule(name)).values()}
        slots = {name: slot for name, slot in _slots(model).items() if slot in own_slots}
        free_gradient_dtype(parameters.values(), sum_in)
        y, value, state = forward(batch, masks, num_tokens, x)
        # Backward begins here, with these gradients. A stage's terms may depend on none of its tensors.
        has_loss = value is not None and (stage.last or value.requires_grad)
        begins = [(y, dy)] * (not stage.last) + [(value, None)] * has_loss
        outputs, given = zip(*begins, strict=True)
        gradients, in_slots, dx = _differentiate(outputs, given, parameters, slots, x)
        return None if stage.last else y, value, dx, gradients, state | in_slots

    return InParts(stage_step, forward)


def _run_stage(model: nn.Module, stage: StageModules, batch: Inputs, masks: Any, x: Tensor | None, head: _Head) -> Any:
    given, of_last = batch.tokens_BL if x is None else x, head.given if stage.last else {}
    more = of_last | _real_given(model, batch)
    return checked(model, model(given, batch.positions_BL, masks, side_outputs=True, only=stage.names, **more))


def trace_stage_step(
    model: nn.Module,
    loss: Loss,
    stage: StageModules,
    arguments: tuple[Any, ...],
    *,
    device: Any,
    capture: Capture,
    sum_in: torch.dtype | None = None,
) -> TracedResult:
    """Trace a pipeline stage, as `trace_train_step` does; its outputs are the "output"s y and dx, the "loss", "grad"
    and "state" by name, as far as there are any."""
    traced = capture_step(capture, make_stage_step(model, loss, stage, sum_in), model, device=device)(*arguments)
    return _name_train_outputs(traced, [("output", "y"), ("loss", "loss"), ("output", "dx")])


def trace_stage_evaluation(
    model: nn.Module,
    loss: Loss,
    stage: StageModules,
    arguments: tuple[Any, ...],
    *,
    device: Any,
    capture: Capture,
) -> TracedResult:
    """Trace a pipeline stage's `step(batch, masks, num_tokens, x)`: y, for the last stage the loss."""
    assert not isinstance(loss, OwnStep), "it runs whole models"

    def step(batch: Inputs, masks: Any, num_tokens: Tensor, x: Tensor | None) -> Tensor:
        with torch.no_grad():  # no decorator: Dynamo would begin in torch's own function
            head = _Head(model, loss, batch, num_tokens)
            y, _ = _run_stage(model, stage, batch, masks, x, head)
            return head(y) if stage.last else y

    return capture_step(capture, step, model, device=device)(*arguments)


def bind_train_step(
    traced: TracedResult,
    model: nn.Module,
    new_recorder: Callable[[], Recorder] | None = None,
    accumulates: bool = False,
    state: nn.Module | None = None,
) -> Callable[[Inputs, Any, Tensor], StepOutput]:
    """Return `step(batch, masks, num_tokens) -> StepOutput` that accumulates the gradients in the live parameters'
    `.grad`.

    Args:
        new_recorder: returns a recorder of the graph's pieces, see `Replayed`.
        accumulates: a step has several runs, and a replay would overwrite the previous one's gradients.
        state: the module with all state that the step reads, if that is more than the model's.
    """
    module = model if state is None else state
    if new_recorder is None:
        run, add = run_traced(traced, module=module), AddGradients(model)
    else:
        run = run_traced(traced, module=module, make_run=partial(Replayed, new_recorder=new_recorder))
        add = AddGradients(model, replayed=True, accumulates=accumulates)

    @torch.no_grad()
    def step(batch: Inputs, masks: Any, num_tokens: Tensor) -> StepOutput:
        value, gradients, state = run(batch, masks, num_tokens)
        add(gradients, (batch, masks, num_tokens))
        return StepOutput(value, state)

    return step


class AddGradients:
    """Accumulates a graph's gradients in the live parameters' `.grad`. One that is the sum already, see `taking`,
    replaces it.

    Args:
        replayed: the graph writes its gradients to the same memory in each run, so `.grad` must keep its memory too.
        accumulates: a step has several runs.
    """

    def __init__(self, model: nn.Module, replayed: bool = False, accumulates: bool = False) -> None:
        self._parameters, self._buffers = dict(model.named_parameters()), list(model.buffers())
        self._replayed, self._accumulates = replayed, accumulates
        self._copied: set[str] | None = None  # a graph shares the same memory in every step
        self._copies: dict[str, Tensor] = {}

    def __call__(self, gradients: dict[str, Tensor], inputs: Any) -> None:
        """Accumulate gradients by name; `inputs` are those of the graph, which it may have returned."""
        if self._copied is None:
            held = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
            shared = sharing_memory(gradients, [*held, *self._parameters.values(), *self._buffers])
            self._copied = set(gradients) if self._replayed and self._accumulates else shared
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            if has_sum(local_part(gradient)):
                assert name not in self._copied, "a block of memory is its gradients' alone"
                parameter.grad = gradient
            elif parameter.grad is None:
                parameter.grad = self._copy(name, gradient) if name in self._copied else gradient
            else:
                assert self._accumulates or not self._replayed, "a replay has written over the gradients of another run"
                sums.append(local_part(parameter.grad))
                terms.append(local_part(gradient))
        if sums:
            accumulate(sums, terms)

    def _copy(self, name: str, gradient: Tensor) -> Tensor:
        if not self._replayed:
            return gradient.clone()
        if name in self._copies:
            return self._copies[name].copy_(gradient)
        return self._copies.setdefault(name, gradient.clone())


def _slot_value(slot: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the value of a layer's slot, 0 where the loss does not depend on it: the layer has seen no data."""
    return torch.zeros_like(slot) if gradient is None else gradient


def make_eager_step(model: nn.Module, loss: Loss) -> Callable[[Inputs, Any, Tensor], StepOutput]:
    """Return the same step without a graph: forward, loss and `backward` on a model under FSDP2. The reference."""

    slots = _slots(model)

    def step(batch: Inputs, masks: Any, num_tokens: Tensor) -> StepOutput:
        value, state, *_ = _forward(model, loss, batch, masks, num_tokens, under_fsdp=True)
        value.backward()
        for name, slot in slots.items():
            state[name], slot.grad = _slot_value(slot, slot.grad), None
        return StepOutput(value.detach(), state)

    return step
