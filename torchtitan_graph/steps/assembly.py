"""The assembly of a step: the model, its layout and its options, from which all steps and graphs are built."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from types import ModuleType

import torch.distributed as dist
from torch import nn

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.capture.own_step import REFERENCE, OwnStep, together
from torchtitan_graph.capture.step import Loss
from torchtitan_graph.capture.trace import Capture, make_fx_capture
from torchtitan_graph.compiler import PassPlan
from torchtitan_graph.loss import cross_entropy, own_loss
from torchtitan_graph.models.layers.decoder import Decoder, check_experts_see_padding
from torchtitan_graph.models.layers.lora import adapters_off
from torchtitan_graph.models.layers.moe import ExpertTraining, set_up_experts
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.ops.planned_norms import use_gpu_norms
from torchtitan_graph.parallel.agree import files_group, on_rank_0
from torchtitan_graph.parallel.layout import TP, Layout
from torchtitan_graph.parallel.parallelize import context_modules, parallelize
from torchtitan_graph.parallel.storage import Reshard, buckets, cast_parameters, plan_storage
from torchtitan_graph.passes.overlap_products import Ring
from torchtitan_graph.quantize.state import add_workspaces, convert
from torchtitan_graph.steps.options import StepOptions
from torchtitan_graph.steps.reference import Reference, beside


@dataclasses.dataclass(frozen=True)
class Assembly:
    """All that steps are built from.

    model    on the meta device, as its family builds it; `check_steps` has passed
    family   the module that defines the model's `PLAN`
    layout   of the ranks; this rank's place in it
    options  of the steps
    capture  how a step becomes a graph
    reference  the frozen model next to it, on the meta device, if there is one
    """

    model: Decoder
    family: ModuleType
    layout: Layout
    options: StepOptions
    capture: Capture = make_fx_capture
    reference: Reference | None = None

    @functools.cached_property
    def costs(self) -> Costs:
        """The cost model of nodes and collectives: the same on all ranks, which must order collectives alike."""
        rates = self.options.target.rates
        if dist.get_backend() != "fake":
            rates = on_rank_0(lambda: rates, files_group())
        return Costs(rates, self.layout.links(rates.num_near))

    @property
    def loss(self) -> Loss:
        """The training loss of a model's logits, or the user's step."""
        options = self.options
        if options.own_step is not None:
            reference = None if self.reference is None else self.reference.model
            off = adapters_off if self.model.lora.rank else None
            return OwnStep(options.own_step.name, options.own_step.function, reference, off)
        if options.own_loss is not None:
            return partial(own_loss, options.own_loss)
        return partial(cross_entropy, chunks=options.loss_chunks, regularizers=options.regularizers)

    @property
    def evaluation_loss(self) -> Loss:
        """The loss in evaluation: the user's own loss or step, or cross entropy alone."""
        is_own = self.options.own_loss is not None or self.options.own_step is not None
        return self.loss if is_own else partial(cross_entropy, chunks=self.options.loss_chunks)

    @property
    def state(self) -> nn.Module:
        """The module with all state that a step reads: the model's, and the reference's."""
        return together(self.model, None if self.reference is None else self.reference.model)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks of both, by their names in `state`."""
        return {**self.model.blocks, **({} if self.reference is None else self.reference.blocks)}

    def visible_in_one_document(self, seq_len: int) -> dict[str, float]:
        """Return, by block, the fraction of pairs of positions that its attention sees in rows of one document."""
        of_reference = None if self.reference is None else self.reference.model.visible_in_one_document(seq_len)
        return beside(self.model.visible_in_one_document(seq_len), of_reference)

    @property
    def capture_per_kind(self) -> Capture:
        """The capture that traces one block of each kind, and stamps the others; or each, if all are to be traced."""
        return self.capture if self.options.trace_every_block else partial(self.capture, blocks=self.blocks)

    def prepare(self) -> None:
        """Set the options on the model's modules, and bring it, and the reference, into the compute layout."""
        model, layout, options = self.model, self.layout, self.options
        self._set_up(model, options.experts)
        model.ahead_weight = options.mtp_weight
        if options.float8 is not None:
            convert(model, options.float8)
        self._fuse(model)
        # A loss or a step of the user's sees whole logits.
        loss_parallel = options.loss_parallel and options.own_loss is None and options.own_step is None
        plan = plan_of(self.family, model)
        parallelize(model, plan, layout, loss_parallel=loss_parallel, exchange=options.exchange)
        if self.reference is not None:
            frozen = self.reference.model
            self._set_up(frozen, ExpertTraining(forced_balance=options.experts.forced_balance))
            self._fuse(frozen)
            parallelize(frozen, self.reference.plan, layout, loss_parallel=False)

    def _set_up(self, model: Decoder, experts: ExpertTraining) -> None:
        check_experts_see_padding(model)
        layout = self.layout
        groups, row_groups = ([g.group_name for g in each] for each in (layout.routing_groups, layout.row_groups))
        if layout.degree(TP) > 1 and model.conversion is not None:
            # Another library's routers see a rank's part of each row, as ours do where expert parallelism spans TP.
            model.routing_group, model.sums_loads = layout.group(TP), not layout.dims.ep_spans_tp
            if model.sums_loads:
                groups, row_groups = ([*each, model.routing_group.group_name] for each in (groups, row_groups))
        set_up_experts(model, experts, groups, row_groups)

    def _fuse(self, model: Decoder) -> None:
        for module in model.modules():
            if isinstance(module, self.options.fused):
                module.is_fused = True  # type: ignore[assignment]
        if self.options.target.fused_norms:
            use_gpu_norms(model)

    def lay_out(self, reshard: Reshard | None = None) -> PassPlan:
        """Bring the model into the layouts of its step; return the passes' inputs. `reshard` replaces the option."""
        model, layout, options = self.model, self.layout, self.options
        self.prepare()
        cast_parameters(model, options.precision.compute)
        storages = plan_storage(model, layout, options.precision, options.cpu_offload)
        quantized = add_workspaces(model, storages)
        groups = buckets(model, model.blocks, quantized)
        context = context_modules(model, plan_of(self.family, model))
        if self.reference is not None:
            frozen, plan = self.reference.model, self.reference.plan
            cast_parameters(frozen, options.precision.compute)
            of_frozen = plan_storage(frozen, layout, options.precision, options.cpu_offload)
            storages |= {f"{REFERENCE}.{name}": storage for name, storage in of_frozen.items()}
            groups += [[f"{REFERENCE}.{name}" for name in names] for names in buckets(frozen, frozen.blocks)]
            context += [f"{REFERENCE}.{name}" for name in context_modules(frozen, plan)]
        return PassPlan(
            storages=storages | quantized,
            blocks=self.blocks,
            buckets=groups,
            packs_all=options.sums_over_replicas,
            recompute=options.recompute,
            reshard=reshard or options.reshard,
            regions=options.regions,
            context=context,
            offload=options.offload,
            costs=self.costs,
            ring=self._ring if options.async_tp else None,
            compiles=options.target.runs,
        )

    @property
    def _ring(self) -> Ring:
        layout = self.layout
        return Ring(layout.group(TP).group_name, layout.degree(TP), layout.rank(TP))
