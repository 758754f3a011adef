"""The graphs of a model's steps: traced, then rewritten by the passes. Nothing is allocated."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph import device as devices
from torchtitan_graph.analysis.flops import Flops, count_flops
from torchtitan_graph.analysis.liveness import input_memory, peak_memory
from torchtitan_graph.capture.dimensions import SizeError
from torchtitan_graph.capture.step import trace_eval_step, trace_train_step
from torchtitan_graph.capture.trace import Capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.capture.uncollected import uncollected
from torchtitan_graph.compiler import Inspection, PassPlan, passes, run_passes
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.edit import copy_graph
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.layout import PP
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.recompute import Budget
from torchtitan_graph.parallel.storage import AUTO, Storage
from torchtitan_graph.parallel.verify import Numbers
from torchtitan_graph.steps.accumulation import (
    allowed_gib,
    choices,
    cut_step,
    needs_of,
    once_a_step,
    peak_of_step,
)
from torchtitan_graph.steps.assembly import Assembly
from torchtitan_graph.steps.budget import INPUTS, at_rest, log_budget, meet
from torchtitan_graph.steps.inputs import SEQ_LEN, example_inputs, numbers_of, shapes_of
from torchtitan_graph.steps.interleave import with_joined
from torchtitan_graph.steps.options import StepOptions
from torchtitan_graph.steps.precompiled import Rewritten
from torchtitan_graph.steps.stages import build_stages, is_shown, make_code, rewrite_stages, with_code

TITLE = "training step"
_WORTH = 0.98  # of the time without pairs: pairs are taken where they need less


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
    pipeline, those of this rank's stages, by number; where microbatches share work, the parts of the step."""

    train: TracedResult | StageGraph | dict[int, StageGraph]
    evaluate: TracedResult | None
    storages: Mapping[str, Storage]
    flops: Flops


@uncollected()
def build_graphs(assembly: Assembly) -> Graphs:
    """Trace a model's steps, and run the passes on them; a dry run does only this. Precompiled steps are read instead,
    and only the passes that generate code run."""
    options = assembly.options
    if assembly.layout.degree(PP) > 1:
        stages, storages, flops = build_stages(assembly)
        return Graphs(stages, None, storages, flops)
    if options.precompiled is None:
        traced = trace_steps(assembly)
        assembly = _with_choices(traced, assembly)
        options, is_cut = assembly.options, assembly.options.is_cut
        plan, steps = _rewrite(traced, assembly, makes_code=not is_cut)
        if not is_cut:
            return Graphs(steps.train, steps.evaluate, plan.storages, steps.flops)
    else:
        is_cut = options.is_cut
        plan = once_a_step(assembly.lay_out(), options.once) if is_cut else assembly.lay_out()
        arguments = {0: _arguments(assembly)}
        (steps,) = options.precompiled.load(arguments, assembly.layout, plan.storages, options.target.device).values()
        log_budget(steps.train.gm, TITLE, options.picture if is_shown(assembly.layout) else None)

    def ready(step: TracedResult, name: str) -> TracedResult:
        return dataclasses.replace(step, gm=make_code(step.gm, plan, options, name))

    train: TracedResult | StageGraph
    if is_cut:
        stage = with_code(cut_step(steps.train, plan, options), plan, options, TITLE)
        train = with_joined(stage, plan.costs, options.num_microbatches, in_pairs=options.pairs is True)
    else:
        train = ready(steps.train, TITLE)
    evaluate = steps.evaluate and ready(steps.evaluate, "evaluation step")
    return Graphs(train, evaluate, plan.storages, steps.flops)


def rewrite_steps(assembly: Assembly) -> tuple[dict[int, Rewritten], Mapping[str, Storage]]:
    """Trace a model's steps and run the passes, but for those that generate code; return the steps to store, by the
    pipeline stage's number, else under 0, and the parameters' storage layout."""
    if assembly.layout.degree(PP) > 1:
        return rewrite_stages(assembly)
    traced = trace_steps(assembly)
    plan, steps = _rewrite(traced, _with_choices(traced, assembly), makes_code=False)
    return {0: steps}, plan.storages


def _rewrite(traced: Traced, assembly: Assembly, *, makes_code: bool) -> tuple[PassPlan, Rewritten]:
    """Run the passes on a model's steps; return also the passes' inputs, with what is done once a step."""
    options, shown = assembly.options, is_shown(assembly.layout)
    plan = once_a_step(traced.plan, options.once) if options.is_cut else traced.plan
    watch = Inspection(
        dump_to=options.dump_to if shown else None,
        verify_on=traced.inputs if options.verify else None,
        costs=traced.plan.costs,
        dump_only=options.dump_only,
        look=options.look,
    )

    def rewritten(gm: GraphModule, watch: Inspection, plan: PassPlan = plan) -> GraphModule:
        chosen = [each for each in passes(plan, options.extra) if makes_code or not each.cut]
        return run_passes(gm, chosen, options.disabled, options.target.device, watch)

    said: list[str] = []  # of the last try, which is the chosen one

    def within(gm: GraphModule, budget: Budget) -> GraphModule:
        said.clear()
        recompute = dataclasses.replace(options.recompute, budget=budget)
        tried = dataclasses.replace(watch, say=said.append)
        return rewritten(gm, tried, dataclasses.replace(plan, recompute=recompute))

    def peak(gm: GraphModule) -> int:
        if not options.is_cut:
            return peak_memory(gm).num_bytes
        return peak_of_step(dataclasses.replace(traced.train, gm=gm), plan, options)

    evaluate = traced.evaluate
    if evaluate is not None:
        seen = Inspection("evaluation step", look=options.look)
        evaluate = dataclasses.replace(evaluate, gm=rewritten(evaluate.gm, seen, traced.plan))
    if options.budget_gib is None:
        train = rewritten(traced.train.gm, watch)
    else:
        accumulates = options.num_microbatches > 1 and not options.is_cut
        rest = at_rest(traced.plan.storages, assembly.model, options.optimizer, accumulates=accumulates)
        rest[INPUTS] = input_memory(traced.train.gm)
        train = meet(options.budget_gib, rest, traced.train.gm, within, peak)
        for each in said:
            logger.info(each)
    log_budget(train, watch.graph, options.picture if shown else None)
    return plan, Rewritten(dataclasses.replace(traced.train, gm=train), evaluate, traced.flops)


