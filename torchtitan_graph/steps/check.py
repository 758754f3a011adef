"""Checks of steps before any process group exists: whether the model can be laid out, and fits."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn

from torchtitan_graph import device as devices
from torchtitan_graph.capture.step import takes_loss
from torchtitan_graph.config import JobConfig
from torchtitan_graph.data.batch import BYTES_PER_TOKEN
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.log import logger
from torchtitan_graph.models.layers.adapt import check_packed
from torchtitan_graph.models.layers.attention import flex_cpu_bytes
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.masks import dense_mask_bytes
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.parallelize import check_plan
from torchtitan_graph.quantize.plan import check_cut
from torchtitan_graph.steps.cuts import check_own_loss, check_terms
from torchtitan_graph.steps.options import StepOptions, rows_per_microbatch
from torchtitan_graph.steps.reference import Reference


def check_steps(
    config: JobConfig, model: Decoder, family: ModuleType, dims: ParallelDims, options: StepOptions
) -> None:
    """Check, before any process group exists, that the model can be laid out and its attention fits this machine.

    Raises:
        UserError: as `check_plan`, `check_cut`, `check_own_loss` and `check_terms`, a parameter is a scalar, or one of
            two blocks, none (of a pipeline's stage) takes gradients, or rows, masks or flex attention's scores can't
            fit; a dry run allocates none.
    """
    _check_state(config, model, dims)
    plan = plan_of(family, model)
    check_plan(model, plan, dims)
    check_packed(model, plan, dims)
    _check_parameters(config, model)
    check_cut(options.float8, model, plan, dims.tp)
    _check_loss_chunks(config, model, dims, options)
    if options.own_loss is not None:
        check_own_loss(config.loss.name, options.own_loss, model.config.vocab_size, config.training.seq_len, dims.cp)
    if not_checked := check_terms(config.model.name, family, model.config):
        logger.warning(not_checked)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model.name = {config.model.name!r}: none of its parameters takes gradients (requires_grad), so there is "
            "nothing to train; leave at least one that does"
        )
    for number, names in enumerate(options.pipeline.stages if options.pipeline is not None else ()):
        if not any(p.requires_grad for name in names for p in model.get_submodule(name).parameters()):
            raise UserError(
                f"parallelism.pipeline_parallel_degree = {dims.pp}: no parameter of stage {number}, {', '.join(names)},"
                " takes gradients (requires_grad); use fewer stages, or divide them by"
                " parallelism.module_fqns_per_model_part"
            )
    _check_varlen(model, dims, options)
    if model.attn == "sdpa" and options.target.is_gpu:
        _log_dense_masks(config, model, dims, options)
    if config.comm.mode == "fake_backend":
        return
    _check_rows_fit(config, model, options.precision.compute.itemsize)
    if model.attn == "flex" and options.target.device.type == "cpu":
        _check_scores_fit(options, model.config.num_heads // dims.tp, dims.cp)


def _check_loss_chunks(config: JobConfig, model: Decoder, dims: ParallelDims, options: StepOptions) -> None:
    """Check that the output layer can project some rows at a time."""
    if options.loss_chunks == 1:
        return
    option, forward = f"training.loss_chunks = {options.loss_chunks}", type(model).forward.__qualname__
    if not model.projects_last:
        raise UserError(
            f"{option}: this model changes the logits after its output layer, as by a soft cap; set the option to 1"
        )
    if not takes_loss(model):
        raise UserError(
            f"{option}: {forward} returns logits of all rows; give it the argument `loss` of Decoder.forward, or set"
            " the option to 1"
        )
    if type(model.output) is not nn.Linear or model.output.bias is not None:
        raise UserError(f"{option}: needs an output layer that is nn.Linear without a bias; set it to 1")
    if options.float8 is not None and "output" in options.float8.layers:
        raise UserError(
            f"{option}: not with an output layer in float8; add output to quantize.linear.float8.filter_fqns, or set"
            " this to 1"
        )
    if dims.tp > 1 and not options.loss_parallel:
        raise UserError(
            f"{option}: not with parallelism.disable_loss_parallel = true, which gathers the logits of all rows; set"
            " that to false, or this to 1"
        )
    if options.lengths is not None and options.mode == "graph":
        raise UserError(
            f"{option}: not with training.dynamic_seq_len = true in a graph, whose chunks have one size; set that to"
            " false, or this to 1"
        )


def check_reference(
    config: JobConfig, model: Decoder, reference: Reference, dims: ParallelDims, options: StepOptions
) -> None:
    """Check that the frozen model next to the trained one reads the same tokens, and can be laid out.

    Raises:
        UserError: as `check_plan`, another vocabulary, or rows or a layout that it can't take.
    """
    frozen = reference.model
    if (there := frozen.config.vocab_size) != (here := model.config.vocab_size):
        raise UserError(
            f"its vocabulary has {there} rows, and the trained model's {here}: both read the same tokens; name a model"
            " of the same vocabulary, padded to the same size"
        )
    check_plan(frozen, reference.plan, dims)
    _check_state(config, frozen, dims)
    _check_varlen(frozen, dims, options)


def _check_state(config: JobConfig, model: Decoder, dims: ParallelDims) -> None:
    """Check what another library's model can't do: be cut, take longer rows, or keep documents apart without a mask."""
    if dims.pp > 1 and model.no_pipeline is not None:
        raise UserError(f"parallelism.pipeline_parallel_degree = {dims.pp}: not of this model: {model.no_pipeline}")
    if config.compile.capture == "dynamo" and model.conversion is not None:
        raise UserError(
            f"compile.capture = 'dynamo': Dynamo can't trace model.name = {config.model.name!r}, whose masks are found"
            " by looking into functions; use 'make_fx'"
        )
    for table in ("training", "validation") if config.validation.enable else ("training",):
        length = getattr(config, table).seq_len
        if model.longest_row is not None and length > model.longest_row[0]:
            most, why = model.longest_row
            raise UserError(f"{table}.seq_len = {length}: at most {most} for this model: {why}")
        if model.trained_length is not None and length > model.trained_length:
            logger.warning(
                f"{table}.seq_len = {length}: rows are longer than the {model.trained_length} positions"
                " (max_position_embeddings) that config.json says the model was made for"
            )
    if model.mixes_documents is None:
        return
    what = f"model.name = {config.model.name!r}: {model.mixes_documents} of this model mixes all tokens of a row"
    if not config.training.one_document_per_row:
        raise UserError(f"{what}, those of other documents too: set training.one_document_per_row = true")
    if dims.cp > 1:
        raise UserError(
            f"{what}, and with parallelism.context_parallel_degree = {dims.cp} a rank has a part of it; leave it at 1"
        )


def _check_varlen(model: Decoder, dims: ParallelDims, options: StepOptions) -> None:
    """Check that attention within segments supports the step; on a GPU, that flash attention's kernels do."""
    model.check_attention()
    compute = options.precision.compute
    if model.attn != "varlen" or not options.target.is_gpu:
        return
    if dims.cp > 1:
        raise UserError(
            f"parallelism.context_parallel_degree = {dims.cp}: on a GPU not with model.attn = 'varlen', whose kernels"
            " take whole documents, and a rank has parts of them; use flex, or another axis"
        )
    if windows := model.windows():
        raise UserError(
            f"model.attn = 'varlen': on a GPU its kernels have no windows here, and the mask {next(iter(windows))!r} of"
            " this model has; use flex"
        )
    if compute not in (torch.bfloat16, torch.float16):
        raise UserError(
            f"model.attn = 'varlen': on a GPU its kernels compute in bfloat16 or float16, not in {compute}; set "
            "training.mixed_precision_param = 'bfloat16', or use flex"
        )
    if options.target.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        raise UserError("model.attn = 'varlen': its kernels need a GPU of compute capability 8.0 or more; use sdpa")


def _log_dense_masks(config: JobConfig, model: Decoder, dims: ParallelDims, options: StepOptions) -> None:
    """Log the memory of dense masks on a GPU, and the attention implementations without them."""
    (rows, keys), itemsize = options.rows, options.precision.compute.itemsize
    queries, nothing = keys // dims.cp, torch.zeros(1, 1, dtype=torch.int64)
    rules = model.mask_rules(nothing, nothing).keys()
    segments = model.segments(nothing, nothing).keys() - model.windows().keys()
    instead = []
    if not config.training.dynamic_seq_len and "compile_regions" not in options.disabled:
        instead.append("auto or flex")
    if rules <= segments and dims.cp == 1 and itemsize == 2 and not config.compile.cuda_graphs:
        instead.append("varlen")
    num_bytes = dense_mask_bytes(rows, queries, keys, len(rules), itemsize)
    logger.info(
        f"model.attn = 'sdpa': on a GPU its masks of {queries} x {keys} positions take {num_bytes / devices.GIB:.3g}"
        f" GiB, and its kernels compute what they hide; {' or '.join(instead) or 'shorter rows'} would"
        f" {'hold none' if instead else 'take less'}"
    )


def _check_parameters(config: JobConfig, model: Decoder) -> None:
    """Check that no parameter is a scalar, or shared between a block and another or the outside: as FSDP2, which shards
    block by block."""
    first: dict[torch.Tensor, tuple[str, str | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 0:
            raise UserError(
                f"model.name = {config.model.name!r}: {name} is a scalar, which can't be sharded; give it one dimension"
            )
        block = block_of(name, model.blocks)
        other, its_block = first.setdefault(parameter, (name, block))
        if block != its_block:
            raise UserError(
                f"model.name = {config.model.name!r}: {name} is {other}, and a block can't share a parameter with "
                "what is outside of it; let each have its own"
            )


def _check_rows_fit(config: JobConfig, model: Decoder, itemsize: int) -> None:
    """Check that rows' tokens, and dense masks, fit into this device's memory."""
    num_masks, what, hint = 0, "the tokens", ""
    if model.attn == "sdpa":
        num_masks = len(model.mask_rules(*torch.zeros(2, 1, 1, dtype=torch.int64)))
        what = "with model.attn = 'sdpa' the attention mask and the tokens"
        hint = ", a larger parallelism.context_parallel_degree, or attn = 'flex', which needs no dense mask"
    tables = {"training": config.training, "validation": config.validation if config.validation.enable else None}
    for name, table in tables.items():
        if table is None:
            continue
        rows = rows_per_microbatch(config) if table is config.training else table.local_batch_size
        seq_len, total = table.seq_len, devices.memory_total_gib()
        queries = seq_len // config.parallelism.context_parallel_degree
        num_bytes = rows * seq_len * BYTES_PER_TOKEN + dense_mask_bytes(rows, queries, seq_len, num_masks, itemsize)
        if (needed := num_bytes / devices.GIB) > total:
            raise UserError(
                f"{name}.seq_len = {seq_len}: {what} of {name}.local_batch_size {rows} rows would take about "
                f"{needed:,.0f} GiB, and this device has {total:.0f}: use shorter rows or fewer of them{hint}"
            )


def _check_scores_fit(options: StepOptions, num_heads: int, cp: int) -> None:
    """Check that attention scores fit on a CPU, where flex attention is not compiled and holds many of them."""
    batch, seq_len = options.rows
    needed = flex_cpu_bytes(batch, num_heads, seq_len // cp, seq_len) / devices.GIB
    if needed > devices.memory_total_gib():
        raise UserError(
            f"model.attn = 'flex': on a CPU one layer's scores would take about {needed:.0f} GiB at "
            f"training.local_batch_size {batch}, training.seq_len {seq_len} and {num_heads} heads, and this machine "
            f'has {devices.memory_total_gib():.0f}: use attn = "sdpa", which computes the same with little memory, or '
            "a smaller batch"
        )
