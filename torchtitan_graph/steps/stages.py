"""The graphs of a pipeline's stages: traced whole, rewritten by passes, then cut into the parts of its schedule."""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.analysis.flops import Flops, count_flops
from torchtitan_graph.capture.step import StageModules, trace_stage_evaluation, trace_stage_step
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.compiler import Inspection, PassPlan, passes, run_passes
from torchtitan_graph.graph.edit import copy_graph
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.layout import PP, TP, Layout
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.recompute import Budget
from torchtitan_graph.parallel.storage import Reshard, Storage
from torchtitan_graph.runtime.partition import ALL, NONE, ONCE_A_STEP, Once, part_of, partition
from torchtitan_graph.steps.assembly import Assembly
from torchtitan_graph.steps.budget import at_rest, log_budget, share
from torchtitan_graph.steps.held import in_flight, peak_of_stages
from torchtitan_graph.steps.inputs import example_inputs, has_gradients, numbers_of
from torchtitan_graph.steps.interleave import with_pairs
from torchtitan_graph.steps.options import StepOptions
from torchtitan_graph.steps.precompiled import Rewritten


class _StageExamples(NamedTuple):
    """Example stage inputs: for training, (batch, masks, num_tokens, x, dy), and for evaluation, without dy, if there
    is any; with the stage's output in each, on meta."""

    modules: StageModules
    train: tuple[Any, ...]
    passed: Tensor
    evaluate: tuple[Any, ...] | None
    eval_passed: Tensor | None


def build_stages(assembly: Assembly) -> tuple[dict[int, StageGraph], Mapping[str, Storage], Flops]:
    """Return this rank's pipeline stages' graphs, by number, the parameters' storage layouts, and the FLOPs."""
    plan, examples = _lay_out_stages(assembly)
    options = assembly.options
    if options.precompiled is None:
        steps = _rewritten(assembly, plan, examples)
    else:
        arguments = {number: (each.train, each.evaluate) for number, each in examples.items()}
        steps = options.precompiled.load(arguments, assembly.layout, plan.storages, options.target.device)
        for number, each in steps.items():
            _log_budget(number, each.train, assembly)
    built = {number: _finish(number, steps[number], examples[number], plan, options) for number in examples}
    assert options.pipeline is not None
    built = with_pairs(built, options.pipeline, assembly.layout.rank(PP), plan.costs)
    return built, plan.storages, functools.reduce(operator.add, (each.flops for each in steps.values()))


def rewrite_stages(assembly: Assembly) -> tuple[dict[int, Rewritten], Mapping[str, Storage]]:
    """Return the steps of this rank's stages before they are cut, by number, and its parameters' storage layout."""
    plan, examples = _lay_out_stages(assembly)
    return _rewritten(assembly, plan, examples), plan.storages


def make_code(gm: GraphModule, plan: PassPlan, options: StepOptions, name: str) -> GraphModule:
    """Run the passes that generate code, which no file holds: in a stage they come after the cut."""
    chosen = [each for each in passes(plan, options.extra) if each.cut]
    return run_passes(gm, chosen, options.disabled, options.target.device, Inspection(name))


def _lay_out_stages(assembly: Assembly) -> tuple[PassPlan, dict[int, _StageExamples]]:
    """Keep only this rank's stages in the model, and lay them out; return the passes' inputs, and example stage inputs
    by stage number."""
    options = assembly.options
    assert options.pipeline is not None
    numbers, num_stages = options.pipeline.stages_of(assembly.layout.rank(PP)), len(options.pipeline.stages)
    pairs = len(options.pipeline.pairs_of(assembly.layout.rank(PP)))
    beside = f"; {pairs} pairs of stages run a forward beside a backward, as one graph" if pairs else ""
    logger.info(
        f"pipeline: {num_stages} stages, {options.num_microbatches} microbatches; ranks wait"
        f" {options.pipeline.waiting():.1%} of a step at least, if all stages take the same time{beside}"
    )
    for number in numbers:
        modules = options.pipeline.stages[number]
        logger.info(f"stage {number} of {num_stages}: {modules[0]} to {modules[-1]}")
    assembly.model.keep([name for number in numbers for name in options.pipeline.stages[number]])
    # Weights are gathered once a step, unless they are to be resharded as soon as possible.
    again = options.reshard.root
    plan = assembly.lay_out(Reshard(blocks=again, root=again))
    plan = dataclasses.replace(plan, part_of=functools.partial(part_of, once=_once(plan)))
    return plan, {number: _stage_examples(number, assembly) for number in numbers}


