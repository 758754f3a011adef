"""Options of a model's steps, read from the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan_graph.compiler import Extra, Look
from torchtitan_graph.config import JobConfig, job, run_folder
from torchtitan_graph.config.own import find_own_function, find_own_step
from torchtitan_graph.device import CudaRecorder, Recorders, Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.loss import Regularizers
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.moe import AuxiliaryLoss, ExpertTraining, MoE
from torchtitan_graph.parallel.dispatch import Exchange
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.parallel.schedule import SCHEDULES, Schedule, V, plan_pipeline
from torchtitan_graph.parallel.storage import AUTO, NONE, Precision, Reshard
from torchtitan_graph.passes.compile_regions import Regions
from torchtitan_graph.quantize.plan import plan_float8
from torchtitan_graph.quantize.state import Float8
from torchtitan_graph.steps.choices import (
    ELEMENTWISE,
    needed_regions,
    plan_extra,
    plan_offload,
    plan_regions,
    plan_saved,
)
from torchtitan_graph.steps.precompiled import Precompiled


class NamedStep(NamedTuple):
    """The user's step: the name that the user gives, and the function with its options."""

    name: str
    function: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a model's steps, apart from its layout.

    target           the device that the graphs are for
    rows, eval_rows  of a microbatch of training, and of evaluation if there is one: (number of rows, tokens per row)
    lengths          the numbers of tokens that a row of training may have, at most that of `rows`; None: one number
    mode             "graph", or "eager": FSDP2 and autograd, the reference
    offload          modules whose activations are in the host's memory till backward
    cpu_offload      parameters, gradients and the optimizer's state rest in the host's memory
    loss_chunks      parts of the rows that are projected to logits one after another
    own_loss         the user's loss, in place of cross entropy
    own_step         the user's step, in place of the forward pass and the loss
    regularizers     additions to cross entropy
    loss_parallel    under tensor parallelism logits stay sharded over the vocabulary for the loss
    async_tp         tensor parallelism's products overlap its communication
    disabled         passes to leave out, by name
    extra            passes of the user's
    verify           check every pass on real numbers
    trace_every_block  trace alike blocks too, each of them
    dump_to          folder for the readable graph after each pass
    dump_only        the passes after which, by name, if not after each
    look             called with the graph after each pass, as `Inspection.look`
    seed             of the numbers for verifying passes
    mtp_weight       weight of the loss of the layers that predict more tokens
    pipeline         the schedule of its stages, where there are any
    num_replicas     replica groups of the job, 1 without: `num_microbatches` are those of all together
    sums_over_replicas  whether the replica groups sum the gradients of each step
    fewer            schedules of fewer microbatches, by their number, where replicas that live divide them
    exchange         how tokens are exchanged for experts, besides by machine or not
    once             the parameters that a whole model's step gathers, and whose gradients it reduces, once: NONE,
                     EXPERTS, ALL, or AUTO: as memory allows
    pairs            a whole model's step runs a microbatch's backward alongside the next one's forward; AUTO: if that
                     takes less time by the estimate, as memory allows
    precompiled      folder of rewritten graphs to read instead of tracing
    budget_gib       a rank's memory limit in all, in place of the fraction of `recompute.budget`
    picture          file for the drawing of the memory budget's curve
    recorders        record the training step for replays, as CUDA graphs
    float8           the layers that multiply in float8, if any
    fused            classes of modules that one operator replaces, see elementwise.py
    optimizer        what steps, and so what is held at rest
    """

    target: Target
    rows: tuple[int, int]
    eval_rows: tuple[int, int] | None = None
    lengths: range | None = None
    mode: str = "graph"
    num_microbatches: int = 1
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    reshard: Reshard = Reshard()
    experts: ExpertTraining = ExpertTraining()
    regions: Regions = dataclasses.field(default_factory=dict)
    offload: Sequence[str] = ()
    cpu_offload: bool = False
    loss_chunks: int = 1
    own_loss: Callable[..., Any] | None = None
    own_step: NamedStep | None = None
    regularizers: Regularizers = Regularizers()
    loss_parallel: bool = True
    async_tp: bool = False
    disabled: Sequence[str] = ()
    extra: Sequence[Extra] = ()
    verify: bool = False
    trace_every_block: bool = False
    dump_to: Path | None = None
    dump_only: Sequence[str] = ()
    look: Look | None = None
    seed: int = 0
    mtp_weight: float = 0.3
    pipeline: Schedule | None = None
    num_replicas: int = 1
    sums_over_replicas: bool = False
    fewer: Mapping[int, Schedule] = dataclasses.field(default_factory=dict)
    exchange: Exchange = Exchange()
    once: str = NONE
    pairs: bool | str = False
    precompiled: Precompiled | None = None
    budget_gib: float | None = None
    picture: Path | None = None
    recorders: Recorders | None = None
    float8: Float8 | None = None
    fused: tuple[type[nn.Module], ...] = ()
    optimizer: job.Optimizer = dataclasses.field(default_factory=job.Optimizer)

    @property
    def is_cut(self) -> bool:
        """Whether a whole model's step is cut into parts, which its microbatches share or which run side by side."""
        return self.once != NONE or self.pairs is not False


