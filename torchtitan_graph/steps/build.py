"""Training steps, on the graphs or eager."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.analysis.flops import Flops
from torchtitan_graph.capture.step import (
    METRIC,
    TERM,
    StepOutput,
    bind_train_step,
    combine,
    make_eager_step,
    make_eval_step,
    whole,
)
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.data.batch import PADDING, Batch, counts_of
from torchtitan_graph.device import Recorders
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.optim import clip_grad_norm
from torchtitan_graph.parallel.layout import PP, TP, Layout, sum_over
from torchtitan_graph.parallel.pipeline import Accumulation, Pipeline, StageGraph
from torchtitan_graph.parallel.recompute import recompute_eager
from torchtitan_graph.parallel.storage import (
    Reshard,
    Storage,
    cast_parameters,
    materialize,
    reshard_eager,
    shard_eager,
)
from torchtitan_graph.quantize.layers import kept_weights
from torchtitan_graph.quantize.state import Float8State
from torchtitan_graph.runtime.observe import Watchable
from torchtitan_graph.runtime.pieces import Replayed
from torchtitan_graph.steps.assembly import Assembly
from torchtitan_graph.steps.graphs import Graphs, build_graphs
from torchtitan_graph.steps.inputs import Rows, num_ahead, of_this_rank
from torchtitan_graph.steps.reference import beside

Step = Callable[[Any, Any, Tensor], StepOutput]  # (batch, masks, num_tokens); gradients go to `.grad`
Evaluation = Callable[[Any, Any, Tensor], Tensor]  # the same -> loss


@dataclasses.dataclass(frozen=True)
class Steps:
    """A run's training and evaluation steps: built by `build_steps`, called by all ranks together."""

    model: Decoder
    layout: Layout
    step: Step | Pipeline | Accumulation
    evaluation: Evaluation | None
    flops: Flops | None = None
    seq_len: int = 1  # of the rows whose FLOPs are counted
    recorders: Recorders | None = None
    quantized: Float8State | None = None
    reference: Decoder | None = None  # the frozen model next to it
    sync: Callable[[bool], None] | None = None  # called before a microbatch of eager steps: whether it is the last

    @property
    def is_one_graph(self) -> bool:
        """Whether the gradients of a microbatch come from one graph, or eagerly, and microbatches run one by one."""
        return self.recorders is None and not isinstance(self.step, (Pipeline, Accumulation))

    def close(self) -> None:
        """Release recorded CUDA graphs; before process groups are destroyed."""
        if self.recorders is not None:
            self.recorders.close()

    def train(
        self,
        microbatches: Sequence[Batch],
        num_tokens: Tensor,
        on_host: Sequence[Batch] | None = None,
        totals: Tensor | None = None,
    ) -> StepOutput:
        """Accumulate the gradients of an optimizer step in the live parameters' `.grad`.

        Args:
            microbatches: of this rank, on the device; of whole rows, also under context parallelism.
            num_tokens: scalar, the targets of all ranks and microbatches.
            on_host: the microbatches in the host's memory; without them attn = "varlen" waits for the device.
            totals: as in `Rows`; None: they are counted here, on all ranks.

        Returns:
            the loss of this rank's microbatches, the state that the step changes, of all ranks' (`SideOutputs`), and
            the loss's terms and the metrics, of all ranks' tokens; in a pipeline this stage's parts of them.
        """
        if self.quantized is not None:
            self.quantized.refresh()
        if totals is None:
            counts = counts_of(microbatches, num_ahead(self.model))
            totals = self.layout.sum_over_rows(counts).clamp(min=1)
        loss: Tensor | None = None
        state: dict[str, Tensor] = {}
        each = list(zip(microbatches, on_host or itertools.repeat(None), strict=on_host is not None))
        if isinstance(self.step, (Pipeline, Accumulation)):
            loss, state, *_ = self.step.train([partial(self._inputs, *batch, num_tokens, totals) for batch in each])
        else:
            for number, batch in enumerate(each, 1):
                if self.sync is not None:
                    self.sync(number == len(each))
                output = self.step(*self._inputs(*batch, num_tokens, totals))
                loss = output.loss if loss is None else loss + output.loss
                state = combine(state, output.state)
        assert loss is not None, "a step has microbatches"
        shown = self._sum_shown({name: state.pop(name) for name in [*state] if name.startswith((TERM, METRIC))})
        if self.quantized is not None:
            state = self.quantized.take(state)
        terms, metrics = (
            {name.removeprefix(prefix): x for name, x in shown.items() if name.startswith(prefix)}
            for prefix in (TERM, METRIC)
        )
        return StepOutput(loss, self._sum_state(state), terms, metrics)

    def evaluate(self, batch: Batch, on_host: Batch | None = None) -> Tensor:
        """Return the sum of the loss over this rank's targets of a batch; `on_host` as in `train`."""
        one = torch.ones((), dtype=torch.int64, device=batch.tokens_BL.device)
        totals = one.expand(2 + num_ahead(self.model)).contiguous()  # not read: evaluation has no other losses
        if self.quantized is not None:
            self.quantized.refresh(always=False)
        if self.evaluation is not None:
            return self.evaluation(*self._inputs(batch, on_host, one, totals))
        assert isinstance(self.step, Pipeline), "evaluation is built when the options have eval_rows"
        return self.step.evaluate(partial(self._inputs, batch, on_host, one, totals))

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients of all ranks, like `clip_grad_norm`."""
        parameters, device = dict(self.model.named_parameters()), self.layout.mesh.device_type
        if self.layout.degree(PP) == 1:
            return clip_grad_norm(parameters.values(), max_norm, device=device)
        assert isinstance(self.step, Pipeline)
        repeated = frozenset(parameters[name] for name in self.step.repeated)
        return clip_grad_norm(parameters.values(), max_norm, self.layout.group(PP), repeated, device)

    def count_flops(self, microbatches: Sequence[Batch]) -> float | None:
        """Return the operations of a step on this rank without those of padding; None in eager mode, where there is no
        graph to count them on."""
        if self.flops is None:
            return None
        return sum(
            self.flops.of(self._visible_pairs(batch), batch.tokens_BL.shape[1] / self.seq_len, filled(batch))
            for batch in microbatches
        )

    def _inputs(
        self, batch: Batch, on_host: Batch | None, num_tokens: Tensor, totals: Tensor
    ) -> tuple[Rows, Any, Tensor]:
        return *of_this_rank(batch, totals, self.model, self.layout, on_host, self.reference), num_tokens

    def _visible_pairs(self, batch: Batch) -> dict[str, float]:
        of_rows = batch.documents_BL, batch.positions_BL
        of_reference = None if self.reference is None else self.reference.visible_pairs(*of_rows)
        return beside(self.model.visible_pairs(*of_rows), of_reference)

    def _sum_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """All-reduce the routers' counts over the ranks, all of a dtype in one message."""
        summed: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in state.values()):
            alike = {name: x for name, x in state.items() if x.dtype == dtype}
            total = sum_over(self.layout.routing_groups, torch.cat([x.flatten() for x in alike.values()]))
            parts = total.split([x.numel() for x in alike.values()])
            summed |= {name: part.view_as(x) for (name, x), part in zip(alike.items(), parts, strict=True)}
        return {name: summed[name] for name in state}

    def _sum_shown(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum the loss's terms and the metrics over the ranks, as `Layout.total_loss` does the loss; in one message."""
        if not parts:
            return {}
        groups = [*self.layout.data_groups, *([self.layout.group(TP)] if self.layout.degree(TP) > 1 else [])]
        total = sum_over(groups, torch.stack([*parts.values()])) / self.layout.dims.tp
        return dict(zip(parts, total.unbind(), strict=True))


def filled(batch: Batch) -> float:
    """Return the fraction of a batch's positions that are tokens."""
    return float((batch.documents_BL != PADDING).float().mean())


def build_steps(assembly: Assembly) -> Steps:
    """Lay a model out, build its steps, and allocate its parameters, uninitialized."""
    options, model = assembly.options, assembly.model
    if options.mode == "graph":
        return bind_graphs(build_graphs(assembly), assembly)
    assembly.prepare()
    recompute_eager(model.blocks, options.recompute)
    at_rest = options.precision, options.reshard, options.target.device, options.cpu_offload
    sync = shard_eager(model, model.blocks, assembly.layout, *at_rest, options.once)
    frozen = None if assembly.reference is None else assembly.reference.model
    if frozen is not None:  # without a backward that would free its gathered weights
        at_rest = options.precision, Reshard(root=True), options.target.device, options.cpu_offload
        shard_eager(frozen, frozen.blocks, assembly.layout, *at_rest)
    evaluate = _make_eager_evaluation(model, assembly) if options.eval_rows else None
    step = make_eager_step(model, assembly.loss)
    quantized = quantized_state({}, assembly)
    return Steps(model, assembly.layout, step, evaluate, quantized=quantized, reference=frozen, sync=sync)


def _make_eager_evaluation(model: Decoder, assembly: Assembly) -> Evaluation:
    step = make_eval_step(model, assembly.evaluation_loss)

    def evaluate(*inputs: Any) -> Tensor:
        loss = step(*inputs)
        reshard_eager(model)  # an average of the weights may be in their place
        return loss

    return evaluate


def quantized_state(storages: Mapping[str, Storage], assembly: Assembly) -> Float8State | None:
    """Return the per-weight quantization state of a model that is laid out, None where nothing is quantized."""
    if not kept_weights(assembly.model):
        return None
    return Float8State(assembly.model, storages, assembly.layout, assembly.options.precision.compute)


def bind_graphs(graphs: Graphs, assembly: Assembly) -> Steps:
    """Allocate the parameters of a model, and return the steps of its graphs bound to them."""
    model, layout, options = assembly.model, assembly.layout, assembly.options
    state = assembly.state
    cast_parameters(state, options.precision.storage)
    materialize(state, graphs.storages, options.target.device)
    new = None if options.recorders is None else options.recorders.new
    evaluate = None
    if graphs.evaluate is not None:
        make_run = Watchable if new is None else partial(Replayed, new_recorder=new)
        evaluate = run_traced(graphs.evaluate, module=whole(model, assembly.evaluation_loss), make_run=make_run)
    step: Step | Pipeline | Accumulation
    if isinstance(graphs.train, StageGraph):
        step = Accumulation(graphs.train, model, state)
    elif isinstance(graphs.train, dict):
        assert options.pipeline is not None
        shared = model.tok_embeddings.weight if model.config.tied and model.tok_embeddings is not None else None
        tied = shared if shared is not None and shared.requires_grad else None
        device = options.target.device
        step = Pipeline(options.pipeline, graphs.train, model, tied, layout, device, options.fewer)
    else:
        accumulates = options.num_microbatches > 1
        step = bind_train_step(graphs.train, model, new, accumulates, whole(model, assembly.loss))
    return Steps(
        model,
        layout,
        step,
        evaluate,
        flops=graphs.flops,
        seq_len=options.rows[1],
        recorders=options.recorders,
        quantized=quantized_state(graphs.storages, assembly),
        reference=None if assembly.reference is None else assembly.reference.model,
    )
