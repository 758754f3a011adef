"""Training of a tiny model for a few optimizer steps in one of three ways, and comparison of the results.

    eager   FSDP2's `fully_shard` and autograd: the reference
    graph   traced, rewritten by the passes, bound to the live parameters
    plain   an `nn.Module` and autograd in one process: no FSDP2, no DTensor

A cell is a model and its layout. The results are one dictionary by name: the losses, every gradient of every step, the
norms and the parameters at the end.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_graph.capture.dynamo import CAPTURES
from torchtitan_graph.capture.own_step import OwnStep
from torchtitan_graph.capture.step import Real, SideOutputs, StepOutput, takes_real
from torchtitan_graph.capture.trace import Capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.config import job
from torchtitan_graph.config.own import find_own
from torchtitan_graph.data.batch import IGNORE_INDEX, PADDING, Batch
from torchtitan_graph.device import Target
from torchtitan_graph.loss import Regularizers
from torchtitan_graph.models.layers.adapt import adapt
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import initial_values, initialize
from torchtitan_graph.models.layers.moe import AuxiliaryLoss, Experts, ExpertTraining, set_up_experts
from torchtitan_graph.models.spec import load_family, tiny_config
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer, clip_grad_norm
from torchtitan_graph.parallel.dispatch import Exchange
from torchtitan_graph.parallel.layout import DATA_AXES, EP, EXPERT_FSDP, EXPERT_TP, PP, TP, Layout, ParallelDims
from torchtitan_graph.parallel.pipeline import LAST, StageGraph
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.schedule import Schedule, plan_pipeline
from torchtitan_graph.parallel.storage import NONE, Precision, Reshard, cast_parameters
from torchtitan_graph.quantize.products import Recipe, multiple_for
from torchtitan_graph.quantize.state import Float8
from torchtitan_graph.rates import RATES
from torchtitan_graph.steps import (
    Assembly,
    Graphs,
    GraphUpdate,
    StepOptions,
    Steps,
    Traced,
    bind_graphs,
    build_graphs,
    build_steps,
    trace_steps,
)
from torchtitan_graph.steps.choices import ELEMENTWISE, plan_regions
from torchtitan_graph.steps.options import own_step
from torchtitan_graph.steps.reference import Reference

DEVICE = torch.device("cpu")  # of all runs; a script for GPUs sets another
SEED = 3
NUM_STEPS = 5
NUM_ROWS, SEQ_LEN = 8, 32  # of one optimizer step, over all ranks and microbatches
MTP_WEIGHT = 0.3
# With these rates products and messages of tiny models take long, so that all are cut, see `overlap_products`.
SLOW = RATES["CPU"]._replace(half=1e7, full=1e7, near=1e6)
MAX_NORM = 0.5  # below the norm of every step: each one is clipped

FP32 = Precision()
BF16 = Precision(compute=torch.bfloat16)
FP64 = Precision(torch.float64, torch.float64, torch.float64)

Seen = dict[str, Tensor]
Data = Callable[["Cell", int, int], tuple[list[Batch], Tensor]]  # (cell, data_rank, step) -> microbatches, num_tokens


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model and how it is trained. The vocabulary is uneven: 509 rows, or 510 where tensor parallelism halves them,
    so that data parallelism then cuts 255. 130 feed-forward rows are uneven over four, and over two after TP."""

    dims: ParallelDims = ParallelDims()
    precision: Precision = FP32
    family: str = "llama3"
    flavor: str = "debugmodel"
    num_microbatches: int = 1
    tied: bool = False
    attn: str = "sdpa"
    loss_chunks: int = 1
    fused_layers: bool = False  # rotary positions and SwiGLU
    ffn_dim: int = 0
    changes: tuple[tuple[str, object], ...] = ()  # of the family's tiny configuration
    auxiliary: AuxiliaryLoss | None = None
    recompute: Recompute = Recompute()
    offload: tuple[str, ...] = ()
    cpu_offload: bool = False
    reshard: Reshard = Reshard()
    loss_parallel: bool = True
    own_loss: str | None = None  # the dotted name of a function
    own_step: str | None = None  # the same, of a step
    step_options: tuple[tuple[str, Any], ...] = ()
    reference: tuple[tuple[str, object], ...] | None = None  # changes of the tiny configuration; `family` is its own
    regularizers: Regularizers = Regularizers()
    async_tp: bool = False
    disabled: tuple[str, ...] = ()
    codegen: str = "off"
    fusions: tuple[str, ...] = ()
    dedupe: bool = False
    vocab_size: int = 0
    num_steps: int = NUM_STEPS
    capture: str = "make_fx"
    pipeline: tuple[tuple[str, Any], ...] = ()  # options of `job.Parallelism`: its schedule and stages
    float8: Recipe | None = None  # of linear layers in blocks, whose sizes allow it, and of all experts
    lengths: range | None = None  # of rows, where these differ
    freeze: tuple[str, ...] = ()  # patterns of names, as `model.freeze`
    lora: tuple[tuple[str, Any], ...] = ()  # options of `job.Lora`
    once: str = NONE  # `parallelism.fsdp_once_a_step`
    early_scores: bool = False  # `moe.early_scores`
    pairs: bool = False  # `parallelism.overlap_microbatches`
    exchange: Exchange = Exchange()
    sums_over_replicas: bool = False  # of a replica group: gradients are packed

    def __post_init__(self) -> None:
        if not self.vocab_size:
            object.__setattr__(self, "vocab_size", 509 if self.dims.tp == 1 else 510)
        if not self.ffn_dim:
            object.__setattr__(self, "ffn_dim", 130 if self.float8 is None else 160)

    @property
    def num_parts(self) -> int:
        return self.num_microbatches * self.dims.data

    def options(self, mode: str) -> StepOptions:
        """Return the step options of this cell."""
        return StepOptions(
            target=Target(DEVICE, SLOW if self.async_tp else RATES["CPU"], DEVICE.type == "cuda"),
            rows=(NUM_ROWS // self.num_parts, self.lengths[-1] if self.lengths else SEQ_LEN),
            lengths=self.lengths,
            mode=mode,
            num_microbatches=self.num_microbatches,
            precision=self.precision,
            recompute=self.recompute,
            offload=self.offload,
            cpu_offload=self.cpu_offload,
            reshard=self.reshard,
            experts=ExpertTraining(self.auxiliary, early_scores=self.early_scores),
            fused=tuple(ELEMENTWISE.values()) if self.fused_layers else (),
            loss_chunks=self.loss_chunks,
            loss_parallel=self.loss_parallel,
            own_loss=find_own("own_loss", self.own_loss) if self.own_loss else None,
            own_step=own_step(job.Training(step=self.own_step, step_options=dict(self.step_options))),
            regularizers=self.regularizers,
            async_tp=self.async_tp,
            regions=plan_regions(
                job.Compile(codegen=self.codegen, fusions=list(self.fusions), dedupe_layers=self.dedupe),
                build_model(self),
                DEVICE,
            ),
            disabled=self.disabled,
            mtp_weight=MTP_WEIGHT,
            pipeline=self.schedule(),
            float8=self.quantised(),
            once=self.once,
            pairs=self.pairs,
            exchange=self.exchange,
            sums_over_replicas=self.sums_over_replicas,
        )

    def quantised(self) -> Float8 | None:
        """Return the layers that multiply in float8, None without any."""
        if self.float8 is None:
            return None
        layers = dict(build_model(self).layers.named_modules(prefix="layers"))
        multiple = multiple_for(self.float8)
        fits = {n for n, m in layers.items() if type(m) is nn.Linear and not any(s % multiple for s in m.weight.shape)}
        return Float8({n: self.float8 for n, m in layers.items() if n in fits or isinstance(m, Experts)})

    def schedule(self) -> Schedule | None:
        """Return the schedule of the pipeline, None without one."""
        if self.dims.pp == 1:
            return None
        options = dataclasses.replace(job.Parallelism(pipeline_parallel_degree=self.dims.pp), **dict(self.pipeline))
        return plan_pipeline(options, build_model(self).modules_in_order, self.num_microbatches)


@functools.cache
def layout_of(dims: ParallelDims) -> Layout:
    """Return a layout, whose mesh is created once per worker."""
    return dims.layout(DEVICE.type)


# --- data -----------------------------------------------------------------------------------------------------------


def global_rows(vocab_size: int, step: int) -> Batch:
    """Return the rows of one optimizer step, the same on every rank: packed documents of about ten tokens."""
    generator = torch.Generator().manual_seed(step)
    # Low tokens are common: there is something to learn within five steps.
    tokens_BL = (torch.rand(NUM_ROWS, SEQ_LEN + 1, generator=generator) ** 3 * vocab_size).long()
    documents_BL = (torch.rand(NUM_ROWS, SEQ_LEN + 1, generator=generator) < 0.1).long().cumsum(1)
    is_last_BL = documents_BL[:, :-1] != documents_BL[:, 1:]
    labels_BL = tokens_BL[:, 1:].masked_fill(is_last_BL, IGNORE_INDEX)
    documents_BL = documents_BL[:, :-1]
    places_L = torch.arange(SEQ_LEN)
    starts_BL = torch.where(is_last_BL.roll(1, 1), places_L, 0)
    starts_BL[:, 0] = 0
    return Batch(tokens_BL[:, :-1], labels_BL, places_L - starts_BL.cummax(1).values, documents_BL)


def microbatches(cell: Cell, data_rank: int, step: int) -> tuple[list[Batch], Tensor]:
    """Return this rank's part of the step's rows, and the number of targets of all ranks and microbatches."""
    rows = global_rows(cell.vocab_size, step)
    num_rows = NUM_ROWS // cell.num_parts * cell.num_parts  # all parts are equal
    assert num_rows, f"{cell.num_parts} microbatches of {NUM_ROWS} rows: none would have a row"
    rows = Batch(*(x[:num_rows] for x in rows)).to(DEVICE)
    parts = [Batch(*each) for each in zip(*(x.chunk(cell.num_parts) for x in rows), strict=True)]
    return parts[data_rank :: cell.dims.data], (rows.labels_BL != IGNORE_INDEX).sum()


# --- the three ways -------------------------------------------------------------------------------------------------


def build_model(cell: Cell, device: str = "meta") -> Decoder:
    family = load_family(cell.family)
    sizes = {"vocab_size": cell.vocab_size, "tied": cell.tied, "ffn_dim": cell.ffn_dim, **dict(cell.changes)}
    config = tiny_config(family.FLAVORS[cell.flavor], **sizes)
    with torch.device(device):
        model = family.Model(config, cell.attn)
    adapt(model, family, job.Model(freeze=list(cell.freeze), lora=job.Lora(**dict(cell.lora))))
    return model


def build_reference(cell: Cell, device: str = "meta") -> Reference | None:
    """Return the frozen model next to a cell's; its weights are random."""
    if cell.reference is None:
        return None
    changes = dict(cell.reference)
    name, flavor = (str(changes.pop(key, default)) for key, default in (("family", "llama3"), ("flavor", "debugmodel")))
    of = Cell(
        cell.dims,
        family=name,
        flavor=flavor,
        vocab_size=cell.vocab_size,
        attn=cell.attn,
        changes=tuple(changes.items()),
    )
    model = build_model(of, device).requires_grad_(False)
    return Reference(model, load_family(name), Path())


def assemble(cell: Cell, options: StepOptions | None = None, capture: Capture | None = None) -> Assembly:
    """Return all that a cell's steps are built from; `options` and `capture` in place of the cell's own."""
    layout, family, capture = layout_of(cell.dims), load_family(cell.family), capture or CAPTURES[cell.capture]
    options = options or cell.options("graph")
    return Assembly(build_model(cell), family, layout, options, capture, build_reference(cell))


def build_eager(cell: Cell) -> Steps:
    return _initialized(build_steps(assemble(cell, cell.options("eager"))))


def _initialized(steps: Steps) -> Steps:
    initialize(steps.model, SEED)
    if steps.reference is not None:
        initialize(steps.reference, SEED + 1)
    return steps


def build_graph(
    cell: Cell, edit: Callable[[GraphModule], GraphModule] | None = None, capture: Capture | None = None
) -> Steps:
    """Build the steps on graphs; `edit` puts a fault into the finished graph."""
    assembly = assemble(cell, capture=capture)
    graphs = build_graphs(assembly)
    if edit is not None:
        graphs = graphs._replace(train=_edited(graphs.train, edit))
    return _initialized(bind_graphs(graphs, assembly))


def _edited(
    train: TracedResult | StageGraph | dict[int, StageGraph], edit: Callable[[GraphModule], GraphModule]
) -> TracedResult | StageGraph | dict[int, StageGraph]:
    if isinstance(train, TracedResult):
        return dataclasses.replace(train, gm=edit(train.gm))
    if isinstance(train, StageGraph):
        last = train.joined[LAST]
        return train._replace(joined={**train.joined, LAST: last._replace(gm=edit(last.gm))})
    number, stage = next(iter(train.items()))
    parts = stage.parts.by_name
    reduce = parts["reduce"]._replace(gm=edit(parts["reduce"].gm))
    return train | {number: stage._replace(parts=stage.parts._replace(by_name={**parts, "reduce": reduce}))}


def final_graphs(cell: Cell, capture: Capture | None = None) -> tuple[Decoder, Graphs]:
    """Return the model on meta, and its final graphs."""
    assembly = assemble(cell, capture=capture)
    return assembly.model, build_graphs(assembly)


def trace(cell: Cell, capture: Capture | None = None) -> Traced:
    """Return the steps before any pass, traced with real numbers, on which passes can be verified."""
    return trace_steps(assemble(cell, dataclasses.replace(cell.options("graph"), verify=True), capture))


class _PlainModel:
    """What a user's step is given, without any of the package's own: adapters are off where their B is zero."""

    def __init__(self, model: Decoder, own: OwnStep, masks: Any, real: Real) -> None:
        self._model, self._reference, self._masks, self._real = model, own.reference, masks, real
        self.has_adapters, self.has_reference = own.adapters_off is not None, own.reference is not None
        self.side = SideOutputs()

    def __call__(self, batch: Batch) -> Tensor:
        logits_BLV, self.side = self._model(
            batch.tokens_BL, batch.positions_BL, self._masks, side_outputs=True, **_real_of(self._model, self._real)
        )
        return logits_BLV  # type: ignore[no-any-return]

    @torch.no_grad()
    def without_adapters(self, batch: Batch) -> Tensor:
        copied = copy.deepcopy(self._model)
        for name, parameter in copied.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
        return copied(batch.tokens_BL, batch.positions_BL, self._masks)  # type: ignore[no-any-return]

    @torch.no_grad()
    def reference(self, batch: Batch) -> Tensor:
        assert self._reference is not None
        masks = self._reference.masks(batch.documents_BL, batch.positions_BL)  # type: ignore[operator]
        return self._reference(batch.tokens_BL, batch.positions_BL, masks)  # type: ignore[no-any-return]


class PlainSteps(NamedTuple):
    """A module's own step under autograd. It shares no code with the other two."""

    model: Decoder
    own_loss: Callable[..., Any] | None = None
    regularizers: Regularizers = Regularizers()
    step: OwnStep | None = None

    def train(self, batches: list[Batch], num_tokens: Tensor) -> StepOutput:
        total = torch.zeros((), dtype=next(self.model.parameters()).dtype)
        counts: dict[str, Tensor] = {}
        is_token_NBL = torch.stack([batch.documents_BL != PADDING for batch in batches])
        totals = is_token_NBL.sum(), is_token_NBL.any(-1).sum()
        for batch, is_token_BL in zip(batches, is_token_NBL, strict=True):
            real = Real(is_token_BL, *totals)
            masks = self.model.masks(batch.documents_BL, batch.positions_BL)
            if self.step is not None:
                own, side = self._own(batch, masks, num_tokens, real)
            else:
                rows = batch.tokens_BL, batch.positions_BL, masks
                logits_BLV, side = self.model(*rows, side_outputs=True, **_real_of(self.model, real))
                own = self._loss(logits_BLV, batch.labels_BL, batch) / num_tokens
            loss = sum(side.experts, own)
            loss = loss + sum(term[is_token_BL].sum() / totals[0] for term in side.losses.values())
            for k, ahead_BLV in enumerate(side.ahead, 1):  # targets of the same document
                number = sum(int((_labels_ahead(each, k) != IGNORE_INDEX).sum()) for each in batches)
                of_depth = self._loss(ahead_BLV, _labels_ahead(batch, k), batch) / number
                loss = loss + MTP_WEIGHT / len(side.ahead) * of_depth
            loss.backward()  # type: ignore[union-attr]
            total += loss.detach()  # type: ignore[union-attr]
            counts = {name: counts.get(name, 0) + x for name, x in side.state.items()}
        return StepOutput(total, counts)

    def _own(self, batch: Batch, masks: Any, num_tokens: Tensor, real: Real) -> tuple[Tensor, SideOutputs]:
        """Return the loss of the user's step, which calls the trained model once, and that call's side outputs."""
        assert self.step is not None
        given = _PlainModel(self.model, self.step, masks, real)
        returned = self.step.function(given, batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        return loss / num_tokens, given.side

    def _loss(self, logits_BLV: Tensor, labels_BL: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the user's loss, or of torch's own, computed in fp32 at least."""
        if self.own_loss is not None:
            returned = self.own_loss(logits_BLV, labels_BL, batch)
            return returned[0] if isinstance(returned, tuple) else returned
        logits_TV = logits_BLV.flatten(0, 1).to(torch.promote_types(logits_BLV.dtype, torch.float32))
        labels_T, smoothing = labels_BL.flatten(), self.regularizers.label_smoothing
        loss = F.cross_entropy(
            logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
        )
        if self.regularizers.z_loss:
            loss = loss + self.regularizers.z_loss * logits_TV[labels_T != IGNORE_INDEX].logsumexp(1).square().sum()
        return loss

    def clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm(self.model.parameters(), max_norm)


def _labels_ahead(batch: Batch, k: int) -> Tensor:
    """Return the labels k positions later in the same document."""
    labels_BL = batch.labels_BL.roll(-k, dims=1)
    labels_BL = labels_BL.masked_fill(batch.documents_BL.roll(-k, dims=1) != batch.documents_BL, IGNORE_INDEX)
    labels_BL[:, -k:] = IGNORE_INDEX
    return labels_BL


def _real_of(model: Decoder, real: Real) -> dict[str, Real]:
    return {"real": real} if takes_real(model) else {}


def build_plain(cell: Cell) -> PlainSteps:
    model = _plain(build_model(cell, DEVICE.type), cell, SEED)
    set_up_experts(model, ExpertTraining(cell.auxiliary, early_scores=cell.early_scores))
    options, step = cell.options("eager"), None
    if options.own_step is not None:
        frozen = build_reference(cell, DEVICE.type)
        reference = None if frozen is None else _plain(frozen.model, cell, SEED + 1)
        step = OwnStep(*options.own_step, reference, (lambda _: nullcontext()) if cell.lora else None)
    return PlainSteps(model, options.own_loss, options.regularizers, step)


def _plain(model: Decoder, cell: Cell, seed: int) -> Decoder:
    cast_parameters(model, cell.precision.storage)
    with torch.no_grad():
        for name, full in initial_values(model, seed, DEVICE):
            model.get_parameter(name).copy_(full)
    return model


# --- training and comparing -----------------------------------------------------------------------------------------


def optimizing(model: Decoder) -> tuple[Optimizer, LRScheduler]:
    """Return the optimizer and the schedule of the five steps."""
    # With a smaller eps Adam would amplify the rounding errors of gradients near zero, in the parameters alone.
    optimizer = build_optimizer(model, job.Optimizer(lr=1e-2, eps=1e-6))
    return optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), NUM_STEPS)


def train(
    cell: Cell,
    steps: Steps | PlainSteps,
    data: Data = microbatches,
    using: tuple[Optimizer, LRScheduler] | None = None,
    in_graph: bool = False,
) -> Seen:
    """Run optimizer steps like the trainer, and return the results on this rank. `in_graph` traces the optimizer's step
    too."""
    model = steps.model
    optimizer, schedule = using or optimizing(model)
    update = GraphUpdate(steps, optimizer, MAX_NORM) if in_graph and isinstance(steps, Steps) else None
    data_rank = layout_of(cell.dims).data_rank if dist.is_initialized() else 0
    seen: Seen = {}
    for k in range(1, cell.num_steps + 1):
        batches, num_tokens = data(cell, data_rank, k)
        if isinstance(steps, PlainSteps):
            loss, state, *_ = steps.train(batches, num_tokens)
        else:
            loss, state, *_ = steps.train(batches, num_tokens, [batch.to("cpu") for batch in batches])
        seen |= {f"step {k}: {name}": x for name, x in state.items()}
        seen[f"step {k}: loss"] = loss
        # Only another library's models may have parameters without a gradient, such as a router's bias.
        trained = [(n, p.grad) for n, p in model.named_parameters() if p.requires_grad]
        given = [(n, grad) for n, grad in trained if grad is not None or model.conversion is None]
        seen |= {f"step {k}: gradient of {n}": _copied(gradient) for n, gradient in given}
        if update is not None:
            seen[f"step {k}: norm"] = update.clip(loss)
        else:
            seen[f"step {k}: norm"] = steps.clip(MAX_NORM)
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        model.after_step(state)
    kept = model.state_dict().keys()
    seen |= {f"buffer {n}": b.clone() for n, b in model.named_buffers() if n in kept}
    return seen | {f"parameter {n}": _copied(p) for n, p in model.named_parameters()}


def _copied(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().clone()


def bits_that_differ(expected: Seen, found: Seen) -> list[str]:
    """Return the names of results that are not equal in every bit on this rank, layout included."""
    return [name for name in expected | found if not _same(expected.get(name), found.get(name))]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        if (a.shape, a.placements) != (b.shape, b.placements):
            return False
        a, b = a.to_local(), b.to_local()
    if a is None or b is None or type(a) is not type(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (x.detach().cpu().reshape(-1).view(torch.uint8) for x in (a, b))  # 0 is not -0
    return torch.equal(a, b)


def far_apart(expected: Seen, found: Seen, tolerance: float) -> list[str]:
    """Return the names of whole tensors that differ by more than `tolerance` times the expected one's largest value."""
    assert expected.keys() == found.keys()
    gaps = {name: ((found[name] - x).abs().max(), x.abs().max()) for name, x in expected.items()}
    far = {name: gap / largest for name, (gap, largest) in gaps.items() if not gap <= tolerance * largest}
    return [f"{name} (by {gap.item():.1e})" for name, gap in far.items()]


def gathered(cell: Cell, seen: Seen) -> Seen:
    """Return results gathered from the ranks' shards, and summed losses; replicas that differ fail an assertion."""
    mine = {name: _gathered(cell, name, x) for name, x in seen.items()}
    if cell.dims.pp == 1:
        return mine
    by_stage: list[Seen] = [{}] * cell.dims.pp
    dist.all_gather_object(by_stage, mine, group=layout_of(cell.dims).group(PP))
    whole: Seen = {}
    for of_stage in by_stage:
        for name, x in of_stage.items():
            assert torch.equal(whole.setdefault(name, x), x), f"{name} differs between stages"
    return whole


def _gathered(cell: Cell, name: str, x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        if name.endswith("loss"):
            losses = [torch.zeros_like(x) for _ in range(cell.dims.num_ranks)]
            dist.all_gather(losses, x)
            x = x.new_tensor(layout_of(cell.dims).total_loss([each.item() for each in losses]))
        return x
    mesh, part = x.device_mesh, x.to_local()
    axes = mesh.mesh_dim_names or ()
    # Tensor and expert parallelism cut first, then storage: gathered in the opposite order. The parts need not be
    # equal, and torch's own bookkeeping is not relied on.
    for axis in sorted(axes, key=[EXPERT_FSDP, *DATA_AXES, TP, EXPERT_TP, EP].index):
        parts: list[Tensor] = [part] * mesh.size(axes.index(axis))
        dist.all_gather_object(parts, part, group=mesh.get_group(axis))
        placement = x.placements[axes.index(axis)]
        if placement.is_replicate():
            assert all(torch.equal(each, part) for each in parts), f"{name} differs between the copies on {axis}"
        else:
            part = torch.cat(parts, placement.dim)  # type: ignore[attr-defined]
    assert part.shape == x.shape, name
    return part