def _rewritten(assembly: Assembly, plan: PassPlan, examples: Mapping[int, _StageExamples]) -> dict[int, Rewritten]:
    """Trace this rank's stages, and run the passes before the cut on them."""
    traced = {number: _trace_stage(number, assembly, each) for number, each in examples.items()}
    if assembly.options.budget_gib is not None:
        stages = {number: train for number, (train, _) in traced.items()}
        plan = _within_budget(assembly.options.budget_gib, stages, plan, assembly, examples)
    return {number: _rewrite(number, *traced[number], assembly, plan, each) for number, each in examples.items()}


def _within_budget(
    gib: float,
    traced: Mapping[int, TracedResult],
    plan: PassPlan,
    assembly: Assembly,
    examples: Mapping[int, _StageExamples],
) -> PassPlan:
    """Return the passes' inputs with the largest share of kept activations, equal for all stages, within `gib`."""
    options = assembly.options

    def peak(fraction: float) -> int:
        graphs: dict[int, StageGraph] = {}
        for number, step in traced.items():
            watch = Inspection(f"stage {number}, memory_budget {fraction:.4g}")
            copied = dataclasses.replace(step, gm=copy_graph(step.gm))
            made = _run_passes(number, copied, with_budget(fraction), options, watch)
            graphs[number] = _cut(made, examples[number], plan, options)
        assert options.pipeline is not None
        graphs = with_pairs(graphs, options.pipeline, assembly.layout.rank(PP), plan.costs)
        return peak_of_stages(graphs, options.pipeline, assembly.layout.rank(PP)).num_bytes

    rest = at_rest(plan.storages, assembly.model, options.optimizer, accumulates=False)

    def with_budget(fraction: float) -> PassPlan:
        recompute = dataclasses.replace(plan.recompute, budget=Budget(fraction))
        return dataclasses.replace(plan, recompute=recompute)

    return with_budget(share(gib, rest, peak))


def _rewrite(
    number: int,
    train: TracedResult,
    evaluate: TracedResult | None,
    assembly: Assembly,
    plan: PassPlan,
    example: _StageExamples,
) -> Rewritten:
    """Run the passes before the cut on a stage's steps."""
    options, layout = assembly.options, assembly.layout
    flops = count_flops(train.gm, assembly.model.blocks, layout.gathers_rows)
    watch = Inspection(
        f"stage {number}",
        options.dump_to / f"stage_{number}" if options.dump_to and is_shown(layout) else None,
        numbers_of(example.train, layout) if options.verify else None,
        plan.costs,
        options.dump_only,
        look=options.look,
    )
    done = _run_passes(number, train, plan, options, watch)
    if evaluate is not None:
        watch = Inspection(f"evaluation of stage {number}", look=options.look)
        evaluate = _run_passes(number, evaluate, plan, options, watch)
    _log_budget(number, done, assembly)
    return Rewritten(done, evaluate, flops)


def is_shown(layout: Layout) -> bool:
    """Return whether this rank logs and draws what all ranks of its stage have: the first one, or any in a dry run."""
    return not any(layout.mesh.get_coordinate() or ()) or dist.get_backend() == "fake"


def _log_budget(number: int, step: TracedResult, assembly: Assembly) -> None:
    """Log and draw a stage's trade-off of memory for work."""
    picture = assembly.options.picture
    picture = picture and picture.with_stem(f"{picture.stem}_stage_{number}")
    log_budget(step.gm, f"stage {number}, without summed gradients", picture if is_shown(assembly.layout) else None)


def _run_passes(
    number: int, step: TracedResult, plan: PassPlan, options: StepOptions, watch: Inspection
) -> TracedResult:
    if (budget := plan.recompute.budget) is not None:
        assert options.pipeline is not None
        budget = dataclasses.replace(budget, in_flight=in_flight(options.pipeline, number))
        plan = dataclasses.replace(plan, recompute=dataclasses.replace(plan.recompute, budget=budget))
    chosen = [each for each in passes(plan, options.extra) if not each.cut]
    return dataclasses.replace(step, gm=run_passes(step.gm, chosen, options.disabled, options.target.device, watch))


