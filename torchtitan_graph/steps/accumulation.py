"""A whole model's step whose microbatches share gathered weights and reductions: rewritten whole, then cut into parts.

Note [Once a step]
Each microbatch of an optimizer step reads the same weights, and gradients are sums over the microbatches. So weights
may be gathered once, and gradients summed whole and reduced once, as in a pipeline: a rank then receives as many bytes
in a step as otherwise in a microbatch, and holds the whole weights and the whole sums until the step's end. The step's
graph is cut into the parts of a pipeline's stage, of which the whole model is the only one; the eager reference does
the same by FSDP2's own switches.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import nn

from torchtitan_graph import device as devices
from torchtitan_graph.analysis.cost import estimate
from torchtitan_graph.analysis.liveness import input_memory, peak_memory
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.compiler import PassPlan
from torchtitan_graph.device import GIB
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.storage import ALL, EXPERTS, NONE, names_of
from torchtitan_graph.runtime.partition import Once, part_of, partition
from torchtitan_graph.steps.budget import at_rest, trained_bytes
from torchtitan_graph.steps.held import peak_of_accumulation, runs_of
from torchtitan_graph.steps.interleave import with_joined
from torchtitan_graph.steps.options import StepOptions

_KEPT_FREE = 0.1  # of the memory: a forecast does not know what fragments it


def once_a_step(plan: PassPlan, which: str) -> PassPlan:
    """Return the passes' inputs for a step that gathers and reduces these parameters once."""
    names = names_of(which, plan.storages)
    reshard = dataclasses.replace(plan.reshard, whole=names)
    return dataclasses.replace(plan, reshard=reshard, part_of=partial(part_of, once=_once(names)))


def _once(names: frozenset[str]) -> Once:
    return Once(names.__contains__, names.__contains__)


def cut_step(train: TracedResult, plan: PassPlan, options: StepOptions) -> StageGraph:
    """Cut a rewritten step into the parts that run once, and for each microbatch."""
    nothing = torch.empty(0, dtype=options.precision.compute, device="meta")
    parts = partition(train.gm, once=_once(plan.reshard.whole), split_backward=False)
    return StageGraph(parts, train, None, nothing, nothing, options.precision.reduce)


def peak_of_step(train: TracedResult, plan: PassPlan, options: StepOptions) -> int:
    """Return the peak memory of a step that is cut, in bytes: above what is held from step to step."""
    return peak_of_accumulation(_joined(train, plan, options), options.num_microbatches).num_bytes


def _joined(train: TracedResult, plan: PassPlan, options: StepOptions) -> StageGraph:
    in_pairs = options.pairs is True
    return with_joined(cut_step(train, plan, options), plan.costs, options.num_microbatches, in_pairs=in_pairs)


def choices(plan: PassPlan) -> list[str]:
    """Return what may be done once a step, the fastest first."""
    return [ALL, EXPERTS, NONE] if names_of(EXPERTS, plan.storages) else [ALL, NONE]


def needs_of(train: TracedResult, plan: PassPlan, model: nn.Module, options: StepOptions) -> tuple[float, float]:
    """Return a rank's memory with this step, cut or not, in GiB, and its seconds without the optimizer, by the
    estimate."""
    number, costs = options.num_microbatches, plan.costs
    rest = at_rest(plan.storages, model, options.optimizer, accumulates=not options.is_cut)
    if options.is_cut:
        stage = _joined(train, plan, options)
        peak = peak_of_accumulation(stage, number).num_bytes
        runs = runs_of(stage, number)
        seconds = sum(estimate(stage.all_parts[name].gm, costs).seconds * times for name, times in runs)
    else:
        peak = input_memory(train.gm) + peak_memory(train.gm).num_bytes
        sums = costs.accumulating(trained_bytes(plan.storages.values()))
        seconds = estimate(train.gm, costs).seconds * number + sums * (number - 1)
    return (sum(rest.values()) + peak) / GIB + options.target.rates.reserved_gib, seconds


def allowed_gib(options: StepOptions) -> float:
    """Return the memory that a rank may plan with, in GiB."""
    memory = devices.memory_of_rank_gib() if options.target.runs else options.target.rates.memory_gib
    return memory * (1 - _KEPT_FREE)
