"""The graphs of a pipeline's stages: traced whole, rewritten by passes, then cut into the parts of its schedule."""

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
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.analysis.flops import Flops, count_flops
from torchtitan_graph.capture.step import (
    StageModules,
    trace_stage_evaluation,
    trace_stage_step,
)
from torchtitan_graph.capture.trace import Capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.compiler import Inspection, PassPlan, passes, run_passes
from torchtitan_graph.graph.edit import copy_graph
from torchtitan_graph.log import logger
from torchtitan_graph.loss import loss_context
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.layout import PP, TP, Layout
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.recompute import Budget
from torchtitan_graph.parallel.storage import Reshard, Storage
from torchtitan_graph.runtime.partition import ONCE_A_STEP, part_of, partition
from torchtitan_graph.steps.budget import at_rest, share, tell
from torchtitan_graph.steps.held import in_flight, peak_of_stages
from torchtitan_graph.steps.inputs import (
    example_inputs,
    has_gradients,
    lay_out,
    loss_is_parallel,
    numbers_of,
    once_per_kind,
)
from torchtitan_graph.steps.options import StepOptions
from torchtitan_graph.steps.precompiled import Rewritten


class _Like(NamedTuple):
    """Example stage inputs: for training, (batch, masks, num_tokens, x, dy), and for evaluation, without dy, if there
    is any; with the stage's output in each, on meta."""

    modules: StageModules
    train: tuple[Any, ...]
    passed: Tensor
    evaluate: tuple[Any, ...] | None
    eval_passed: Tensor | None


def build_stages(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture
) -> tuple[dict[int, StageGraph], Mapping[str, Storage], Flops]:
    """Return this rank's pipeline stages' graphs, by number, the parameters' storage layouts, and the FLOPs."""
    plan, like = _take_stages(model, family, layout, options)
    if options.precompiled is None:
        steps = _rewritten(model, plan, layout, options, capture, like)
    else:
        arguments = {number: (each.train, each.evaluate) for number, each in like.items()}
        steps = options.precompiled.load(arguments, layout, plan.storages, options.device)
        for number, each in steps.items():
            _tell(number, each.train, layout, options)
    built = {number: _finish(number, steps[number], like[number], plan, options) for number in like}
    return built, plan.storages, functools.reduce(operator.add, (each.flops for each in steps.values()))


def rewrite_stages(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture
) -> tuple[dict[int, Rewritten], Mapping[str, Storage]]:
    """Return the steps of this rank's stages before they are cut, by number, and its parameters' storage layout."""
    plan, like = _take_stages(model, family, layout, options)
    return _rewritten(model, plan, layout, options, capture, like), plan.storages


def make_code(gm: GraphModule, plan: PassPlan, options: StepOptions, name: str) -> GraphModule:
    """Run the passes that generate code, which no file holds: in a stage they come after the cut."""
    chosen = [each for each in passes(plan, options.extra) if each.cut]
    return run_passes(gm, chosen, options.disabled, options.device, Inspection(name))


def _take_stages(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions
) -> tuple[PassPlan, dict[int, _Like]]:
    """Keep only this rank's stages in the model, and lay them out; return the passes' inputs, and example stage inputs
    by stage number."""
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
    # Weights are gathered once a step, unless they are to be resharded as soon as possible.
    again = options.reshard.root
    plan = lay_out(model, family, layout, options, Reshard(blocks=again, root=again))
    plan = dataclasses.replace(plan, part_of=functools.partial(part_of, gather_once=not again))
    return plan, {number: _like(number, model, layout, options) for number in numbers}


def _rewritten(
    model: Decoder,
    plan: PassPlan,
    layout: Layout,
    options: StepOptions,
    capture: Capture,
    like: Mapping[int, _Like],
) -> dict[int, Rewritten]:
    """Trace this rank's stages, and run the passes before the cut on them."""
    traced = {number: _trace_stage(number, model, layout, options, capture, like[number]) for number in like}
    if options.budget_gib is not None:
        stages = {number: train for number, (train, _) in traced.items()}
        plan = _within(options.budget_gib, stages, plan, layout, options, like)
    return {number: _rewrite(number, *traced[number], model, plan, layout, options, like[number]) for number in like}


def _within(
    gib: float,
    traced: Mapping[int, TracedResult],
    plan: PassPlan,
    layout: Layout,
    options: StepOptions,
    like: Mapping[int, _Like],
) -> PassPlan:
    """Return the passes' inputs with the largest share of kept activations, equal for all stages, within `gib`."""

    def peak(fraction: float) -> int:
        graphs: dict[int, StageGraph] = {}
        for number, step in traced.items():
            told = Inspection(f"stage {number}, memory_budget {fraction:.4g}")
            copied = dataclasses.replace(step, gm=copy_graph(step.gm))
            made = _run_passes(number, copied, with_budget(fraction), options, told)
            graphs[number] = _cut(made, like[number], plan, options)
        assert options.pipeline is not None
        return peak_of_stages(graphs, options.pipeline, layout.rank(PP)).num_bytes

    def with_budget(fraction: float) -> PassPlan:
        recompute = dataclasses.replace(plan.recompute, budget=Budget(fraction))
        return dataclasses.replace(plan, recompute=recompute)

    return with_budget(share(gib, at_rest(plan.storages, accumulates=False), peak))