def _finish(number: int, steps: Rewritten, example: _StageExamples, plan: PassPlan, options: StepOptions) -> StageGraph:
    """Cut a stage into the parts of its schedule, and compile them."""
    stage = with_code(_cut(steps.train, example, plan, options), plan, options, f"stage {number}")
    evaluate = steps.evaluate
    if evaluate is not None:
        final = make_code(evaluate.gm, plan, options, f"evaluation of stage {number}")
        evaluate = dataclasses.replace(evaluate, gm=final)
    return stage._replace(evaluate=evaluate)


def with_code(stage: StageGraph, plan: PassPlan, options: StepOptions, title: str) -> StageGraph:
    """Return a stage whose parts are compiled, as far as regions of them are to be; they are named in logs."""
    # A compiled cast would expect the graph's dtype, but gradients are summed in the dtype of the reduction.
    made = {
        name: part._replace(gm=make_code(part.gm, plan, options, f"{title}, {name}"))
        for name, part in stage.parts.by_name.items()
        if name not in ONCE_A_STEP
    }
    for name in ONCE_A_STEP:
        stage.parts.by_name[name].gm.meta["name"] = f"{title}, {name}"
    return stage._replace(parts=stage.parts._replace(by_name={**stage.parts.by_name, **made}))


def _cut(train: TracedResult, example: _StageExamples, plan: PassPlan, options: StepOptions) -> StageGraph:
    assert options.pipeline is not None
    parts = partition(train.gm, once=_once(plan), split_backward=options.pipeline.splits_backward)
    return StageGraph(parts, train, None, example.passed, example.eval_passed, options.precision.reduce)


def _once(plan: PassPlan) -> Once:
    """Return what a stage does once a step: it reduces all gradients, and gathers the weights that it need not free."""
    return Once(gather=NONE if plan.reshard.root else ALL)


def _trace_stage(number: int, assembly: Assembly, example: _StageExamples) -> tuple[TracedResult, TracedResult | None]:
    """Trace a stage's steps, for training and, if there is one, for evaluation."""
    begin, evaluate, options = time.perf_counter(), None, assembly.options
    model, modules = assembly.model, example.modules
    device, capture = options.target.device, assembly.capture_per_kind
    sum_in = options.precision.sum_in
    train = trace_stage_step(
        model, assembly.loss, modules, example.train, device=device, capture=capture, sum_in=sum_in
    )
    if example.evaluate is not None:
        evaluate = trace_stage_evaluation(
            model, assembly.evaluation_loss, modules, example.evaluate, device=device, capture=capture
        )
    logger.info(f"stage {number}: traced in {time.perf_counter() - begin:.1f} s, {len(train.gm.graph.nodes)} nodes")
    return train, evaluate


def _stage_examples(number: int, assembly: Assembly) -> _StageExamples:
    options = assembly.options
    assert options.pipeline is not None
    last = len(options.pipeline.stages) - 1
    stage = StageModules(options.pipeline.stages[number], number == 0, number == last)
    train, passed = _stage_inputs(assembly, options.rows, stage)
    if options.eval_rows is None:
        return _StageExamples(stage, train, passed, None, None)
    (*others, _), eval_passed = _stage_inputs(assembly, options.eval_rows, stage)
    return _StageExamples(stage, train, passed, tuple(others), eval_passed)


def _stage_inputs(assembly: Assembly, rows: tuple[int, int], stage: StageModules) -> tuple[tuple[Any, ...], Tensor]:
    """Return a stage's inputs (batch, masks, num_tokens, x, dy), and a tensor like x and dy, on meta. With real
    numbers, as in `example_inputs`, dy is nonzero on one rank alone."""
    options, layout = assembly.options, assembly.layout
    batch, masks, num_tokens = example_inputs(assembly, rows)
    shape = rows[0], batch.tokens_BL.shape[1] // layout.degree(TP), assembly.model.config.dim
    passed = torch.empty(shape, dtype=options.precision.compute, device="meta")
    x, dy = passed, passed
    if options.verify:
        generator = torch.Generator().manual_seed(options.seed)
        x, dy = (torch.randn(shape, generator=generator).to(batch.tokens_BL.device, passed.dtype) for _ in range(2))
        dy = dy * has_gradients(layout)
    first, last = stage.first, stage.last
    return (batch, masks, num_tokens, None if first else x.requires_grad_(), None if last else dy), passed
