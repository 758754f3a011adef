"""The one place where a training step is put together: a model, a layout and options in, steps to call out.

    steps = build_steps(model, family, layout, options)
    loss, state = steps.train(microbatches, num_tokens)      gradients are in `.grad`

The trainer, the checks, the benchmarks and the tests all train through it: as graphs that passes edit, or eagerly.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from torchtitan_graph import device as devices
from torchtitan_graph.compiler import Inspection, PassPlan, passes, plan_regions, run_passes
from torchtitan_graph.config import JobConfig
from torchtitan_graph.data.batch import BYTES_PER_TOKEN, IGNORE_INDEX, Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.flops import Flops, count_flops
from torchtitan_graph.graph.partition import partition
from torchtitan_graph.graph.step import (
    StageModules,
    StepOutput,
    bind_train_step,
    make_eager_step,
    make_eval_step,
    trace_eval_step,
    trace_stage_evaluation,
    trace_stage_step,
    trace_train_step,
)
from torchtitan_graph.graph.trace import Capture, TracedResult, make_fx_capture, run_traced
from torchtitan_graph.log import logger
from torchtitan_graph.loss import cross_entropy, loss_context
from torchtitan_graph.models.layers.attention import flex_cpu_bytes
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.masks import dense_mask_bytes
from torchtitan_graph.models.layers.moe import AuxiliaryLoss, ExpertTraining, MoE, set_up_experts
from torchtitan_graph.optim import clip_grad_norm
from torchtitan_graph.parallel.layout import CP, PP, TP, Layout, ParallelDims, sum_over
from torchtitan_graph.parallel.parallelize import check_plan, context_modules, parallelize
from torchtitan_graph.parallel.pipeline import Pipeline, StageGraph
from torchtitan_graph.parallel.recompute import Recompute, recompute_eager
from torchtitan_graph.parallel.schedule import Schedule, plan_pipeline
from torchtitan_graph.parallel.sequence import block_length, places_of
from torchtitan_graph.parallel.storage import (
    Precision,
    Reshard,
    Storage,
    buckets,
    cast_parameters,
    materialize,
    plan_storage,
    shard_eager,
)
from torchtitan_graph.passes.compile_regions import Regions


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a model's steps are computed, beside its layout.

    rows, eval_rows  of a microbatch of training, and of evaluation if there is one: (number of rows, tokens per row)
    mode             "graph", or "eager": FSDP2 and autograd, the reference
    loss             (logits, labels, num_tokens) -> scalar
    loss_parallel    under tensor parallelism logits stay sharded over the vocabulary for the loss
    disabled         passes to leave out, by name
    verify           check every pass on real numbers
    dump_to          folder for the readable graph after each pass
    seed             of the numbers that passes are verified on
    mtp_weight       of the loss of the layers that predict more tokens
    pipeline         the schedule of its stages, where there are any
    """

    device: torch.device
    rows: tuple[int, int]
    eval_rows: tuple[int, int] | None = None
    mode: str = "graph"
    num_microbatches: int = 1
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    reshard: Reshard = Reshard()
    experts: ExpertTraining = ExpertTraining()
    regions: Regions = dataclasses.field(default_factory=dict)
    loss: Callable[..., Tensor] = cross_entropy
    loss_parallel: bool = True
    disabled: Sequence[str] = ()
    verify: bool = False
    dump_to: Path | None = None
    seed: int = 0
    mtp_weight: float = 0.3
    pipeline: Schedule | None = None


def rows_per_microbatch(config: JobConfig) -> int:
    """Give the rows that a rank computes at a time; of a pipeline, that a stage does."""
    of_stage = config.parallelism.pipeline_parallel_microbatch_size
    return of_stage if config.parallelism.pipeline_parallel_degree > 1 else config.training.local_batch_size


