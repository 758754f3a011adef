"""The graphs of a pipeline's stages: each traced whole, passed, then cut into the parts that its schedule runs."""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.compiler import Inspection, Pass, PassPlan, passes, run_passes
from torchtitan_graph.graph.flops import Flops, count_flops
from torchtitan_graph.graph.partition import ONCE_A_STEP, partition
from torchtitan_graph.graph.step import (
    StageModules,
    trace_stage_evaluation,
    trace_stage_step,
)
from torchtitan_graph.graph.trace import Capture, TracedResult
from torchtitan_graph.log import logger
from torchtitan_graph.loss import loss_context
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.layout import PP, TP, Layout
from torchtitan_graph.parallel.parallelize import context_modules
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.storage import (
    Reshard,
    Storage,
    buckets,
    cast_parameters,
    plan_storage,
)
from torchtitan_graph.steps.inputs import costs_on, example_inputs, loss_is_parallel, once_per_kind, prepare
from torchtitan_graph.steps.options import StepOptions


def build_stages(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture
) -> tuple[dict[int, StageGraph], dict[str, Storage], Flops]:
    """Build the graphs of this rank's pipeline stages, by number; and give how its parameters lie, and its FLOPs."""
    assert options.pipeline is not None
    numbers, num_stages = options.pipeline.stages_of(layout.rank(PP)), len(options.pipeline.stages)
    logger.info(
        f"pipeline: {num_stages} stages, {options.num_microbatches} microbatches; ranks wait"
        f" {options.pipeline.waiting():.1%} of a step at least, if all stages take the same time"
    )
    for number in numbers:
        modules = options.pipeline.stages[number]
        logger.info(f"stage {number} of {num_stages}: {modules[0]} to {modules[-1]}")
    model.keep([name for number in numbers for name in options.pipeline.stages[number]])
    prepare(model, family, layout, options)
    cast_parameters(model, options.precision.compute)
    storages = plan_storage(model, layout, options.precision)
    # Weights are gathered once a step, unless they are to be given up as soon as may be.
    again = options.reshard.root
    reshard, groups = Reshard(blocks=again, root=again), buckets(model, model.blocks)
    context = context_modules(model, family.PLAN)
    costs = costs_on(layout, options)
    plan = PassPlan(storages, model.blocks, groups, options.recompute, reshard, options.regions, context, costs)
    built = {number: _build_stage(number, model, plan, layout, options, capture) for number in numbers}
    flops = functools.reduce(operator.add, (count for _, count in built.values()))
    return {number: stage for number, (stage, _) in built.items()}, storages, flops


class _Traced(NamedTuple):
    """A stage's steps before any pass, and like what it passes on in each, on meta."""

    train: TracedResult
    passed: Tensor
    evaluate: TracedResult | None
    eval_passed: Tensor | None
    inputs: list[Tensor]


def _build_stage(
    number: int, model: Decoder, plan: PassPlan, layout: Layout, options: StepOptions, capture: Capture
) -> tuple[StageGraph, Flops]:
    """Trace a stage, run the passes on it, and cut it into the parts that its schedule runs."""
    assert options.pipeline is not None
    traced = _trace_stage(number, model, layout, options, capture)
    flops = count_flops(traced.train.gm, model.blocks, layout.gathers_rows)
    shown = not any(layout.mesh.get_coordinate() or ()) or dist.get_backend() == "fake"
    watch = Inspection(
        f"stage {number}",
        options.dump_to / f"stage_{number}" if options.dump_to and shown else None,
        traced.inputs if options.verify else None,
        plan.costs,
    )

    def rewritten(gm: GraphModule, chosen: Sequence[Pass], watch: Inspection) -> GraphModule:
        return run_passes(gm, chosen, options.disabled, options.device, watch)

    before, after = ([each for each in passes(plan, options.extra) if each.cut == cut] for cut in (False, True))
    gm = rewritten(traced.train.gm, before, watch)
    parts = partition(gm, gather_once=not plan.reshard.root, split_backward=options.pipeline.splits_backward)
    # A compiled cast would expect the graph's dtype, but what is reduced was summed in that of the reduction.
    cut = {
        name: part._replace(gm=rewritten(part.gm, after, Inspection(f"stage {number}, {name}")))
        for name, part in parts.by_name.items()
        if name not in ONCE_A_STEP
    }
    evaluate = traced.evaluate
    if evaluate is not None:
        final = rewritten(evaluate.gm, passes(plan, options.extra), Inspection(f"stage {number}, evaluation"))
        evaluate = dataclasses.replace(evaluate, gm=final)
    stage = StageGraph(
        parts._replace(by_name={**parts.by_name, **cut}),
        dataclasses.replace(traced.train, gm=gm),
        evaluate,
        traced.passed,
        traced.eval_passed,
        options.precision.reduce,
    )
    return stage, flops


def _trace_stage(number: int, model: Decoder, layout: Layout, options: StepOptions, capture: Capture) -> _Traced:
    assert options.pipeline is not None
    begin, last = time.perf_counter(), len(options.pipeline.stages) - 1
    stage = StageModules(options.pipeline.stages[number], number == 0, number == last)
    device, evaluate, eval_passed = options.device, None, None
    capture = once_per_kind(capture, model, options)
    inputs, passed = _stage_inputs(model, options.rows, stage, layout, options)
    with loss_context(loss_is_parallel(layout, options)):
        sum_in = options.precision.sum_in
        train = trace_stage_step(model, options.loss, stage, inputs, device=device, capture=capture, sum_in=sum_in)
        if options.eval_rows is not None:
            (*others, _), eval_passed = _stage_inputs(model, options.eval_rows, stage, layout, options)
            evaluate = trace_stage_evaluation(model, options.loss, stage, tuple(others), device=device, capture=capture)
    logger.info(f"stage {number}: traced in {time.perf_counter() - begin:.1f} s, {len(train.gm.graph.nodes)} nodes")
    tensors = [x.detach() for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    return _Traced(train, passed, evaluate, eval_passed, tensors)


def _stage_inputs(
    model: Decoder, rows: tuple[int, int], stage: StageModules, layout: Layout, options: StepOptions
) -> tuple[tuple[Any, ...], Tensor]:
    """Make a stage's inputs (batch, masks, num_tokens, x, dy), and what is like x and dy, on meta. Of real numbers, as
    `example_inputs` says, dy is that of one rank alone."""
    batch, masks, num_tokens = example_inputs(model, rows, layout, options)
    shape = rows[0], batch.tokens_BL.shape[1] // layout.degree(TP), model.config.dim
    passed = torch.empty(shape, dtype=options.precision.compute, device="meta")
    x, dy = passed, passed
    if options.verify:
        generator = torch.Generator().manual_seed(options.seed)
        x, dy = (torch.randn(shape, generator=generator).to(batch.tokens_BL.device, passed.dtype) for _ in range(2))
        dy = dy * (layout.data_rank == 0)
    first, last = stage.first, stage.last
    return (batch, masks, num_tokens, None if first else x.requires_grad_(), None if last else dy), passed