def lengths_of_rows(config: JobConfig, attn: str, target: Target) -> range | None:
    """Return the numbers of tokens that the rows of a training batch may have, None where there is one.

    Raises:
        UserError: an older torch, whose traces of attention's backward are of one length; or flex attention on a
            device where it is compiled, for one length.
    """
    training = config.training
    in_graph = training.dynamic_seq_len and config.compile.mode == "graph"
    if in_graph and torch.__version__ < "2.13":
        raise UserError(
            f"training.dynamic_seq_len = true: a graph for several lengths needs torch 2.13 or newer, and this is "
            f"{torch.__version__}; use compile.mode = eager, or set it to false"
        )
    if in_graph and attn == "flex" and needed_regions(target.device):
        raise UserError(
            f"model.attn = 'flex': not with training.dynamic_seq_len on {target.device.type}, where a graph's flex"
            " attention is compiled, for one length; use sdpa or compile.mode = eager, or set that to false"
        )
    return range(job.ROW_MULTIPLE, training.seq_len + 1, job.ROW_MULTIPLE) if training.dynamic_seq_len else None


def rows_per_microbatch(config: JobConfig) -> int:
    """Return the rows that a rank, or in a pipeline a stage, computes at a time."""
    of_stage = config.parallelism.pipeline_parallel_microbatch_size
    return of_stage if config.parallelism.pipeline_parallel_degree > 1 else config.training.local_batch_size