def _rewrite(
    number: int,
    train: TracedResult,
    evaluate: TracedResult | None,
    model: Decoder,
    plan: PassPlan,
    layout: Layout,
    options: StepOptions,
    like: _Like,
) -> Rewritten:
    """Run the passes before the cut on a stage's steps."""
    flops = count_flops(train.gm, model.blocks, layout.gathers_rows)
    watch = Inspection(
        f"stage {number}",
        options.dump_to / f"stage_{number}" if options.dump_to and _is_shown(layout) else None,
        numbers_of(like.train, layout) if options.verify else None,
        plan.costs,
        options.dump_only,
        look=options.look,
    )
    done = _run_passes(number, train, plan, options, watch)
    if evaluate is not None:
        watch = Inspection(f"evaluation of stage {number}", look=options.look)
        evaluate = _run_passes(number, evaluate, plan, options, watch)
    _tell(number, done, layout, options)
    return Rewritten(done, evaluate, flops)


def _is_shown(layout: Layout) -> bool:
    return not any(layout.mesh.get_coordinate() or ()) or dist.get_backend() == "fake"


def _tell(number: int, step: TracedResult, layout: Layout, options: StepOptions) -> None:
    """Log and draw a stage's trade-off of memory for work."""
    picture = options.picture and options.picture.with_stem(f"{options.picture.stem}_stage_{number}")
    tell(step.gm, f"stage {number}, beside summed gradients", picture if _is_shown(layout) else None)


def _run_passes(
    number: int, step: TracedResult, plan: PassPlan, options: StepOptions, watch: Inspection
) -> TracedResult:
    if (budget := plan.recompute.budget) is not None:
        assert options.pipeline is not None
        budget = dataclasses.replace(budget, in_flight=in_flight(options.pipeline, number))
        plan = dataclasses.replace(plan, recompute=dataclasses.replace(plan.recompute, budget=budget))
    chosen = [each for each in passes(plan, options.extra) if not each.cut]
    return dataclasses.replace(step, gm=run_passes(step.gm, chosen, options.disabled, options.device, watch))


def _finish(number: int, steps: Rewritten, like: _Like, plan: PassPlan, options: StepOptions) -> StageGraph:
    """Cut a stage into the parts of its schedule, and compile them."""
    stage = _cut(steps.train, like, plan, options)
    # A compiled cast would expect the graph's dtype, but gradients are summed in the dtype of the reduction.
    made = {
        name: part._replace(gm=make_code(part.gm, plan, options, f"stage {number}, {name}"))
        for name, part in stage.parts.by_name.items()
        if name not in ONCE_A_STEP
    }
    for name in ONCE_A_STEP:
        stage.parts.by_name[name].gm.meta["name"] = f"stage {number}, {name}"
    evaluate = steps.evaluate
    if evaluate is not None:
        final = make_code(evaluate.gm, plan, options, f"evaluation of stage {number}")
        evaluate = dataclasses.replace(evaluate, gm=final)
    return stage._replace(parts=stage.parts._replace(by_name={**stage.parts.by_name, **made}), evaluate=evaluate)


def _cut(train: TracedResult, like: _Like, plan: PassPlan, options: StepOptions) -> StageGraph:
    assert options.pipeline is not None
    splits = options.pipeline.splits_backward
    parts = partition(train.gm, gather_once=not plan.reshard.root, split_backward=splits)
    return StageGraph(parts, train, None, like.passed, like.eval_passed, options.precision.reduce)


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
    """Return a stage's inputs (batch, masks, num_tokens, x, dy), and a tensor like x and dy, on meta. With real
    numbers, as in `example_inputs`, dy is nonzero on one rank alone."""
    batch, masks, num_tokens = example_inputs(model, rows, layout, options)
    shape = rows[0], batch.tokens_BL.shape[1] // layout.degree(TP), model.config.dim
    passed = torch.empty(shape, dtype=options.precision.compute, device="meta")
    x, dy = passed, passed
    if options.verify:
        generator = torch.Generator().manual_seed(options.seed)
        x, dy = (torch.randn(shape, generator=generator).to(batch.tokens_BL.device, passed.dtype) for _ in range(2))
        dy = dy * has_gradients(layout)
    first, last = stage.first, stage.last
    return (batch, masks, num_tokens, None if first else x.requires_grad_(), None if last else dy), passed