def step_options(config: JobConfig, model: Decoder, num_microbatches: int, device: torch.device) -> StepOptions:
    """Read what the configuration says of steps.

    Raises:
        UserError: a loss of experts for a model without them, regions to compile that it does not have, or stages that
            can't be made of it.
    """
    training, validation, moe = config.training, config.validation, config.moe
    if not any(isinstance(m, MoE) for m in model.modules()) and (moe.load_balance_loss or moe.router_z_loss):
        raise UserError(
            f"moe.load_balance_loss = {moe.load_balance_loss}, moe.router_z_loss = {moe.router_z_loss}: "
            f"{config.model.name} {config.model.flavor} has no experts; leave them at 0"
        )
    auxiliary = AuxiliaryLoss(moe.load_balance_loss, moe.load_balance_over == "sequence", moe.router_z_loss)
    return StepOptions(
        device=device,
        rows=(rows_per_microbatch(config), training.seq_len),
        eval_rows=(validation.local_batch_size, validation.seq_len) if validation.enable else None,
        mode=config.compile.mode,
        num_microbatches=num_microbatches,
        precision=Precision(
            storage=getattr(torch, training.dtype),
            compute=getattr(torch, training.mixed_precision_param),
            reduce=getattr(torch, training.mixed_precision_reduce),
        ),
        recompute=Recompute.from_option(
            config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option
        ),
        reshard=Reshard.from_option(config.parallelism.fsdp_reshard_after_forward),
        experts=ExpertTraining(
            auxiliary if moe.load_balance_loss or moe.router_z_loss else None,
            moe.bias_update_speed,
            config.debug.moe_force_load_balance,
        ),
        regions=plan_regions(config.compile, model, device),
        loss_parallel=not config.parallelism.disable_loss_parallel,
        disabled=config.compile.disable_passes,
        verify=config.debug.verify_passes,
        dump_to=Path(config.job.dump_folder, "graphs") if config.debug.dump_graphs else None,
        seed=config.debug.seed or 0,
        mtp_weight=training.mtp_loss_weight,
        pipeline=_pipeline(config, model, num_microbatches),
    )


def _pipeline(config: JobConfig, model: Decoder, num_microbatches: int) -> Schedule | None:
    if config.parallelism.pipeline_parallel_degree == 1:
        return None
    return plan_pipeline(config.parallelism, model.modules_in_order, num_microbatches)