def step_options(config: JobConfig, model: Decoder, num_microbatches: int, target: Target) -> StepOptions:
    """Return the step options of a configuration.

    Raises:
        UserError: CUDA graphs on a CPU, a loss of experts for a model without them, regions to compile or modules to
            save, compute again or offload that it does not have, stages that can't be made of it, layers that can't
            multiply in float8, or a pass of the user's that can't be run.
    """
    training, validation, moe = config.training, config.validation, config.moe
    checkpoint, graphs = config.activation_checkpoint, run_folder(config) / "graphs"
    if not any(hasattr(m, "auxiliary_loss") for m in model.modules()) and (moe.load_balance_loss or moe.router_z_loss):
        what = "has no experts"
        if model.conversion is not None:
            what = f"({model.conversion.model_name}) has no experts, or transformers has no loss of them"
        raise UserError(
            f"moe.load_balance_loss = {moe.load_balance_loss}, moe.router_z_loss = {moe.router_z_loss}: "
            f"{' '.join(filter(None, (config.model.name, config.model.flavor)))} {what}; leave them at 0"
        )
    if moe.early_scores:
        _check_early_scores(config, model)
    _check_exchange(config, model)
    pipeline = _pipeline(config, model, num_microbatches)
    auxiliary = AuxiliaryLoss(moe.load_balance_loss, moe.load_balance_over == "sequence", moe.router_z_loss)
    return StepOptions(
        target=target,
        rows=(rows_per_microbatch(config), training.seq_len),
        lengths=lengths_of_rows(config, model.attn, target),
        eval_rows=(validation.local_batch_size, validation.seq_len) if validation.enable else None,
        mode=config.compile.mode,
        num_microbatches=num_microbatches,
        precision=Precision(
            storage=getattr(torch, training.dtype), compute=getattr(torch, training.mixed_precision_param)
        ),
        recompute=_recompute(checkpoint, model),
        budget_gib=checkpoint.memory_budget_gib if checkpoint.mode == "memory_budget" else None,
        picture=graphs / "memory_budget_pareto.svg" if checkpoint.visualize_memory_budget_pareto else None,
        reshard=Reshard.from_option(config.parallelism.fsdp_reshard_after_forward),
        experts=ExpertTraining(
            auxiliary if moe.load_balance_loss or moe.router_z_loss else None,
            moe.bias_update_speed,
            config.debug.moe_force_load_balance,
            moe.early_scores,
        ),
        regions=plan_regions(config.compile, model, target.device),
        loss_chunks=training.loss_chunks,
        own_loss=None if config.loss.name == "cross_entropy" else find_own_function("loss.name", config.loss.name, 3),
        own_step=own_step(training),
        regularizers=Regularizers(config.loss.label_smoothing, config.loss.z_loss),
        loss_parallel=not config.parallelism.disable_loss_parallel,
        async_tp=config.parallelism.enable_async_tensor_parallel,
        disabled=config.compile.disable_passes,
        extra=plan_extra(config.compile) if config.compile.mode == "graph" else [],
        verify=config.debug.verify_passes,
        dump_to=graphs if config.debug.dump_graphs else None,
        seed=config.debug.seed or 0,
        mtp_weight=training.mtp_loss_weight,
        offload=_offload(config, model, pipeline, target),
        cpu_offload=_cpu_offload(config, target),
        pipeline=pipeline,
        num_replicas=num_replicas(config),
        sums_over_replicas=num_replicas(config) > 1 and config.fault_tolerance.semi_sync_method is None,
        fewer=_fewer(config, model, num_microbatches) if pipeline is not None else {},
        exchange=Exchange(
            exact=config.parallelism.exchange_sums == "exact", float8=config.parallelism.exchange_dtype == "float8"
        ),
        **_shared(config, num_microbatches // num_replicas(config)),
        recorders=_recorders(config, target),
        float8=plan_float8(config, model, target),
        fused=_fused(config),
        optimizer=config.optimizer,
    )


def _check_early_scores(config: JobConfig, model: Decoder) -> None:
    """Check that a model's scores can multiply what the experts' last product reads."""
    option, name = "moe.early_scores = true", " ".join(filter(None, (config.model.name, config.model.flavor)))
    found = [module.config for module in model.modules() if isinstance(module, MoE)]
    if not found:
        why = "has no experts of this package's"
    elif found[0].score_input:
        why = "multiplies what the experts' first products read already"
    elif found[0].biased:
        why = "adds a bias after the experts' last product, which the scores multiply too"
    else:
        return
    raise UserError(f"{option}: {name} {why}; set it to false")


def _check_exchange(config: JobConfig, model: Decoder) -> None:
    """Check that a model's experts can exchange tokens as asked."""
    parallelism = config.parallelism
    if any(isinstance(module, MoE) for module in model.modules()):
        return
    for key, plain in (("expert_exchange", "direct"), ("exchange_dtype", "model"), ("exchange_sums", "exact")):
        if (value := getattr(parallelism, key)) != plain:
            name = " ".join(filter(None, (config.model.name, config.model.flavor)))
            raise UserError(
                f"parallelism.{key} = {value!r}: {name} has no experts of this package's, which alone exchange tokens"
                f" so; set it to {plain}"
            )


def own_step(training: job.Training) -> NamedStep | None:
    """Return the step of `training.step`, None without one."""
    if training.step is None:
        return None
    return NamedStep(training.step, find_own_step(training.step, training.step_options))


def _fused(config: JobConfig) -> tuple[type[nn.Module], ...]:
    assert config.model.elementwise != "auto", "`choose_model` returns the resolved table"
    names = {"torch": (), "rope": ("rope",), "fused": tuple(ELEMENTWISE)}[config.model.elementwise]
    return tuple(ELEMENTWISE[name] for name in names if name not in config.compile.fusions)


def _offload(config: JobConfig, model: Decoder, pipeline: Schedule | None, target: Target) -> Sequence[str]:
    stages = pipeline.stages if pipeline is not None else [list(model.blocks)]
    last = {next((name for name in reversed(stage) if name in model.blocks), "") for stage in stages}
    modules = plan_offload(config.activation_checkpoint.offload, model, model.blocks, last)
    if modules and not target.is_gpu:
        logger.info("activation_checkpoint.offload: a CPU's memory is the host's, so nothing is moved")
        return ()
    return modules


def _cpu_offload(config: JobConfig, target: Target) -> bool:
    if config.training.enable_cpu_offload and not target.is_gpu:
        logger.info("training.enable_cpu_offload: a CPU's memory is the host's, so nothing is moved")
        return False
    return config.training.enable_cpu_offload


def _recompute(options: job.ActivationCheckpoint, model: Decoder) -> Recompute:
    if options.mode == "memory_budget":
        chosen = Recompute(budget=Budget(options.memory_budget))
    else:
        chosen = Recompute.from_option(options.mode, options.selective_ac_option)
    saved, again = plan_saved(options.save, options.recompute, model, model.blocks)
    return dataclasses.replace(chosen, saved=saved, again=again)


def _recorders(config: JobConfig, target: Target) -> Recorders | None:
    if not config.compile.cuda_graphs:
        return None
    if not target.is_gpu:
        raise UserError("compile.cuda_graphs = true: needs a GPU, and this process computes on cpu; set it to false")
    return Recorders(CudaRecorder) if target.runs else None


def _shared(config: JobConfig, num_microbatches: int) -> dict[str, Any]:
    """Return what the microbatches of a whole model share, as options."""
    once, pairs = config.parallelism.fsdp_once_a_step, config.parallelism.overlap_microbatches
    if config.parallelism.pipeline_parallel_degree > 1:
        return {}  # a pipeline's schedule has the pairs
    if num_microbatches == 1 and (once not in (NONE, AUTO) or pairs is True):
        logger.warning(
            f"parallelism.fsdp_once_a_step = {once}, overlap_microbatches = {str(pairs).lower()}: a step has one"
            " microbatch, so nothing changes; raise training.global_batch_size for more"
        )
    if num_microbatches == 1:
        return {}
    return {"once": once, "pairs": pairs}


def _fewer(config: JobConfig, model: Decoder, num_microbatches: int) -> dict[int, Schedule]:
    """Return the schedules of what a replica takes while several live."""
    living = range(2, num_replicas(config) + 1)
    numbers = {len(range(place, num_microbatches, n)) for n in living for place in range(n)}
    found = {}
    for number in sorted(numbers):
        try:
            found[number] = _pipeline(config, model, number)
        except UserError as error:
            raise UserError(
                f"fault_tolerance.replicas = {num_replicas(config)}: of a step's {num_microbatches} microbatches a"
                f" replica takes {number} while some live: {error}"
            ) from error
    return {number: schedule for number, schedule in found.items() if schedule is not None}


def num_replicas(config: JobConfig) -> int:
    """Return the number of replica groups of a job."""
    return config.fault_tolerance.replicas if config.fault_tolerance.enable else 1


def _pipeline(config: JobConfig, model: Decoder, num_microbatches: int) -> Schedule | None:
    options = config.parallelism
    if options.pipeline_parallel_degree == 1:
        return None
    most_deferred = options.pipeline_parallel_deferred_weights
    puts_off = SCHEDULES[options.pipeline_parallel_schedule] == V and options.pipeline_parallel_schedule_csv is None
    if most_deferred is None and puts_off and config.activation_checkpoint.mode != "none":
        most_deferred = 2
    return plan_pipeline(options, model.modules_in_order, num_microbatches, most_deferred)
