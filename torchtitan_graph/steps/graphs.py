"""The graphs of a model's steps: traced, then rewritten by the passes. Nothing is allocated."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph.analysis.flops import Flops, count_flops
from torchtitan_graph.analysis.liveness import input_memory
from torchtitan_graph.capture.dimensions import SizeError
from torchtitan_graph.capture.step import (
    trace_eval_step,
    trace_train_step,
)
from torchtitan_graph.capture.trace import Capture, make_fx_capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.compiler import Inspection, PassPlan, passes, run_passes
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.loss import loss_context
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.recompute import Budget
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.parallel.verify import Numbers
from torchtitan_graph.steps.budget import INPUTS, at_rest, meet, tell
from torchtitan_graph.steps.inputs import (
    SEQ_LEN,
    example_inputs,
    lay_out,
    loss_is_parallel,
    numbers_of,
    once_per_kind,
    shapes_of,
)
from torchtitan_graph.steps.options import StepOptions
from torchtitan_graph.steps.precompiled import Rewritten
from torchtitan_graph.steps.stages import build_stages, make_code, rewrite_stages


class Traced(NamedTuple):
    """A model's steps in the compute layout, before any pass.

    plan    the passes' inputs
    inputs  the training step's example inputs, without parameters and buffers
    """

    train: TracedResult
    evaluate: TracedResult | None
    plan: PassPlan
    flops: Flops
    inputs: Numbers


class Graphs(NamedTuple):
    """The final graphs of a model's steps, and the storage layout of its parameters; nothing is allocated yet. In a
    pipeline, those of this rank's stages, by number."""

    train: TracedResult | dict[int, StageGraph]
    evaluate: TracedResult | None
    storages: Mapping[str, Storage]
    flops: Flops


def build_graphs(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> Graphs:
    """Trace a model's steps, and run the passes on them; a dry run does only this. Precompiled steps are read instead,
    and only the passes that generate code run."""
    if options.pipeline is not None:
        stages, storages, flops = build_stages(model, family, layout, options, capture)
        return Graphs(stages, None, storages, flops)
    if options.precompiled is None:
        traced = trace_steps(model, family, layout, options, capture)
        steps, storages = _rewrite(traced, layout, options, makes_code=True), traced.plan.storages
    else:
        plan = lay_out(model, family, layout, options)
        arguments = {0: _arguments(model, layout, options)}
        (read,) = options.precompiled.load(arguments, layout, plan.storages, options.device).values()
        tell(read.train.gm, "training step", options.picture if _is_shown() else None)

        def ready(step: TracedResult, name: str) -> TracedResult:
            return dataclasses.replace(step, gm=make_code(step.gm, plan, options, name))

        evaluate = read.evaluate and ready(read.evaluate, "evaluation step")
        steps, storages = Rewritten(ready(read.train, "training step"), evaluate, read.flops), plan.storages
    return Graphs(steps.train, steps.evaluate, storages, steps.flops)


def rewrite_steps(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> tuple[dict[int, Rewritten], Mapping[str, Storage]]:
    """Trace a model's steps and run the passes, but for those that generate code; return the steps to store, by the
    pipeline stage's number, else under 0, and the parameters' storage layout."""
    if options.pipeline is not None:
        return rewrite_stages(model, family, layout, options, capture)
    traced = trace_steps(model, family, layout, options, capture)
    return {0: _rewrite(traced, layout, options, makes_code=False)}, traced.plan.storages


def _is_shown() -> bool:
    return dist.get_rank() == 0 or dist.get_backend() == "fake"


def _rewrite(traced: Traced, layout: Layout, options: StepOptions, *, makes_code: bool) -> Rewritten:
    shown = _is_shown()
    watch = Inspection(
        dump_to=options.dump_to if shown else None,
        verify_on=traced.inputs if options.verify else None,
        costs=traced.plan.costs,
        dump_only=options.dump_only,
        look=options.look,
    )

    def rewritten(gm: GraphModule, watch: Inspection, plan: PassPlan = traced.plan) -> GraphModule:
        chosen = [each for each in passes(plan, options.extra) if makes_code or not each.cut]
        return run_passes(gm, chosen, options.disabled, options.device, watch)

    said: list[str] = []  # of the last try, which is the chosen one

    def within(gm: GraphModule, budget: Budget) -> GraphModule:
        said.clear()
        recompute = dataclasses.replace(options.recompute, budget=budget)
        tried = dataclasses.replace(watch, say=said.append)
        return rewritten(gm, tried, dataclasses.replace(traced.plan, recompute=recompute))

    evaluate = traced.evaluate
    if evaluate is not None:
        told = Inspection("evaluation step", look=options.look)
        evaluate = dataclasses.replace(evaluate, gm=rewritten(evaluate.gm, told))
    if options.budget_gib is None:
        train = rewritten(traced.train.gm, watch)
    else:
        rest = at_rest(traced.plan.storages, accumulates=options.num_microbatches > 1)
        rest[INPUTS] = input_memory(traced.train.gm)
        train = meet(options.budget_gib, rest, traced.train.gm, within)
        for each in said:
            logger.info(each)
    tell(train, watch.graph, options.picture if shown else None)
    return Rewritten(dataclasses.replace(traced.train, gm=train), evaluate, traced.flops)


def _arguments(model: Decoder, layout: Layout, options: StepOptions) -> tuple[Any, Any]:
    """Return example arguments of the training step, and of the evaluation step if there is one."""
    evaluate = options.eval_rows and example_inputs(model, options.eval_rows, layout, options)
    return example_inputs(model, options.rows, layout, options), evaluate


def trace_steps(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> Traced:
    """Lay a model out, and trace its steps."""
    begin = time.perf_counter()
    plan = lay_out(model, family, layout, options)
    device, evaluate, capture = options.device, None, once_per_kind(capture, model, options)
    example, other = _arguments(model, layout, options)
    with loss_context(loss_is_parallel(layout, options)):
        train = _trace_training(model, layout, options, example, capture)
        if other is not None:
            evaluate = trace_eval_step(model, options.loss, *other, device=device, capture=capture)
    logger.info(f"traced in {time.perf_counter() - begin:.1f} s, {len(train.gm.graph.nodes)} nodes")
    flops = count_flops(train.gm, model.blocks, layout.gathers_rows)
    return Traced(train, evaluate, plan, flops, numbers_of(example, layout))


def _trace_training(
    model: Decoder, layout: Layout, options: StepOptions, example: Any, capture: Capture
) -> TracedResult:
    """Trace the training step, for all lengths that its rows may have."""

    def trace(capture: Capture) -> TracedResult:
        sum_in = options.precision.sum_in
        return trace_train_step(model, options.loss, *example, device=options.device, capture=capture, sum_in=sum_in)

    if (lengths := options.lengths) is None:
        return trace(capture)
    _, shorter, _ = example_inputs(model, (options.rows[0], lengths[-2]), layout, options)
    try:
        traced = trace(partial(capture, dynamic_shapes=shapes_of(example[1], shorter, lengths)))
        assert traced.sizes is not None
        for length in lengths:
            traced.sizes.check_named({SEQ_LEN: length})
        return traced
    except SizeError as error:
        raise UserError(
            f"training.dynamic_seq_len = true: rows have {lengths[0]} to {lengths[-1]} tokens, a multiple of "
            f"{lengths.step}. {error}. Change that line of the model, or set the option to false"
        ) from error