def _with_choices(traced: Traced, assembly: Assembly) -> Assembly:
    """Return what steps are built from, with what `auto` chooses in place of it. All ranks call it together.

    Of what may be done once a step, it is the first that fits into the memory of all ranks; with it pairs, if they fit
    too and are faster by the estimate. If nothing fits, it is what needs least.
    """
    options, allowed = assembly.options, allowed_gib(assembly.options)
    if AUTO not in (options.once, options.pairs):
        return assembly
    tried: list[tuple[float, StepOptions]] = []  # what the fullest rank needs above what is allowed, in GiB
    found: StepOptions | None = None
    for once in choices(traced.plan) if options.once == AUTO else [options.once]:
        plan = once_a_step(traced.plan, once)
        chosen = [each for each in passes(plan, options.extra) if not each.cut]
        watch = Inspection(f"{once} once a step", say=logger.debug)
        gm = run_passes(copy_graph(traced.train.gm), chosen, options.disabled, options.target.device, watch)
        train, best = dataclasses.replace(traced.train, gm=gm), math.inf
        for pairs in (False, True) if options.pairs == AUTO else (bool(options.pairs),):
            each = dataclasses.replace(options, once=once, pairs=pairs)
            needed, seconds = needs_of(train, plan, assembly.model, each)
            # All ranks must choose alike.
            most = torch.tensor([needed - allowed, seconds], dtype=torch.float64, device=devices.device())
            dist.all_reduce(most, dist.ReduceOp.MAX)
            above, slowest = most.tolist()
            what = [f"fsdp_once_a_step {once}"] if options.once == AUTO else []
            what += [f"overlap_microbatches {str(pairs).lower()}"] if options.pairs == AUTO else []
            too_much = ": too much" if needed > allowed else ", but too much on another rank"
            logger.info(
                f"auto: {', '.join(what)}: {needed:.4g} GiB of {allowed:.4g} on this rank,"
                f" {options.target.rates.reserved_gib:g} of them reserved, no tensors; {seconds * 1e3:.4g} ms by the"
                f" estimate{'' if above <= 0 else too_much}"
            )
            tried.append((above, each))
            if above <= 0 and slowest < best * _WORTH:
                best, found = slowest, each
        if found is not None:
            break
    found = found or min(tried, key=lambda of: of[0])[1]
    logger.info(f"auto: chosen: fsdp_once_a_step {found.once}, overlap_microbatches {str(found.pairs).lower()}")
    return dataclasses.replace(assembly, options=found)


def _arguments(assembly: Assembly) -> tuple[Any, Any]:
    """Return example arguments of the training step, and of the evaluation step if there is one."""
    evaluate = assembly.options.eval_rows and example_inputs(assembly, assembly.options.eval_rows)
    return example_inputs(assembly, assembly.options.rows), evaluate


def trace_steps(assembly: Assembly) -> Traced:
    """Lay a model out, and trace its steps."""
    begin, evaluate = time.perf_counter(), None
    plan = assembly.lay_out()
    example, other = _arguments(assembly)
    train = _trace_training(assembly, example)
    if other is not None:
        device, capture = assembly.options.target.device, assembly.capture_per_kind
        evaluate = trace_eval_step(assembly.model, assembly.evaluation_loss, *other, device=device, capture=capture)
    logger.info(f"traced in {time.perf_counter() - begin:.1f} s, {len(train.gm.graph.nodes)} nodes")
    flops = count_flops(train.gm, assembly.blocks, assembly.layout.gathers_rows)
    return Traced(train, evaluate, plan, flops, numbers_of(example, assembly.layout))


def _trace_training(assembly: Assembly, example: Any) -> TracedResult:
    """Trace the training step, for all lengths that its rows may have."""
    options = assembly.options
    device, sum_in = options.target.device, options.precision.sum_in

    def trace(capture: Capture) -> TracedResult:
        return trace_train_step(assembly.model, assembly.loss, *example, device=device, capture=capture, sum_in=sum_in)

    if (lengths := options.lengths) is None:
        return trace(assembly.capture_per_kind)
    _, shorter, _ = example_inputs(assembly, (options.rows[0], lengths[-2]))
    try:
        traced = trace(partial(assembly.capture_per_kind, dynamic_shapes=shapes_of(example[1], shorter, lengths)))
        assert traced.sizes is not None
        for length in lengths:
            traced.sizes.check_named({SEQ_LEN: length})
        return traced
    except SizeError as error:
        raise UserError(
            f"training.dynamic_seq_len = true: rows have {lengths[0]} to {lengths[-1]} tokens, a multiple of "
            f"{lengths.step}. {error}. Change that line of the model, or set the option to false"
        ) from error
