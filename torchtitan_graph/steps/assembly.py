"""The assembly of a step: the model, its layout and its options, from which all steps and graphs are built."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from types import ModuleType

import torch.distributed as dist

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.capture.step import Loss
from torchtitan_graph.capture.trace import Capture, make_fx_capture
from torchtitan_graph.compiler import PassPlan
from torchtitan_graph.loss import cross_entropy, own_loss
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.moe import set_up_experts
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.ops.planned_norms import use_gpu_norms
from torchtitan_graph.parallel.agree import files_group, on_rank_0
from torchtitan_graph.parallel.layout import TP, Layout
from torchtitan_graph.parallel.parallelize import context_modules, parallelize
from torchtitan_graph.parallel.storage import Reshard, buckets, cast_parameters, plan_storage
from torchtitan_graph.passes.overlap_products import Ring
from torchtitan_graph.quantize.state import add_workspaces, convert
from torchtitan_graph.steps.options import StepOptions


@dataclasses.dataclass(frozen=True)
class Assembly:
    """All that steps are built from.

    model    on the meta device, as its family builds it; `check_steps` has passed
    family   the module that defines the model's `PLAN`
    layout   of the ranks; this rank's place in it
    options  of the steps
    capture  how a step becomes a graph
    """

    model: Decoder
    family: ModuleType
    layout: Layout
    options: StepOptions
    capture: Capture = make_fx_capture

    @functools.cached_property
    def costs(self) -> Costs:
        """The cost model of nodes and collectives: the same on all ranks, which must order collectives alike."""
        rates = self.options.target.rates
        if dist.get_backend() != "fake":
            rates = on_rank_0(lambda: rates, files_group())
        return Costs(rates, self.layout.links(rates.num_near))

    @property
    def loss(self) -> Loss:
        """The training loss of a model's logits."""
        options = self.options
        if options.own_loss is not None:
            return partial(own_loss, options.own_loss)
        return partial(cross_entropy, chunks=options.loss_chunks, regularizers=options.regularizers)

    @property
    def evaluation_loss(self) -> Loss:
        """The loss in evaluation: the user's own, or cross entropy alone."""
        return (
            self.loss if self.options.own_loss is not None else partial(cross_entropy, chunks=self.options.loss_chunks)
        )

    @property
    def capture_per_kind(self) -> Capture:
        """The capture that traces one block of each kind, and stamps the others; or each, if all are to be traced."""
        return self.capture if self.options.trace_every_block else partial(self.capture, blocks=self.model.blocks)

    def prepare(self) -> None:
        """Set the options on the model's modules, and bring it into the compute layout."""
        model, layout, options = self.model, self.layout, self.options
        groups, row_groups = ([g.group_name for g in each] for each in (layout.routing_groups, layout.row_groups))
        num_parts = options.num_microbatches * layout.num_routing_parts
        if layout.degree(TP) > 1 and model.conversion is not None:
            # Another library's routers see a rank's part of each row, as ours do where expert parallelism spans TP.
            model.routing_group, model.sums_loads = layout.group(TP), not layout.dims.ep_spans_tp
            if model.sums_loads:
                num_parts *= layout.degree(TP)
                groups, row_groups = ([*each, model.routing_group.group_name] for each in (groups, row_groups))
        set_up_experts(model, options.experts, num_parts, groups, row_groups)
        model.ahead_weight = options.mtp_weight
        model.num_parts = options.num_microbatches * layout.dims.dp_replicate * layout.dims.fsdp
        model.parts_differ = options.lengths is not None
        if options.float8 is not None:
            convert(model, options.float8)
        for module in model.modules():
            if isinstance(module, options.fused):
                module.is_fused = True  # type: ignore[assignment]
        if options.target.fused_norms:
            use_gpu_norms(model)
        # A loss of the user's sees whole logits.
        loss_parallel = options.loss_parallel and options.own_loss is None
        parallelize(model, plan_of(self.family, model), layout, loss_parallel=loss_parallel)

    def lay_out(self, reshard: Reshard | None = None) -> PassPlan:
        """Bring the model into the layouts of its step; return the passes' inputs. `reshard` replaces the option."""
        model, layout, options = self.model, self.layout, self.options
        self.prepare()
        cast_parameters(model, options.precision.compute)
        storages = plan_storage(model, layout, options.precision, options.cpu_offload)
        quantized = add_workspaces(model, storages)
        return PassPlan(
            storages=storages | quantized,
            blocks=model.blocks,
            buckets=buckets(model, model.blocks, quantized),
            recompute=options.recompute,
            reshard=reshard or options.reshard,
            regions=options.regions,
            context=context_modules(model, plan_of(self.family, model)),
            offload=options.offload,
            costs=self.costs,
            ring=self._ring if options.async_tp else None,
            compiles=options.target.runs,
        )

    @property
    def _ring(self) -> Ring:
        layout = self.layout
        return Ring(layout.group(TP).group_name, layout.degree(TP), layout.rank(TP))
