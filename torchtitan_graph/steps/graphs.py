"""The graphs of a model's steps: traced, then rewritten by the passes. Nothing is allocated."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from torchtitan_graph.compiler import Inspection, PassPlan, passes, run_passes
from torchtitan_graph.graph.flops import Flops, count_flops
from torchtitan_graph.graph.step import (
    trace_eval_step,
    trace_train_step,
)
from torchtitan_graph.graph.trace import Capture, TracedResult, make_fx_capture
from torchtitan_graph.log import logger
from torchtitan_graph.loss import loss_context
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.parallel.parallelize import context_modules
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.storage import (
    Storage,
    buckets,
    cast_parameters,
    plan_storage,
)
from torchtitan_graph.steps.inputs import costs_on, example_inputs, loss_is_parallel, once_per_kind, prepare
from torchtitan_graph.steps.options import StepOptions
from torchtitan_graph.steps.stages import build_stages


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


def build_graphs(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> Graphs:
    """Trace a model's steps, and run the passes on them; this is also all of a dry run."""
    if options.pipeline is not None:
        stages, storages, flops = build_stages(model, family, layout, options, capture)
        return Graphs(stages, None, storages, flops)
    traced = trace_steps(model, family, layout, options, capture)
    shown = dist.get_rank() == 0 or dist.get_backend() == "fake"
    watch = Inspection(
        dump_to=options.dump_to if shown else None,
        verify_on=traced.inputs if options.verify else None,
        costs=traced.plan.costs,
    )

    def rewritten(step: TracedResult, watch: Inspection) -> TracedResult:
        gm = run_passes(step.gm, passes(traced.plan, options.extra), options.disabled, options.device, watch)
        return dataclasses.replace(step, gm=gm)

    evaluate = traced.evaluate and rewritten(traced.evaluate, Inspection("evaluation step"))
    return Graphs(rewritten(traced.train, watch), evaluate, traced.plan.storages, traced.flops)


def trace_steps(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, capture: Capture = make_fx_capture
) -> Traced:
    """Lay a model out, and trace its steps."""
    begin = time.perf_counter()
    prepare(model, family, layout, options)
    cast_parameters(model, options.precision.compute)
    storages = plan_storage(model, layout, options.precision)
    device, evaluate, capture = options.device, None, once_per_kind(capture, model, options)
    example = example_inputs(model, options.rows, layout, options)
    with loss_context(loss_is_parallel(layout, options)):
        sum_in = options.precision.sum_in
        train = trace_train_step(model, options.loss, *example, device=device, capture=capture, sum_in=sum_in)
        if options.eval_rows is not None:
            other = example_inputs(model, options.eval_rows, layout, options)
            evaluate = trace_eval_step(model, options.loss, *other, device=device, capture=capture)
    logger.info(f"traced in {time.perf_counter() - begin:.1f} s, {len(train.gm.graph.nodes)} nodes")
    groups = buckets(model, model.blocks)
    context = context_modules(model, family.PLAN)
    reshard, regions, costs = options.reshard, options.regions, costs_on(layout, options)
    plan = PassPlan(storages, model.blocks, groups, options.recompute, reshard, regions, context, costs)
    flops = count_flops(train.gm, model.blocks, layout.gathers_rows)
    return Traced(train, evaluate, plan, flops, pytree.tree_leaves(example))
