"""How a run computes its training and evaluation steps: as graphs that passes edit, or eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_graph import device as devices
from torchtitan_graph.compiler import Inspection, passes, plan_regions, run_passes
from torchtitan_graph.config import JobConfig
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.flops import Flops, count_flops
from torchtitan_graph.graph.step import (
    bind_train_step,
    make_eager_step,
    make_eval_step,
    trace_eval_step,
    trace_train_step,
)
from torchtitan_graph.graph.trace import TracedResult, run_traced
from torchtitan_graph.log import logger
from torchtitan_graph.loss import cross_entropy, loss_context
from torchtitan_graph.models.layers.attention import flex_cpu_bytes
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.masks import dense_mask_bytes
from torchtitan_graph.parallel.mesh import ParallelDims, data_parallel_rank
from torchtitan_graph.parallel.parallelize import check_plan, parallelize
from torchtitan_graph.parallel.recompute import Recompute, recompute_eager
from torchtitan_graph.parallel.storage import (
    Precision,
    Storage,
    buckets,
    cast_parameters,
    materialize,
    plan_storage,
    shard_eager,
)

Step = Callable[..., Any]  # (batch, masks, num_tokens) -> StepOutput; of the evaluation step, this rank's loss


class Steps(NamedTuple):
    """What a run computes with. They are called in `StepBuilder.loss_context`.

    evaluate  None without validation
    flops     the arithmetic of the training step; None in eager mode, where there is no graph to count it on
    """

    train: Step
    evaluate: Step | None
    flops: Flops | None


def check_masks_fit(config: JobConfig, model: Decoder, itemsize: int) -> None:
    """Refuse rows whose dense masks can't fit into this device's memory."""
    num_masks = len(model.mask_rules(*torch.zeros(2, 1, 1, dtype=torch.int64)))
    tables = {"training": config.training, "validation": config.validation if config.validation.enable else None}
    for name, table in tables.items():
        if table is None:
            continue
        needed = dense_mask_bytes(table.local_batch_size, table.seq_len, num_masks, itemsize) / devices.GIB
        if needed > devices.memory_total_gib():
            raise UserError(
                f"{name}.seq_len = {table.seq_len}: with model.attn = 'sdpa' the attention mask of {name}."
                f"local_batch_size {table.local_batch_size} rows would take about {needed:,.0f} GiB, and this device "
                f"has {devices.memory_total_gib():.0f}: use shorter rows or fewer of them"
                + (", or attn = 'flex', which needs no dense mask on a GPU" if devices.device_type() == "cuda" else "")
            )


class StepBuilder:
    """All that the configuration says of how a step is computed.

    Raises:
        UserError: the model can't be laid out, compiled or computed in this way.
    """

    def __init__(
        self, config: JobConfig, model: Decoder, plan: Mapping[str, str], dims: ParallelDims, device: torch.device
    ):
        self.config = config
        self.model = model
        self.plan = plan
        self.dims = dims
        self.device = device
        training, parallelism = config.training, config.parallelism
        self.precision = Precision(
            storage=getattr(torch, training.dtype),
            compute=getattr(torch, training.mixed_precision_param),
            reduce=getattr(torch, training.mixed_precision_reduce),
        )
        self.recompute = Recompute.from_option(
            config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option
        )
        # "default" leaves the root's weights (embedding, output) gathered, as FSDP2 does: backward begins with them.
        self.reshard = parallelism.fsdp_reshard_after_forward != "never"
        self.reshard_root = parallelism.fsdp_reshard_after_forward == "always"
        self.loss_parallel = dims.tp > 1 and not parallelism.disable_loss_parallel
        self.loss_context = loss_context(self.loss_parallel)
        check_plan(model, plan, dims.tp)
        self._check_memory()
        self.regions = plan_regions(config.compile, model, device)

    def _check_memory(self) -> None:
        """Refuse masks, and uncompiled flex attention on a CPU, where they can't fit; a dry run allocates none."""
        config = self.config
        if config.comm.mode != "fake_backend" and config.model.attn == "sdpa":
            check_masks_fit(config, self.model, self.precision.compute.itemsize)
        if config.model.attn != "flex" or self.device.type != "cpu" or config.comm.mode == "fake_backend":
            return
        heads = self.model.config.num_heads // self.dims.tp
        needed = flex_cpu_bytes(config.training.local_batch_size, heads, config.training.seq_len) / devices.GIB
        if needed > devices.memory_total_gib():
            raise UserError(
                f"model.attn = 'flex': on a CPU one layer's scores would take about {needed:.0f} GiB at "
                f"training.local_batch_size {config.training.local_batch_size}, training.seq_len "
                f"{config.training.seq_len} and {heads} heads, and this machine has "
                f'{devices.memory_total_gib():.0f}: use attn = "sdpa", which computes the same with little memory, '
                "or a smaller batch"
            )

    def build(self, mesh: DeviceMesh) -> Steps:
        """Lay the model out on `mesh`, allocate its parameters, and build its steps."""
        return self._build_as_graphs(mesh) if self.config.compile.mode == "graph" else self._build_eagerly(mesh)

    def _build_as_graphs(self, mesh: DeviceMesh) -> Steps:
        """Trace in the compute layout on meta, run the passes, and only then allocate."""
        traced, evaluated, storages, flops = self.build_graphs(mesh)
        materialize(self.model, storages, self.device)
        evaluate = run_traced(evaluated, module=self.model) if evaluated is not None else None
        return Steps(bind_train_step(traced, self.model), evaluate, flops)

    def build_graphs(self, mesh: DeviceMesh) -> tuple[TracedResult, TracedResult | None, dict[str, Storage], Flops]:
        """Trace the training step, and the evaluation step if there is validation, and run the passes on both.

        Nothing is allocated: this is also all of a dry run.
        """
        config, begin = self.config, time.perf_counter()
        parallelize(self.model, self.plan, mesh, loss_parallel=self.loss_parallel)
        cast_parameters(self.model, self.precision.compute)
        storages = plan_storage(self.model, mesh, self.precision)
        dp_rank = data_parallel_rank(mesh)
        example = self._example(config.training.local_batch_size, config.training.seq_len, dp_rank)
        evaluated = None
        with self.loss_context():
            traced = trace_train_step(
                self.model, cross_entropy, *example, device=self.device, stack_traces=config.debug.stack_traces
            )
            if config.validation.enable:
                other = self._example(config.validation.local_batch_size, config.validation.seq_len, dp_rank)
                evaluated = trace_eval_step(self.model, cross_entropy, *other, device=self.device)
        logger.info(f"traced in {time.perf_counter() - begin:.1f} s, {len(traced.gm.graph.nodes)} nodes")
        flops = count_flops(traced.gm)
        dumped = Path(config.job.dump_folder, "graphs") if config.debug.dump_graphs and dist.get_rank() == 0 else None
        watch = Inspection(
            dump_to=dumped,
            verify_on=torch.utils._pytree.tree_leaves(example) if config.debug.verify_passes else None,
        )
        ordered = passes(storages, buckets(self.model), self.recompute, self.reshard, self.reshard_root, self.regions)
        disabled = config.compile.disable_passes
        run_passes(traced.gm, ordered, disabled, self.device, watch)
        if evaluated is not None:
            run_passes(evaluated.gm, ordered, disabled, self.device, Inspection("evaluation step"))
        cast_parameters(self.model, self.precision.storage)
        return traced, evaluated, storages, flops

    def _example(self, batch_size: int, seq_len: int, dp_rank: int) -> tuple[Batch, Any, Tensor]:
        """Make inputs of the shapes to trace: random tokens if passes are to be verified on them, else on meta."""
        device = self.device if self.config.debug.verify_passes else torch.device("meta")
        generator = torch.Generator().manual_seed((self.config.debug.seed or 0) + dp_rank)
        tokens, labels = torch.randint(self.model.config.vocab_size, (2, batch_size, seq_len), generator=generator)
        documents = (torch.rand(batch_size, seq_len, generator=generator) < 0.01).long().cumsum(1)
        positions = torch.arange(seq_len).expand(batch_size, seq_len).contiguous()
        if dp_rank > 0:
            labels.fill_(IGNORE_INDEX)  # `verify_pass` wants the targets of one rank
        batch = Batch(*(x.to(device) for x in (tokens, labels, positions, documents)))
        num_tokens = torch.tensor(batch_size * seq_len * self.dims.dp, device=device)
        return batch, self.model.masks(batch.documents_BL, batch.positions_BL), num_tokens

    def _build_eagerly(self, mesh: DeviceMesh) -> Steps:
        """Apply FSDP2 and autograd: the reference."""
        parallelize(self.model, self.plan, mesh, loss_parallel=self.loss_parallel)
        recompute_eager(self.model, self.recompute)
        shard_eager(
            self.model,
            mesh,
            self.precision,
            reshard_after_forward=self.reshard,
            device=self.device,
            reshard_root=self.reshard_root,
        )
        return Steps(make_eager_step(self.model, cross_entropy), make_eval_step(self.model, cross_entropy), None)
