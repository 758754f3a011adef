"""Check that a loss does not depend on how rows are cut into microbatches and ranks, on a tiny example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_graph.capture.own_step import PAGE, OwnStep, StepModel
from torchtitan_graph.capture.step import SideOutputs, checked
from torchtitan_graph.config import job
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.loss import is_number
from torchtitan_graph.models.layers.adapt import add_adapters
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.lora import adapters_off
from torchtitan_graph.models.layers.moe import ExpertTraining, set_up_experts
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.steps.options import NamedStep
from torchtitan_graph.steps.reference import Reference, masks_beside

ROWS, LENGTH = 4, 16  # of the example
TOLERANCE = 1e-5  # relative: a function may compute in fp32
_MOST_CLASSES = 1024  # of the tiny models of a step, whose logits are held in fp64
_PAGE = "see docs/train/losses.md"

Part = tuple[slice, slice]  # of rows, and of their tokens
_HALVES = ((slice(0, ROWS // 2), slice(None)), (slice(ROWS // 2, ROWS), slice(None)))


def check_own_loss(name: str, function: Callable[..., Any], vocab_size: int, seq_len: int, cp: int) -> None:
    """Check that the user's loss of some rows is the sum of the losses of their halves, with the same gradients; under
    context parallelism also of the halves of each row.

    Raises:
        UserError: it is not, with what to change, or it does not return a sum.
    """
    length = min(seq_len, LENGTH) // 2 * 2 or 1
    batch, option = _example(vocab_size, length), f"loss.name = {name!r}"
    generator = torch.Generator().manual_seed(1)
    logits_BLV = torch.randn(ROWS, length, vocab_size, generator=generator, dtype=torch.float64)
    logits_BLV[: ROWS // 2] *= 3  # halves that differ

    def of(part: Part) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return the loss, and each metric, of a part of the example, with the gradient."""
        leaf = logits_BLV[part].clone().requires_grad_()
        rows = _part(batch, part)
        returned = function(leaf, rows.labels_BL, rows)
        loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        found = {"the loss": loss, **{f"the metric {key}": x for key, x in dict(metrics).items()}}
        if wrong := [key for key, x in found.items() if not is_number(x)]:
            raise UserError(
                f"{option}: {wrong[0]} must be the sum over the targets, a floating-point tensor without dimensions;"
                f" {_PAGE}"
            )
        return {key: (x.detach(), _gradient(x, [leaf])[0]) for key, x in found.items()}

    whole = of((slice(None), slice(None)))
    if not whole["the loss"][1].any():
        raise UserError(f"{option}: the loss does not depend on the logits, so nothing would be learned; {_PAGE}")
    cuts: dict[str, tuple[Sequence[Part], int]] = {"microbatches and ranks": (_HALVES, 0)}
    if cp > 1 and length > 1:
        halves = (slice(0, length // 2), slice(length // 2, length))
        cuts["context parallel's ranks"] = ([(slice(None), each) for each in halves], 1)
    for among, (parts, dim) in cuts.items():
        halves_of = [of(part) for part in parts]
        for key, (value, gradient) in whole.items():
            values, gradients = zip(*(each[key] for each in halves_of), strict=True)
            if _differ(value, values) or _far(gradient, torch.cat(gradients, dim)):
                raise UserError(
                    f"{option}: {key} depends on how rows are divided among {among}: it is {float(value):.6g} for"
                    f" {ROWS} rows, and {' + '.join(f'{float(x):.6g}' for x in values)} for their two halves."
                    f" {_remedy(value, values, batch, parts)}; {_PAGE}"
                )


def check_own_step(
    step: NamedStep, family: ModuleType, model: Decoder, reference: Reference | None, cp: int = 1
) -> str | None:
    """Check that the user's step returns for some rows the sum of what it returns for their halves, with the same
    gradients: on tiny models of the families of the trained model and of its reference. Return why that was not
    checked, if it was not.

    Raises:
        UserError: it does not, with what to change, or does not return sums, or needs what there is not.
    """
    option = f"training.step = {step.name!r}"
    vocab_size = min(model.config.vocab_size, _MOST_CLASSES)
    changes = {} if model.config.vocab_size == vocab_size else {"vocab_size": vocab_size}
    try:
        trained = _tiny(family, model.config, **changes)
        if model.lora.rank:
            add_adapters(trained, family, job.Lora(rank=2))
            _fill(trained.double())
        frozen = None if reference is None else _tiny(reference.family, reference.model.config, seed=1, **changes)
    except Exception as error:  # of a family that can't be made small
        return f"{option}: whether it depends on how rows are cut was not checked: {type(error).__name__}: {error}"
    own = OwnStep(step.name, step.function, frozen, adapters_off if model.lora.rank else None)
    batch = _example(vocab_size, LENGTH)
    parameters = [p for p in trained.parameters() if p.requires_grad]

    def of(part: Part) -> Mapping[str, tuple[Tensor, list[Tensor]]]:
        """Return the loss, and each metric, of a part of the example, with the gradients."""
        rows = _part(batch, part)
        masks = {
            **trained.masks(rows.documents_BL, rows.positions_BL),
            **masks_beside(trained, frozen, rows.documents_BL, rows.positions_BL, None, torch.device("cpu")),
        }

        def run(of_call: Batch, own_masks: Any) -> tuple[Tensor, None]:
            return trained(of_call.tokens_BL, of_call.positions_BL, own_masks), None

        loss, metrics = own.sums(StepModel(own, trained, masks, run), rows)
        found = {"the loss": loss, **{f"the metric {key}": x for key, x in metrics.items()}}
        return {key: (x.detach(), _gradient(x, parameters)) for key, x in found.items()}

    try:
        whole, *halves = [of(part) for part in ((slice(None), slice(None)), *_HALVES)]
    except UserError:
        raise
    except Exception as error:  # of the user's code, perhaps for the small vocabulary: else it comes in the real model
        return (
            f"{option}: whether it depends on how rows are cut was not checked, as it does not run on a tiny model of"
            f" {vocab_size} tokens: {type(error).__name__}: {error}"
        )
    if not any(gradient.any() for gradient in whole["the loss"][1]):
        raise UserError(f"{option}: the loss does not depend on model(batch), so nothing would be learned; {PAGE}")
    for key, (value, gradients) in whole.items():
        values = [each[key][0] for each in halves]
        pairs = zip(gradients, *(each[key][1] for each in halves), strict=True)
        if _differ(value, values) or any(_far(g, a + b) for g, a, b in pairs):
            raise UserError(
                f"{option}: {key} depends on how rows are divided among microbatches and ranks: it is"
                f" {float(value):.6g} for {ROWS} rows of a tiny model, and"
                f" {' + '.join(f'{float(x):.6g}' for x in values)} for their two halves."
                f" {_remedy(value, values, batch, _HALVES)}; {PAGE}"
            )
    if cp > 1:
        _check_parts_of_rows(own, batch, vocab_size)
    return None


class _GivenLogits:
    """What a step is given as `model`, with logits that are given."""

    def __init__(self, own: OwnStep, logits_3BLV: Tensor) -> None:
        self.has_adapters, self.has_reference = own.adapters_off is not None, own.reference is not None
        self._trained, self._plain, self._reference = logits_3BLV

    def __call__(self, batch: Batch) -> Tensor:
        return self._trained

    def without_adapters(self, batch: Batch) -> Tensor:
        return self._plain.detach()

    def reference(self, batch: Batch) -> Tensor:
        return self._reference.detach()


def _check_parts_of_rows(own: OwnStep, batch: Batch, vocab_size: int) -> None:
    """Check that a step of given logits of whole rows is the sum of those of the rows' halves.

    Raises:
        UserError: it is not.
    """
    shape = 3, *batch.tokens_BL.shape, vocab_size
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()

    def of(tokens: slice) -> tuple[Tensor, Tensor]:
        part = slice(None), tokens
        loss, _ = own.sums(_GivenLogits(own, leaf[:, :, tokens]), _part(batch, part))  # type: ignore[arg-type]
        return loss.detach(), _gradient(loss, [leaf])[0]

    half = batch.tokens_BL.shape[1] // 2
    (value, gradient), *halves = of(slice(None)), of(slice(0, half)), of(slice(half, None))
    if _differ(value, [x for x, _ in halves]) or _far(gradient, sum(g for _, g in halves)):  # type: ignore[arg-type]
        raise UserError(
            f"training.step = {own.name!r}: the loss depends on how rows are divided among context parallel's ranks: it"
            f" is {float(value):.6g} for whole rows, and {' + '.join(f'{float(x):.6g}' for x, _ in halves)} for their"
            " halves; use another axis, such as parallelism.tensor_parallel_degree, or return a sum in which each"
            f" target's number depends on its own logits alone; {PAGE}"
        )


def check_terms(name: str, family: ModuleType, config: Any) -> str | None:
    """Check that the means of the losses and metrics in a model's `SideOutputs` over some rows are those over their
    halves, with the same gradients: on a tiny model of the user's own family. Return why there can be none.

    Raises:
        UserError: one is not, with what to change.
    """
    if "." not in name:  # the package's own families have no such terms
        return None
    try:
        model = _tiny(family, config)
        whole, *halves = [_terms_of(model, part) for part in ((slice(None), slice(None)), *_HALVES)]
    except Exception as error:  # of the user's code: the same fault in the real model is reported where it occurs
        return (
            f"model.name = {name!r}: whether its losses depend on how rows are cut was not checked, as no tiny model of"
            f" it runs: {type(error).__name__}: {error}"
        )
    for key, (value, gradients) in whole.items():
        others = [each[key] for each in halves]
        values = [each / 2 for each, _ in others]
        pairs = zip(gradients, *(found for _, found in others), strict=True)
        if _differ(value, values) or any(_far(g, (a + b) / 2) for g, a, b in pairs):
            first, second = (float(each) for each, _ in others)
            raise UserError(
                f"model.name = {name!r}: {key} depends on how rows are divided among microbatches and ranks: its mean"
                f" over {ROWS} rows of a tiny model is {float(value):.6g}, and over their halves {first:.6g} and"
                f" {second:.6g} (or its gradients differ). A token's number must be computed from its own row alone:"
                " where it is divided by a sum or mean over the microbatch, divide by one over the token's row, or by a"
                " constant; see docs/extend/family.md"
            )
    return None


def _example(vocab_size: int, length: int) -> Batch:
    """Return rows of packed documents whose halves have different tokens and numbers of targets."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = (torch.rand(ROWS, length + 1, generator=generator) * vocab_size).long()
    tokens_BL[: ROWS // 2] //= 2
    labels_BL = tokens_BL[:, 1:].clone()
    labels_BL[0, length // 3 :] = IGNORE_INDEX
    places_L, begin = torch.arange(length), length // 2
    documents_BL = (places_L >= begin).long().expand(ROWS, -1)
    labels_BL[:, begin - 1] = IGNORE_INDEX
    return Batch(tokens_BL[:, :-1], labels_BL, places_L - documents_BL * begin, documents_BL)


def _part(batch: Batch, part: Part) -> Batch:
    return batch._replace(**{name: getattr(batch, name)[part] for name in batch._fields})


def _gradient(x: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of x, zeros where it depends on a leaf in no way."""
    if not x.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(x, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def _differ(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    size = max(float(x.abs()) for x in (whole, *parts))
    return not abs(float(whole) - sum(map(float, parts))) <= TOLERANCE * size


def _far(a: Tensor, b: Tensor) -> bool:
    return not float((a - b).abs().max()) <= TOLERANCE * float(torch.maximum(a.abs(), b.abs()).max())


def _remedy(value: Tensor, values: Sequence[Tensor], batch: Batch, parts: Sequence[Part]) -> str:
    """Return what to change in a function that should return a sum."""

    def counts(rows: Batch) -> dict[str, int]:
        return {
            "targets": int((rows.labels_BL != IGNORE_INDEX).sum()),
            "tokens or rows": rows.labels_BL.numel(),
        }

    of_whole, of_parts = counts(batch), [counts(_part(batch, part)) for part in parts]
    for what, number in of_whole.items():
        if not _differ(value * number, [x * each[what] for x, each in zip(values, of_parts, strict=True)]):
            return (
                f"It is a mean over {what}: return the sum over the targets, without dividing by their number"
                " (reduction='sum'): the step divides by the number of targets of all ranks and microbatches"
            )
    return (
        "Return a sum over the targets in which each target's number depends on its own row alone, and divide by"
        " nothing that is counted over several rows: the step divides by the number of targets of all ranks and"
        " microbatches"
    )


def _tiny(family: ModuleType, config: Any, seed: int = 0, **changes: Any) -> Decoder:
    """Return a tiny model of a family on the CPU, in fp64, with random weights."""
    with torch.device("cpu"):
        model = family.Model(tiny_config(config, **changes), "sdpa").double()
    _fill(model, seed)
    set_up_experts(model, ExpertTraining())
    return model  # type: ignore[no-any-return]


def _fill(model: Decoder, seed: int = 0) -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)


def _terms_of(model: Decoder, part: Part) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Return the mean of each loss and metric of a part of the example, with its gradients."""
    rows = _part(_example(model.config.vocab_size, LENGTH), part)
    masks = model.masks(rows.documents_BL, rows.positions_BL)
    _, side = checked(model, model(rows.tokens_BL, rows.positions_BL, masks, side_outputs=True))
    parameters = [p for p in model.parameters() if p.requires_grad]
    shaped = dict(_shaped(side, rows))
    return {key: (x.mean().detach(), _gradient(x.mean(), parameters)) for key, x in shaped.items()}


def _shaped(side: SideOutputs, rows: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield the losses and metrics that are a number for each token; tracing refuses the others."""
    for field, numbers in (("losses", side.losses), ("metrics", side.metrics)):
        for name, x in numbers.items():
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape == rows.tokens_BL.shape:
                yield f"SideOutputs.{field}: {name}", x
