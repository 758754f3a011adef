"""Construction of training steps from a model, a layout and options.

    steps = build_steps(Assembly(model, family, layout, options))
    loss, state, terms, metrics = steps.train(microbatches, num_tokens)   gradients are in `.grad`

The trainer, the checks, the benchmarks and the tests all train through it: as graphs that passes edit, or eagerly.
"""

from torchtitan_graph.steps.assembly import Assembly
from torchtitan_graph.steps.build import Steps, bind_graphs, build_steps
from torchtitan_graph.steps.check import check_reference, check_steps
from torchtitan_graph.steps.cuts import check_own_step
from torchtitan_graph.steps.graphs import Graphs, Traced, build_graphs, rewrite_steps, trace_steps
from torchtitan_graph.steps.options import StepOptions, num_replicas, rows_per_microbatch, step_options
from torchtitan_graph.steps.scoring import Scoring, build_scoring
from torchtitan_graph.steps.update import EagerUpdate, GraphUpdate, Update

__all__ = [
    "Assembly",
    "EagerUpdate",
    "GraphUpdate",
    "Graphs",
    "Scoring",
    "StepOptions",
    "Steps",
    "Traced",
    "Update",
    "bind_graphs",
    "build_graphs",
    "build_scoring",
    "build_steps",
    "check_own_step",
    "check_reference",
    "check_steps",
    "num_replicas",
    "rewrite_steps",
    "rows_per_microbatch",
    "step_options",
    "trace_steps",
]