def check_steps(
    config: JobConfig, model: Decoder, family: ModuleType, dims: ParallelDims, options: StepOptions
) -> None:
    """Check, before any process group exists, that the model can be laid out and its attention fits this machine.

    Raises:
        UserError: as `check_plan`, no parameter takes gradients, or rows, masks or flex attention's scores can't fit; a
            dry run allocates none.
    """
    check_plan(model, family.PLAN, dims)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model.name = {config.model.name!r}: none of its parameters takes gradients (requires_grad), so there is "
            "nothing to train; leave at least one that does"
        )
    if config.comm.mode == "fake_backend":
        return
    _check_rows_fit(config, model, options.precision.compute.itemsize)
    if config.model.attn == "flex" and options.device.type == "cpu":
        _check_scores_fit(options, model.config.num_heads // dims.tp, dims.cp)


def _check_rows_fit(config: JobConfig, model: Decoder, itemsize: int) -> None:
    """Refuse rows whose tokens, or dense masks, can't fit into this device's memory."""
    num_masks, what, hint = 0, "the tokens", ""
    if config.model.attn == "sdpa":
        num_masks = len(model.mask_rules(*torch.zeros(2, 1, 1, dtype=torch.int64)))
        what = "with model.attn = 'sdpa' the attention mask and the tokens"
        hint = ", a larger parallelism.context_parallel_degree, or attn = 'flex', which needs no dense mask"
    tables = {"training": config.training, "validation": config.validation if config.validation.enable else None}
    for name, table in tables.items():
        if table is None:
            continue
        rows = rows_per_microbatch(config) if table is config.training else table.local_batch_size
        seq_len, total = table.seq_len, devices.memory_total_gib()
        queries = seq_len // config.parallelism.context_parallel_degree
        num_bytes = rows * seq_len * BYTES_PER_TOKEN + dense_mask_bytes(rows, queries, seq_len, num_masks, itemsize)
        if (needed := num_bytes / devices.GIB) > total:
            raise UserError(
                f"{name}.seq_len = {seq_len}: {what} of {name}.local_batch_size {rows} rows would take about "
                f"{needed:,.0f} GiB, and this device has {total:.0f}: use shorter rows or fewer of them{hint}"
            )


def _check_scores_fit(options: StepOptions, num_heads: int, cp: int) -> None:
    """Refuse rows whose scores can't fit on a CPU, where flex attention is not compiled and holds many of them."""
    batch, seq_len = options.rows
    needed = flex_cpu_bytes(batch, num_heads, seq_len // cp, seq_len) / devices.GIB
    if needed > devices.memory_total_gib():
        raise UserError(
            f"model.attn = 'flex': on a CPU one layer's scores would take about {needed:.0f} GiB at "
            f"training.local_batch_size {batch}, training.seq_len {seq_len} and {num_heads} heads, and this machine "
            f'has {devices.memory_total_gib():.0f}: use attn = "sdpa", which computes the same with little memory, or '
            "a smaller batch"
        )


Step = Callable[[Any, Any, Tensor], StepOutput]  # (batch, masks, num_tokens); gradients go to `.grad`
Evaluation = Callable[[Any, Any, Tensor], Tensor]  # the same -> loss


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a run computes with: built by `build_steps`, called by all ranks together."""

    model: Decoder
    layout: Layout
    loss_parallel: bool
    step: Step | Pipeline
    evaluation: Evaluation | None
    flops: Flops | None = None

    def train(self, microbatches: Sequence[Batch], num_tokens: Tensor) -> StepOutput:
        """Add the gradients of an optimizer step to the live parameters' `.grad`.

        Args:
            microbatches: of this rank, on the device; of whole rows, also where ranks share them.
            num_tokens: scalar, the targets of all ranks and microbatches.

        Returns:
            the loss of this rank's microbatches, and the state that the step changes, of all ranks' (`SideOutputs`).
        """
        if isinstance(self.step, Pipeline):
            output = self.step.train([partial(self._inputs, batch, num_tokens) for batch in microbatches])
            return StepOutput(output.loss, self._sum_state(output.state))
        loss: Tensor | None = None
        state: dict[str, Tensor] = {}
        for batch in microbatches:
            output = self._run(self.step, batch, num_tokens)
            loss = output.loss if loss is None else loss + output.loss
            state = {name: state.get(name, 0) + x for name, x in output.state.items()}
        assert loss is not None, "a step has microbatches"
        return StepOutput(loss, self._sum_state(state))

    def evaluate(self, batch: Batch) -> Tensor:
        """Give the sum of the loss over this rank's targets of a batch."""
        one = torch.ones((), dtype=torch.int64, device=batch.tokens_BL.device)
        if isinstance(self.step, Pipeline):
            return self.step.evaluate(partial(self._inputs, batch, one))
        assert self.evaluation is not None, "built when the options have eval_rows"
        return self._run(self.evaluation, batch, one)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients of all ranks, as `clip_grad_norm`."""
        parameters = self.model.parameters()
        if not isinstance(self.step, Pipeline):
            return clip_grad_norm(parameters, max_norm)
        return clip_grad_norm(parameters, max_norm, self.layout.group(PP), self.step.repeated)

    def count_flops(self, microbatches: Sequence[Batch]) -> float | None:
        """Give the operations of a step on this rank, in a pipeline the mean over its stages; None in eager mode,
        where there is no graph to count them on."""
        if self.flops is None:
            return None
        visible = (self.model.visible_pairs(batch.documents_BL, batch.positions_BL) for batch in microbatches)
        return self.layout.mean_over_stages(sum(map(self.flops.of, visible)))

    def _run(self, step: Callable[..., Any], batch: Batch, num_tokens: Tensor) -> Any:
        with loss_context(self.loss_parallel):
            return step(*self._inputs(batch, num_tokens))

    def _inputs(self, batch: Batch, num_tokens: Tensor) -> tuple[Batch, Any, Tensor]:
        return *_of_this_rank(batch, self.model, self.layout), num_tokens

    def _sum_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up the ranks' counts, all of a dtype in one message. They are of what routers see."""
        summed: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in state.values()):
            alike = {name: x for name, x in state.items() if x.dtype == dtype}
            total = sum_over(self.layout.routing_groups, torch.cat([x.flatten() for x in alike.values()]))
            parts = total.split([x.numel() for x in alike.values()])
            summed |= {name: part.view_as(x) for (name, x), part in zip(alike.items(), parts, strict=True)}
        return {name: summed[name] for name in state}


def _of_this_rank(whole: Batch, model: Decoder, layout: Layout) -> tuple[Batch, Any]:
    """Give this rank's part of the rows, and its masks: of its own queries, and the whole rows' keys."""
    if layout.degree(CP) == 1:
        return whole, model.masks(whole.documents_BL, whole.positions_BL)
    L, device = whole.tokens_BL.shape[1], whole.tokens_BL.device
    places_L = places_of(layout.rank(CP), L, layout.degree(CP), device)
    masks = model.masks(whole.documents_BL, whole.positions_BL, places_L)
    return Batch(*(x[:, places_L] for x in whole)), masks


class Traced(NamedTuple):
    """A model's steps in the compute layout, before any pass.

    plan    what the passes are told
    inputs  the tensors that the training step was traced with, but for parameters and buffers
    """

    train: TracedResult
    evaluate: TracedResult | None
    plan: PassPlan
    flops: Flops
    inputs: list[Tensor]


class Graphs(NamedTuple):
    """The final graphs of a model's steps, and how its parameters lie at rest; nothing is allocated yet. Of a pipeline,
    those of this rank's stages, by number."""

    train: TracedResult | dict[int, StageGraph]
    evaluate: TracedResult | None
    storages: Mapping[str, Storage]
    flops: Flops


def build_steps(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> Steps:
    """Lay a model out, build its steps, and allocate its parameters; their values are yet to be given.

    Args:
        model: on meta, as its family makes it; `check_steps` has passed.
        family: the module that defines `PLAN`.
        capture: how the step becomes a graph.
    """
    if options.mode == "graph":
        return bind_graphs(build_graphs(model, family, layout, options, capture), model, layout, options)
    _prepare(model, family, layout, options)
    recompute_eager(model.blocks, options.recompute)
    shard_eager(model, model.blocks, layout, options.precision, options.reshard, options.device)
    evaluate = make_eval_step(model, options.loss) if options.eval_rows else None
    return Steps(model, layout, _loss_parallel(layout, options), make_eager_step(model, options.loss), evaluate)


def bind_graphs(graphs: Graphs, model: Decoder, layout: Layout, options: StepOptions) -> Steps:
    """Allocate the parameters of a model, and let the graphs step on them."""
    cast_parameters(model, options.precision.storage)
    materialize(model, graphs.storages, options.device)
    evaluate = run_traced(graphs.evaluate, module=model) if graphs.evaluate is not None else None
    step: Step | Pipeline
    if isinstance(graphs.train, dict):
        assert options.pipeline is not None
        tied = model.tok_embeddings.weight if model.config.tied and model.tok_embeddings is not None else None
        step = Pipeline(options.pipeline, graphs.train, model, tied, layout)
    else:
        step = bind_train_step(graphs.train, model)
    return Steps(model, layout, _loss_parallel(layout, options), step, evaluate, graphs.flops)


def build_graphs(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> Graphs:
    """Trace a model's steps, and run the passes on them; this is also all of a dry run."""
    if options.pipeline is not None:
        return _build_stages(model, family, layout, options, capture)
    traced = trace_steps(model, family, layout, options, capture)
    shown = dist.get_rank() == 0 or dist.get_backend() == "fake"
    watch = Inspection(dump_to=options.dump_to if shown else None, verify_on=traced.inputs if options.verify else None)

    def rewritten(step: TracedResult, watch: Inspection) -> TracedResult:
        gm = run_passes(step.gm, passes(traced.plan), options.disabled, options.device, watch)
        return dataclasses.replace(step, gm=gm)

    evaluate = traced.evaluate and rewritten(traced.evaluate, Inspection("evaluation step"))
    return Graphs(rewritten(traced.train, watch), evaluate, traced.plan.storages, traced.flops)


def _build_stages(model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture) -> Graphs:
    """Build the graphs of this rank's pipeline stages."""
    assert options.pipeline is not None
    numbers = options.pipeline.stages_of(layout.rank(PP))
    for number in numbers:
        modules = options.pipeline.stages[number]
        logger.info(f"stage {number} of {len(options.pipeline.stages)}: {modules[0]} to {modules[-1]}")
    model.keep([name for number in numbers for name in options.pipeline.stages[number]])
    _prepare(model, family, layout, options)
    cast_parameters(model, options.precision.compute)
    storages = plan_storage(model, layout, options.precision)
    built = {number: _build_stage(number, model, storages, layout, options, capture) for number in numbers}
    flops = functools.reduce(operator.add, (count for _, count in built.values()))
    return Graphs({number: stage for number, (stage, _) in built.items()}, None, storages, flops)


def _build_stage(
    number: int, model: Decoder, storages: Mapping[str, Storage], layout: Layout, options: StepOptions, capture: Capture
) -> tuple[StageGraph, Flops]:
    """Trace a stage, run the passes on it, and cut it into the parts that its schedule runs."""
    assert options.pipeline is not None
    begin, last = time.perf_counter(), len(options.pipeline.stages) - 1
    stage = StageModules(options.pipeline.stages[number], number == 0, number == last)
    device, evaluate, eval_passed = options.device, None, None
    example, passed = _stage_example(model, options.rows, stage, layout, options)
    with loss_context(_loss_parallel(layout, options)):
        sum_in = options.precision.sum_in
        train = trace_stage_step(model, options.loss, stage, example, device=device, capture=capture, sum_in=sum_in)
        if options.eval_rows is not None:
            (*others, _), eval_passed = _stage_example(model, options.eval_rows, stage, layout, options)
            evaluate = trace_stage_evaluation(model, options.loss, stage, tuple(others), device=device, capture=capture)
    nodes, flops = len(train.gm.graph.nodes), count_flops(train.gm, model.blocks)
    logger.info(f"stage {number}: traced in {time.perf_counter() - begin:.1f} s, {nodes} nodes")
    # Weights are gathered once a step, unless they are to be given up as soon as may be.
    again = options.reshard.root
    plan = PassPlan(
        storages,
        model.blocks,
        buckets(model, model.blocks),
        options.recompute,
        Reshard(blocks=again, root=again),
        options.regions,
    )
    watch = Inspection(
        f"stage {number}",
        options.dump_to / f"stage_{number}"
        if options.dump_to and not any(layout.mesh.get_coordinate() or ())
        else None,
        [x.detach() for x in pytree.tree_leaves(example) if isinstance(x, Tensor)] if options.verify else None,
    )
    before, after = ([each for each in passes(plan) if each.cut == cut] for cut in (False, True))
    gm = run_passes(train.gm, before, options.disabled, device, watch)
    parts = partition(gm, gather_once=not again, split_backward=options.pipeline.splits_backward)
    # What is reduced was summed in the reduction's dtype, not in the graph's: its casts, which then do nothing, are not
    # to be compiled; those of a gather run once a step.
    cut = {
        name: part
        if name in ("gather", "reduce")
        else part._replace(
            gm=run_passes(part.gm, after, options.disabled, device, Inspection(f"stage {number}, {name}"))
        )
        for name, part in parts.by_name.items()
    }
    if evaluate is not None:
        watch = Inspection(f"stage {number}, evaluation")
        final = run_passes(evaluate.gm, passes(plan), options.disabled, device, watch)
        evaluate = dataclasses.replace(evaluate, gm=final)
    train = dataclasses.replace(train, gm=gm)
    return StageGraph(
        parts._replace(by_name=cut), train, evaluate, passed, eval_passed, options.precision.reduce
    ), flops


def _stage_example(
    model: Decoder, rows: tuple[int, int], stage: StageModules, layout: Layout, options: StepOptions
) -> tuple[tuple[Any, ...], Tensor]:
    """Make a stage's inputs (batch, masks, num_tokens, x, dy), and what is like x and dy, on meta. Of real numbers, as
    `_example` says, dy is that of one rank alone."""
    batch, masks, num_tokens = _example(model, rows, layout, options)
    shape = rows[0], batch.tokens_BL.shape[1] // layout.degree(TP), model.config.dim
    passed = torch.empty(shape, dtype=options.precision.compute, device="meta")
    x, dy = passed, passed
    if options.verify:
        generator = torch.Generator().manual_seed(options.seed)
        x, dy = (torch.randn(shape, generator=generator).to(batch.tokens_BL.device, passed.dtype) for _ in range(2))
        dy = dy * (layout.data_rank == 0)
    first, last = stage.first, stage.last
    return (batch, masks, num_tokens, None if first else x.requires_grad_(), None if last else dy), passed


def trace_steps(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> Traced:
    """Lay a model out, and trace its steps."""
    begin = time.perf_counter()
    _prepare(model, family, layout, options)
    cast_parameters(model, options.precision.compute)
    storages = plan_storage(model, layout, options.precision)
    device, evaluate = options.device, None
    example = _example(model, options.rows, layout, options)
    with loss_context(_loss_parallel(layout, options)):
        sum_in = options.precision.sum_in
        train = trace_train_step(model, options.loss, *example, device=device, capture=capture, sum_in=sum_in)
        if options.eval_rows is not None:
            other = _example(model, options.eval_rows, layout, options)
            evaluate = trace_eval_step(model, options.loss, *other, device=device, capture=capture)
    logger.info(f"traced in {time.perf_counter() - begin:.1f} s, {len(train.gm.graph.nodes)} nodes")
    groups = buckets(model, model.blocks)
    context = context_modules(model, family.PLAN)
    plan = PassPlan(storages, model.blocks, groups, options.recompute, options.reshard, options.regions, context)
    return Traced(train, evaluate, plan, count_flops(train.gm, model.blocks), pytree.tree_leaves(example))


def _prepare(model: Decoder, family: ModuleType, layout: Layout, options: StepOptions) -> None:
    """Tell the model what is no part of it, and bring it into the compute layout."""
    groups, row_groups = ([g.group_name for g in each] for each in (layout.routing_groups, layout.row_groups))
    num_parts = options.num_microbatches * layout.num_routing_parts
    set_up_experts(model, options.experts, num_parts, groups, row_groups)
    model.ahead_weight = options.mtp_weight
    parallelize(model, family.PLAN, layout, loss_parallel=options.loss_parallel)


def _loss_parallel(layout: Layout, options: StepOptions) -> bool:
    return options.loss_parallel and layout.degree(TP) > 1


def _example(model: Decoder, rows: tuple[int, int], layout: Layout, options: StepOptions) -> tuple[Batch, Any, Tensor]:
    """Make inputs of the shapes to trace: random tokens if passes are to be verified on them, else on meta."""
    device = options.device if options.verify else torch.device("meta")
    generator = torch.Generator().manual_seed(options.seed + layout.data_rank)
    tokens, labels = torch.randint(model.config.vocab_size, (2, *rows), generator=generator)
    documents = (torch.rand(rows, generator=generator) < 0.01).long().cumsum(1)
    positions = torch.arange(rows[1]).expand(rows).contiguous()
    # `verify_pass` wants the targets, and with them the gradients, of one rank.
    if layout.data_rank > 0:
        labels.fill_(IGNORE_INDEX)
    elif (cp := layout.degree(CP)) > 1:
        documents = torch.arange(rows[1]).div(block_length(rows[1], cp), rounding_mode="floor").expand(rows)
        labels[:, torch.cat([places_of(rank, rows[1], cp, labels.device) for rank in range(1, cp)])] = IGNORE_INDEX
    batch = Batch(*(x.to(device) for x in (tokens, labels, positions, documents)))
    num_tokens = torch.tensor(rows[0] * rows[1] * layout.dims.data, device=device)
    return *_of_this_rank(batch, model, layout), num_tokens
