"""The scoring of rows: a model's log-probability of each label, by a graph without backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_graph.capture.step import make_eval_step, trace_eval_step
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.compiler import Inspection, passes, run_passes
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.loss import score_labels
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.layout import CP, Layout
from torchtitan_graph.parallel.sequence import places_of
from torchtitan_graph.parallel.storage import cast_parameters, materialize, shard_eager
from torchtitan_graph.quantize.state import Float8State
from torchtitan_graph.runtime.observe import Watchable
from torchtitan_graph.steps.assembly import Assembly
from torchtitan_graph.steps.build import quantized_state
from torchtitan_graph.steps.inputs import example_inputs, num_ahead, of_this_rank


@dataclasses.dataclass(frozen=True)
class Scoring:
    """A model that scores rows: built by `build_scoring`, called by all ranks together."""

    model: Decoder
    layout: Layout
    step: Callable[[Any, Any, Tensor], Tensor]
    quantized: Float8State | None = None

    @torch.no_grad()
    def __call__(self, batch: Batch, on_host: Batch | None = None) -> Tensor:
        """Return the log-probability of each label of this rank's rows, and 1 where the label is the first of the
        likeliest tokens, else 0; as (2, B, L), both 0 where there is no target.

        Args:
            batch: rows on the device, of the `eval_rows` of the options; whole ones under context parallelism too.
            on_host: the same rows in the host's memory; without them attn = "varlen" waits for the device.
        """
        if self.quantized is not None:
            self.quantized.refresh(always=False)
        B, L = batch.tokens_BL.shape
        one = torch.ones((), dtype=torch.int64, device=batch.tokens_BL.device)
        totals = one.expand(2 + num_ahead(self.model)).contiguous()  # not read: scores have no means
        scores_2T = self.step(*of_this_rank(batch, totals, self.model, self.layout, on_host), one)
        cp = self.layout.degree(CP)
        if cp == 1:
            return scores_2T.view(2, B, L)
        whole_2BL = scores_2T.new_zeros(2, B, L)
        whole_2BL[:, :, places_of(self.layout.rank(CP), L, cp, whole_2BL.device)] = scores_2T.view(2, B, L // cp)
        dist.all_reduce(whole_2BL, group=self.layout.group(CP))  # each place is one rank's: nothing is rounded
        return whole_2BL


def build_scoring(assembly: Assembly) -> Scoring:
    """Lay a model out, build its scoring, and allocate its parameters, uninitialized. It has no pipeline stages."""
    model, layout, options = assembly.model, assembly.layout, assembly.options
    assert options.eval_rows is not None and options.pipeline is None
    score = partial(score_labels, chunks=options.loss_chunks)
    device = options.target.device
    if options.mode == "eager":
        assembly.prepare()
        shard_eager(model, model.blocks, layout, options.precision, options.reshard, device, options.cpu_offload)
        return Scoring(model, layout, make_eval_step(model, score), quantized_state({}, assembly))
    plan = assembly.lay_out()
    example = example_inputs(assembly, options.eval_rows)
    traced = trace_eval_step(model, score, *example, device=device, capture=assembly.capture_per_kind)
    seen = Inspection("scoring", look=options.look)
    gm = run_passes(traced.gm, passes(plan, options.extra), options.disabled, device, seen)
    cast_parameters(model, options.precision.storage)
    materialize(model, plan.storages, device)
    step = run_traced(dataclasses.replace(traced, gm=gm), module=model, make_run=Watchable)
    return Scoring(model, layout, step, quantized_state(plan.storages, assembly))
