"""Construction of training steps from a model, a layout and options.

    steps = build_steps(model, family, layout, options)
    loss, state = steps.train(microbatches, num_tokens)      gradients are in `.grad`

The trainer, the checks, the benchmarks and the tests all train through it: as graphs that passes edit, or eagerly.
"""

from torchtitan_graph.steps.build import Steps, bind_graphs, build_steps
from torchtitan_graph.steps.check import check_steps
from torchtitan_graph.steps.graphs import Graphs, Traced, build_graphs, rewrite_steps, trace_steps
from torchtitan_graph.steps.inputs import costs_on
from torchtitan_graph.steps.options import StepOptions, rows_per_microbatch, step_options
from torchtitan_graph.steps.update import Update

__all__ = [
    "Graphs",
    "StepOptions",
    "Steps",
    "Traced",
    "Update",
    "bind_graphs",
    "build_graphs",
    "build_steps",
    "check_steps",
    "rewrite_steps",
    "costs_on",
    "rows_per_microbatch",
    "step_options",
    "trace_steps",
]
