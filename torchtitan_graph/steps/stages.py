"""The graphs of a pipeline's stages: each traced whole, passed, then cut into the parts that its schedule runs."""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.compiler import Inspection, PassPlan, passes, run_passes
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
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.storage import Reshard, Storage
from torchtitan_graph.steps.budget import in_flight, tell
from torchtitan_graph.steps.inputs import example_inputs, lay_out, loss_is_parallel, once_per_kind
from torchtitan_graph.steps.options import StepOptions
from torchtitan_graph.steps.precompiled import Rewritten


class _Like(NamedTuple):
    """Like a stage's inputs in training, (batch, masks, num_tokens, x, dy), and in evaluation, without dy, if there is
    any; and like what it passes on in each, on meta."""

    modules: StageModules
    train: tuple[Any, ...]
    passed: Tensor
    evaluate: tuple[Any, ...] | None
    eval_passed: Tensor | None


def build_stages(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture
) -> tuple[dict[int, StageGraph], Mapping[str, Storage], Flops]:
    """Build the graphs of this rank's pipeline stages, by number; and give how its parameters lie, and its FLOPs."""
    plan, like = _take_stages(model, family, layout, options)
    if options.precompiled is None:
        steps = {number: _rewrite(number, model, plan, layout, options, capture, like[number]) for number in like}
    else:
        arguments = {number: (each.train, each.evaluate) for number, each in like.items()}
        steps = options.precompiled.load(arguments, layout, plan.storages, options.device)
    built = {number: _finish(number, steps[number], like[number], plan, options) for number in like}
    return built, plan.storages, functools.reduce(operator.add, (each.flops for each in steps.values()))


def rewrite_stages(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture
) -> tuple[dict[int, Rewritten], Mapping[str, Storage]]:
    """Give the steps of this rank's stages before they are cut, by number, and how its parameters lie."""
    plan, like = _take_stages(model, family, layout, options)
    steps = {number: _rewrite(number, model, plan, layout, options, capture, like[number]) for number in like}
    return steps, plan.storages


def make_code(gm: GraphModule, plan: PassPlan, options: StepOptions, name: str) -> GraphModule:
    """Run the passes that make code, which no file holds: of a stage they come after the cut."""
    chosen = [each for each in passes(plan, options.extra) if each.cut]
    return run_passes(gm, chosen, options.disabled, options.device, Inspection(name))


def _take_stages(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions
) -> tuple[PassPlan, dict[int, _Like]]:
    """Leave of the model this rank's stages, and lay them out; give what passes are told, and by the stages' numbers
    what is like their inputs."""
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
    # Weights are gathered once a step, unless they are to be given up as soon as may be.
    again = options.reshard.root
    plan = lay_out(model, family, layout, options, Reshard(blocks=again, root=again))
    return plan, {number: _like(number, model, layout, options) for number in numbers}


def _rewrite(
    number: int, model: Decoder, plan: PassPlan, layout: Layout, options: StepOptions, capture: Capture, like: _Like
) -> Rewritten:
    """Trace a stage, and run the passes on it that come before the cut."""
    train, evaluate = _trace_stage(number, model, layout, options, capture, like)
    flops = count_flops(train.gm, model.blocks, layout.gathers_rows)
    shown = not any(layout.mesh.get_coordinate() or ()) or dist.get_backend() == "fake"
    tensors = [x.detach() for x in pytree.tree_leaves(like.train) if isinstance(x, Tensor)]
    watch = Inspection(
        f"stage {number}",
        options.dump_to / f"stage_{number}" if options.dump_to and shown else None,
        tensors if options.verify else None,
        plan.costs,
        options.dump_only,
    )

    if (budget := plan.recompute.budget) is not None:
        assert options.pipeline is not None
        budget = dataclasses.replace(budget, in_flight=in_flight(options.pipeline, number))
        plan = dataclasses.replace(plan, recompute=dataclasses.replace(plan.recompute, budget=budget))

    def rewritten(step: TracedResult, watch: Inspection) -> TracedResult:
        chosen = [each for each in passes(plan, options.extra) if not each.cut]
        return dataclasses.replace(step, gm=run_passes(step.gm, chosen, options.disabled, options.device, watch))

    done = rewritten(train, watch)
    picture = options.picture and options.picture.with_stem(f"{options.picture.stem}_stage_{number}")
    tell(done.gm, watch.graph, picture if shown else None)
    return Rewritten(done, evaluate and rewritten(evaluate, Inspection(f"stage {number}, evaluation")), flops)


def _finish(number: int, steps: Rewritten, like: _Like, plan: PassPlan, options: StepOptions) -> StageGraph:
    """Cut a stage into the parts that its schedule runs, and make code of them."""
    assert options.pipeline is not None
    splits = options.pipeline.splits_backward
    parts = partition(steps.train.gm, gather_once=not plan.reshard.root, split_backward=splits)
    # A compiled cast would expect the graph's dtype, but what is reduced was summed in that of the reduction.
    cut = {
        name: part._replace(gm=make_code(part.gm, plan, options, f"stage {number}, {name}"))
        for name, part in parts.by_name.items()
        if name not in ONCE_A_STEP
    }
    evaluate = steps.evaluate
    if evaluate is not None:
        final = make_code(evaluate.gm, plan, options, f"stage {number}, evaluation")
        evaluate = dataclasses.replace(evaluate, gm=final)
    return StageGraph(
        parts._replace(by_name={**parts.by_name, **cut}),
        steps.train,
        evaluate,
        like.passed,
        like.eval_passed,
        options.precision.reduce,
    )


def _trace_stage(
    number: int, model: Decoder, layout: Layout, options: StepOptions, capture: Capture, like: _Like
) -> tuple[TracedResult, TracedResult | None]:
    """Trace a stage's steps, for training and, if there is one, for evaluation."""
    begin, evaluate, device = time.perf_counter(), None, options.device
    capture, stage = once_per_kind(capture, model, options), like.modules
    with loss_context(loss_is_parallel(layout, options)):
        sum_in = options.precision.sum_in
        train = trace_stage_step(model, options.loss, stage, like.train, device=device, capture=capture, sum_in=sum_in)
        if like.evaluate is not None:
            evaluate = trace_stage_evaluation(model, options.loss, stage, like.evaluate, device=device, capture=capture)
    logger.info(f"stage {number}: traced in {time.perf_counter() - begin:.1f} s, {len(train.gm.graph.nodes)} nodes")
    return train, evaluate


def _like(number: int, model: Decoder, layout: Layout, options: StepOptions) -> _Like:
    assert options.pipeline is not None
    last = len(options.pipeline.stages) - 1
    stage = StageModules(options.pipeline.stages[number], number == 0, number == last)
    train, passed = _stage_inputs(model, options.rows, stage, layout, options)
    if options.eval_rows is None:
        return _Like(stage, train, passed, None, None)
    (*others, _), eval_passed = _stage_inputs(model, options.eval_rows, stage, layout, options)
    return _Like(stage, train, passed, tuple(others), eval_passed)


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
