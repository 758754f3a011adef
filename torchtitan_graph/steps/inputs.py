"""Inputs of a step: the model in its compute layout, this rank's part of a batch, and example inputs for tracing."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.capture.dimensions import DynamicShapes
from torchtitan_graph.capture.trace import Capture
from torchtitan_graph.compiler import PassPlan
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.graph.varlen import Segments
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.moe import set_up_experts
from torchtitan_graph.ops.planned_norms import take_norms_of_gpu
from torchtitan_graph.parallel.agree import files_group, on_rank_0
from torchtitan_graph.parallel.layout import CP, TP, Layout
from torchtitan_graph.parallel.parallelize import context_modules, parallelize
from torchtitan_graph.parallel.sequence import block_length, places_of
from torchtitan_graph.parallel.storage import Reshard, buckets, cast_parameters, plan_storage
from torchtitan_graph.parallel.verify import Numbers
from torchtitan_graph.passes.overlap_products import Ring
from torchtitan_graph.quantize.state import add_workspaces, convert
from torchtitan_graph.steps.options import StepOptions

SEQ_LEN = "seq_len"  # the tokens of a row, where they differ from batch to batch


def prepare(model: Decoder, family: ModuleType, layout: Layout, options: StepOptions) -> None:
    """Set runtime options on the model, and bring it into the compute layout."""
    groups, row_groups = ([g.group_name for g in each] for each in (layout.routing_groups, layout.row_groups))
    num_parts = options.num_microbatches * layout.num_routing_parts
    set_up_experts(model, options.experts, num_parts, groups, row_groups)
    model.ahead_weight = options.mtp_weight
    model.num_parts = options.num_microbatches * layout.dims.dp_replicate * layout.dims.fsdp
    model.parts_differ = options.lengths is not None
    if options.float8 is not None:
        convert(model, options.float8)
    for module in model.modules():
        if isinstance(module, options.fused):
            module.is_fused = True  # type: ignore[assignment]
    if options.plans_norms:
        take_norms_of_gpu(model)
    parallelize(model, family.PLAN, layout, loss_parallel=options.loss_parallel)


def lay_out(
    model: Decoder, family: ModuleType, layout: Layout, options: StepOptions, reshard: Reshard | None = None
) -> PassPlan:
    """Bring a model into the layouts of its step, and return the passes' inputs; `reshard` replaces the option."""
    prepare(model, family, layout, options)
    cast_parameters(model, options.precision.compute)
    storages = plan_storage(model, layout, options.precision, options.cpu_offload)
    quantised = add_workspaces(model, storages)
    return PassPlan(
        storages | quantised,
        model.blocks,
        buckets(model, model.blocks, quantised),
        options.recompute,
        reshard or options.reshard,
        options.regions,
        context_modules(model, family.PLAN),
        options.offload,
        costs_on(layout, options),
        ring=ring_of(layout) if options.async_tp else None,
        compiles=options.compiles,
    )


def once_per_kind(capture: Capture, model: Decoder, options: StepOptions) -> Capture:
    """Bind a capture to the model's blocks, each kind of which is traced once, unless all are to be traced."""
    return capture if options.trace_every_block else partial(capture, blocks=model.blocks)


def loss_is_parallel(layout: Layout, options: StepOptions) -> bool:
    return options.loss_parallel and layout.degree(TP) > 1


def costs_on(layout: Layout, options: StepOptions) -> Costs:
    """Return the cost model of nodes and collectives: the same on all ranks, which must order collectives alike."""
    rates = options.rates if dist.get_backend() == "fake" else on_rank_0(lambda: options.rates, files_group())
    return Costs(rates, layout.links(rates.num_near))


def ring_of(layout: Layout) -> Ring:
    return Ring(layout.group(TP).group_name, layout.degree(TP), layout.rank(TP))


def shapes_of(masks: Any, shorter: Any, lengths: range) -> DynamicShapes:
    """Return the dynamic dimensions, as long as the rows, of a training step's arguments: for tensors in a block mask's
    rule, those that differ in the masks of `shorter` rows."""
    length = torch.export.Dim(SEQ_LEN, min=lengths[0], max=lengths[-1])
    shapes = {f"batch.{name}": {1: length} for name in Batch._fields}
    for name, mask in masks.items():
        of_mask = f"masks{pytree.keystr((pytree.MappingKey(name),))}"
        if isinstance(mask, Segments):
            shapes[f"{of_mask}.begins"] = {0: (len(mask.begins) - 1) // lengths[-1] * length + 1}
        else:
            shapes[of_mask] = {2: length, 3: length}
    leaves, others = (pytree.tree_flatten_with_path(x)[0] for x in (masks, shorter))
    for (path, x), (_, y) in zip(leaves, others, strict=True):
        if ".mask_mod_" in (name := pytree.keystr(path)):
            sizes = enumerate(zip(x.shape, y.shape, strict=True))
            shapes[f"masks{name}"] = {i: length for i, (size, other) in sizes if size != other}
    return shapes


def of_this_rank(whole: Batch, model: Decoder, layout: Layout, on_host: Batch | None = None) -> tuple[Batch, Any]:
    """Return this rank's part of the rows, and its masks: of its own queries, and the whole rows' keys.

    Args:
        on_host: the same rows in the host's memory, to compute segments without waiting for the device.
    """
    L, device = whole.tokens_BL.shape[1], whole.tokens_BL.device
    if layout.degree(CP) == 1:
        read = on_host if on_host is not None and model.attn == "varlen" else whole
        return whole, model.masks(read.documents_BL, read.positions_BL, None, device)
    places_L = places_of(layout.rank(CP), L, layout.degree(CP), device)
    masks = model.masks(whole.documents_BL, whole.positions_BL, places_L)
    return Batch(*(x[:, places_L] for x in whole)), masks


def example_inputs(
    model: Decoder, rows: tuple[int, int], layout: Layout, options: StepOptions
) -> tuple[Batch, Any, Tensor]:
    """Return example inputs for tracing: random tokens if passes are to be verified on them, else on meta."""
    num_tokens = rows[0] * rows[1] * layout.dims.data
    if not options.verify:
        whole = Batch(*(torch.empty(rows, dtype=torch.int64, device="meta") for _ in Batch._fields))
        return *of_this_rank(whole, model, layout), torch.tensor(num_tokens, device="meta")
    generator = torch.Generator().manual_seed(options.seed + layout.data_rank)
    tokens, labels = torch.randint(model.config.vocab_size, (2, *rows), generator=generator)
    documents = (torch.rand(rows, generator=generator) < 0.01).long().cumsum(1)
    positions = torch.arange(rows[1]).expand(rows).contiguous()
    if (cp := layout.degree(CP)) > 1:  # a rank's loss must depend on its own part of the rows alone
        documents = torch.arange(rows[1]).div(block_length(rows[1], cp), rounding_mode="floor").expand(rows)
    on_host = Batch(tokens, labels, positions, documents)
    batch = on_host.to(options.device)
    return *of_this_rank(batch, model, layout, on_host), torch.tensor(num_tokens, device=options.device)


def numbers_of(example: Any, layout: Layout) -> Numbers:
    """Return the numbers for verifying the passes of a step with such arguments."""
    tensors = [x.detach() for x in pytree.tree_leaves(example) if isinstance(x, Tensor)]
    return Numbers(tensors, has_gradients(layout))


def has_gradients(layout: Layout) -> bool:
    """Return whether this rank's loss is the one with gradients when passes are verified, see `Numbers`."""
    return layout.data_rank == 0 and layout.rank(CP) == 0
