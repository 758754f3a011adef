"""Inputs of a step: this rank's part of a batch, and example inputs for tracing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchtitan_graph.capture.dimensions import DynamicShapes
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.models.layers.decoder import AheadBlock, Decoder
from torchtitan_graph.ops.varlen import Segments
from torchtitan_graph.parallel.layout import CP, Layout
from torchtitan_graph.parallel.sequence import block_length, places_of
from torchtitan_graph.parallel.verify import Numbers
from torchtitan_graph.steps.assembly import Assembly
from torchtitan_graph.steps.reference import masks_beside

SEQ_LEN = "seq_len"  # the tokens of a row, where they differ from batch to batch


class Rows(NamedTuple):
    """What a step's graph reads of a batch: this rank's part of the rows, with the fields of `Batch`.

    totals  int64, of all microbatches and ranks of the step, each at least 1: the tokens without padding; the rows that
            have any; the targets of each layer that predicts a token further ahead
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    documents_BL: Tensor
    totals: Tensor


def num_ahead(model: Decoder) -> int:
    """Return the number of a model's layers that predict a token further ahead."""
    return sum(isinstance(block, AheadBlock) for block in model.blocks.values())


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


def of_this_rank(
    whole: Batch,
    totals: Tensor,
    model: Decoder,
    layout: Layout,
    on_host: Batch | None = None,
    reference: Decoder | None = None,
) -> tuple[Rows, Any]:
    """Return this rank's part of the rows, and its masks: of its own queries, and the whole rows' keys.

    Args:
        totals: as in `Rows`.
        on_host: the same rows in the host's memory, to compute segments without waiting for the device.
        reference: a model next to this one, whose masks are added.
    """
    L, device = whole.tokens_BL.shape[1], whole.tokens_BL.device
    degree = layout.degree(CP)
    places_L = places_of(layout.rank(CP), L, degree, device) if degree > 1 else None
    read = on_host if on_host is not None and model.attn == "varlen" else whole
    rows = read.documents_BL, read.positions_BL, places_L, device
    masks = {**model.masks(*rows), **masks_beside(model, reference, *rows)}
    own = whole if places_L is None else Batch(*(x[:, places_L] for x in whole))
    return Rows(*own, totals), masks


def example_inputs(assembly: Assembly, rows: tuple[int, int]) -> tuple[Rows, Any, Tensor]:
    """Return example inputs for tracing: random tokens if passes are to be verified on them, else on meta."""
    model, layout, options = assembly.model, assembly.layout, assembly.options
    reference = None if assembly.reference is None else assembly.reference.model
    num_tokens = rows[0] * rows[1] * layout.dims.data
    totals = torch.full(
        (2 + num_ahead(model),), num_tokens, device="meta" if not options.verify else options.target.device
    )
    if not options.verify:
        whole = Batch(*(torch.empty(rows, dtype=torch.int64, device="meta") for _ in Batch._fields))
        return *of_this_rank(whole, totals, model, layout, None, reference), torch.tensor(num_tokens, device="meta")
    generator = torch.Generator().manual_seed(options.seed + layout.data_rank)
    tokens, labels = torch.randint(model.config.vocab_size, (2, *rows), generator=generator)
    documents = (torch.rand(rows, generator=generator) < 0.01).long().cumsum(1)
    positions = torch.arange(rows[1]).expand(rows).contiguous()
    if (cp := layout.degree(CP)) > 1:  # a rank's loss must depend on its own part of the rows alone
        documents = torch.arange(rows[1]).div(block_length(rows[1], cp), rounding_mode="floor").expand(rows)
    on_host = Batch(tokens, labels, positions, documents)
    batch = on_host.to(options.target.device)
    return *of_this_rank(batch, totals, model, layout, on_host, reference), torch.tensor(
        num_tokens, device=options.target.device
    )


def numbers_of(example: Any, layout: Layout) -> Numbers:
    """Return the numbers for verifying the passes of a step with such arguments."""
    tensors = [x.detach() for x in pytree.tree_leaves(example) if isinstance(x, Tensor)]
    return Numbers(tensors, has_gradients(layout))


def has_gradients(layout: Layout) -> bool:
    """Return whether this rank's loss is the one with gradients when passes are verified, see `Numbers`."""
    return layout.data_rank == 0 and layout.rank(CP) == 0
