"""Build the line from text to trained parameters, and run it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from torchtitan_graph import device as devices
from torchtitan_graph import stop
from torchtitan_graph.checkpoint import Checkpointer, SaveError
from torchtitan_graph.config import JobConfig, dump_toml, job, shard_degree
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.data.loader import DataLoader, build_dataloader, merge_states
from torchtitan_graph.data.open_corpus import validation_corpus
from torchtitan_graph.data.tokenizer import Tokenizer, find_assets, load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.torch_private import set_timeout
from torchtitan_graph.log import logger
from torchtitan_graph.metrics import (
    Metrics,
    check_profiling,
    check_wandb,
    maybe_profile,
    model_table,
    out_of_memory,
)
from torchtitan_graph.models.hf import choose_model, load_weights, save_weights
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.layers.moe import AuxiliaryLoss, MoE, move_correction_biases
from torchtitan_graph.optim import (
    build_lr_scheduler,
    build_optimizer,
    check_optimizer,
    clip_grad_norm,
    forget_rehearsal,
)
from torchtitan_graph.parallel.mesh import ParallelDims, axis_degree, data_parallel_rank
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.hang import HangWatch
from torchtitan_graph.steps import StepBuilder


class Trainer:
    """One process of a training job.

    Building it before the process group exists checks what can be checked without one; `setup` does the rest.
    """

    def __init__(self, config: JobConfig, world_size: int):
        self.config = config
        check_wandb(config.metrics.enable_wandb)
        check_profiling(config.profiling)
        self.device = devices.device()
        self.seed = config.debug.seed or 0
        parallelism = config.parallelism
        self.dims = ParallelDims(
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=shard_degree(config, world_size),
            tp=parallelism.tensor_parallel_degree,
        )
        training = config.training
        self.rows_per_step = training.global_batch_size
        if self.rows_per_step == -1:
            self.rows_per_step = training.local_batch_size * self.dims.dp
        self.num_microbatches = self.rows_per_step // (training.local_batch_size * self.dims.dp)
        self.tokenizer: Tokenizer = load_tokenizer(config.model.hf_assets_path)
        self.assets = find_assets(config.model.hf_assets_path) if config.model.hf_assets_path else None
        self.family, self.model = choose_model(config, self.assets, self.tokenizer.vocab_size)
        self.builder = StepBuilder(config, self.model, self.family.PLAN, self.dims, self.device)
        check_optimizer(self.model, config.optimizer)
        self.experts = [module for module in self.model.modules() if isinstance(module, MoE)]
        for module in self.experts:
            module.router.forced_balance = config.debug.moe_force_load_balance
        if not self.experts and (config.moe.load_balance_loss or config.moe.router_z_loss):
            raise UserError(
                f"moe.load_balance_loss = {config.moe.load_balance_loss}, moe.router_z_loss = "
                f"{config.moe.router_z_loss}: {config.model.name} {config.model.flavor} has no experts; leave them at 0"
            )
        self.dump_folder = Path(config.job.dump_folder)
        self.step = self.tokens_seen = 0
        self.stop_signal = 0  # the signal that asked a rank to stop; the same on all ranks
        self.tokens_by_source: dict[str, int] = {}
        self.own_data_s = 0.0  # of this step, how long this rank waited for its own data

    def setup(self) -> None:
        """Build the mesh, the step and the state; the process group is there."""
        with self._report_when_out_of_memory():
            self._setup()

    def _setup(self) -> None:
        config = self.config
        self._join_mesh()
        training = config.training
        corpus = dict(dataset=training.dataset, dataset_path=training.dataset_path, sources=training.sources)
        self.train_data = self._open_data(training, corpus | {"split": "train"}, training.repeat)
        if config.validation.enable:  # opened now, so that what is wrong with it is said before any step
            corpus = validation_corpus(config)
            self.validation_data = self._open_data(config.validation, corpus, repeat=bool(corpus["sources"]))
        num_parameters = sum(p.numel() for p in self.model.parameters())
        flavor = config.model.flavor or "as in config.json"
        logger.info(
            f"{config.model.name} {flavor}: {num_parameters:,} parameters, {config.compile.mode} mode, "
            f"mesh {dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))}, "
            f"{self.num_microbatches} x {config.training.local_batch_size} rows of {config.training.seq_len} tokens "
            f"per rank and step"
        )
        self.model_table = model_table(self.model, self.family.PLAN, self.builder.precision.storage)
        self.steps = self.builder.build(self.mesh)
        initialize(self.model, self.seed)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.lr_scheduler = build_lr_scheduler(self.optimizer, config.lr_scheduler, config.training.steps)
        self.checkpointer = Checkpointer(
            self.dump_folder / config.checkpoint.folder,
            config.checkpoint,
            self.model,
            self.optimizer,
            self.lr_scheduler,
            dump_toml(config),
        )
        self._resume()

    def _join_mesh(self) -> None:
        """Build the mesh, and tell what needs its groups."""
        self.rank = dist.get_rank()
        self.mesh = self.dims.mesh(self.device.type)
        self.dp_rank = data_parallel_rank(self.mesh)
        moe = self.config.moe
        if moe.load_balance_loss or moe.router_z_loss:
            axes = [axis for axis in ("dp_shard", "dp_replicate") if axis_degree(self.mesh, axis) > 1]
            loss = AuxiliaryLoss(
                moe.load_balance_loss,
                moe.load_balance_over == "sequence",
                moe.router_z_loss,
                self.num_microbatches * self.dims.dp,
                tuple(self.mesh.get_group(axis).group_name for axis in axes),
            )
            for module in self.experts:
                module.auxiliary_loss = loss

    def setup_dry(self) -> None:
        """Build the mesh and the graphs, on a fake process group."""
        self._join_mesh()
        self.builder.build_graphs(self.mesh)

    def _open_data(self, table: job.Training | job.Validation, corpus: dict[str, Any], repeat: bool) -> DataLoader:
        return build_dataloader(
            **corpus,
            tokenizer=self.tokenizer,
            seq_len=table.seq_len,
            local_batch_size=table.local_batch_size,
            dp_rank=self.dp_rank,
            dp_degree=self.dims.dp,
            seed=self.seed,
            repeat=repeat,
            num_workers=table.dataloader.num_workers,
            persistent_workers=table.dataloader.persistent_workers,
            pin_memory=table.dataloader.pin_memory,
            prefetch_factor=table.dataloader.prefetch_factor,
        )

    def save_seed(self) -> None:
        """Save the state before the first step, for runs in any layout to begin with."""
        with self.checkpointer:
            self.checkpointer.save(0, self._train_state())
        logger.info(f"a run with job.dump_folder = {self.config.job.dump_folder!r} begins with this seed")

    def train(self, run: RunFolder) -> None:
        """Train from where the newest checkpoint ends to `training.steps`, to the end of the data, or to a signal.

        `stop_signal` says afterwards whether it was a signal, and then a checkpoint is there to go on from.
        """
        with self._report_when_out_of_memory():
            self._train(run)

    @contextmanager
    def _report_when_out_of_memory(self) -> Iterator[None]:
        """Log what held the memory, should it run out inside."""
        try:
            yield
        except Exception as error:
            if out_of_memory.is_out_of_memory(error):
                doing = f"rank {dist.get_rank()}, after {self.step} steps"
                optimizer = getattr(self, "optimizer", None)  # not there early in set-up
                logger.error(out_of_memory.report(error, doing, self.model, optimizer, self.config))
            raise

    def _train(self, run: RunFolder) -> None:
        config = self.config
        peak = devices.peak_flops()
        gc.disable()  # ranks that collect at different moments wait for each other
        with (
            Metrics(
                config,
                self.dump_folder,
                rank=self.rank,
                total_steps=config.training.steps,
                start_step=self.step,
                tokens_seen=self.tokens_seen,
                flops_per_step=None,
                peak_flops=peak,
                model_table=self.model_table,
            ) as metrics,
            maybe_profile(config.profiling, self.dump_folder, self.rank, self.step) as profiler,
            self.checkpointer,
            HangWatch(config.comm, self.dump_folder, self.rank) as hang,
        ):
            first = self.step + 1
            run.resume(self.step)
            while self.step < config.training.steps:
                metrics.start_step()
                with hang.watch(first=self.step < first):
                    trained = self.train_step(metrics)
                if not trained:
                    logger.info(f"the data is used up after step {self.step}")
                    metrics.log_pending()
                last = not trained or self.step == config.training.steps
                run.done(self.step, metrics.loss)
                if self.step == first:
                    self._shorten_timeouts()
                if self.step % config.training.gc_freq == 0:
                    gc.collect(1)
                if config.validation.enable and (last or self.step % config.validation.freq == 0):
                    with run.during("validation"):
                        metrics.log_validation(self.step, self.validate())
                if last:
                    self.stop_signal = 0  # there is nothing left to stop
                with run.during("checkpoint"):
                    if last and config.checkpoint.last_save_in_hf:
                        self._save_in_hugging_face_format()
                    if self.stop_signal:
                        self.checkpointer.save(self.step, self._train_state())
                    else:
                        self.checkpointer.maybe_save(self.step, self._train_state, last=last)
                profiler.step()
                if last or self.stop_signal:
                    break
        gc.enable()

    def train_step(self, metrics: Metrics) -> bool:
        """Do one optimizer step: batches -> loss, gradients -> clip -> optimizer. False if the data is used up."""
        begin = time.perf_counter()
        self.own_data_s = 0.0
        microbatches, num_tokens = self._next_step()
        data_loading_s = time.perf_counter() - begin
        if not microbatches:
            return False
        local_loss = torch.zeros((), device=self.device)
        loads: dict[str, Tensor] = {}
        with metrics.watch_work(self.step + 1):
            for batch in microbatches:
                masks = self.model.masks(batch.documents_BL, batch.positions_BL)
                with self.builder.loss_context():
                    output = self.steps.train(batch, masks, num_tokens)
                local_loss += output.loss
                loads = {name: loads.get(name, 0) + load_E for name, load_E in output.loads.items()}
        grad_norm = clip_grad_norm(self.model.parameters(), self.config.training.max_norm)
        loss = self._sum_if_finite(local_loss, grad_norm)
        lr = self.lr_scheduler.get_last_lr()[0]
        metrics.maybe_log_histograms(self.step + 1, self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        loads = self._balance_experts(loads)
        self.step += 1
        self.tokens_seen += int(num_tokens)
        self._count_sources()
        metrics.flops_per_step = self._flops(microbatches)
        metrics.end_step(
            self.step,
            loss=loss,
            grad_norm=float(grad_norm),
            lr=float(lr),
            tokens_seen=self.tokens_seen,
            data_loading_s=data_loading_s,
            expert_loads=loads,
            own_data_s=self.own_data_s,
            tokens_by_source=self.tokens_by_source,
        )
        return True

    def _balance_experts(self, loads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the experts' correction biases by the loads that all data-parallel ranks saw in this step. Return these,
        by layer."""
        if loads:
            summed = self._sum_over_data_parallel(torch.stack(list(loads.values())))
            loads = dict(zip(loads, summed, strict=True))
            move_correction_biases(self.model, loads, self.config.moe.bias_update_speed)
        return loads

    def _count_sources(self) -> None:
        """Add the step's targets of all ranks to each source's, where the data is a mixture."""
        names = self.train_data.source_names
        if len(names) > 1:
            counts = self._sum_over_data_parallel(self.train_data.take_targets().to(self.device)).tolist()
            before = self.tokens_by_source
            self.tokens_by_source = {name: before.get(name, 0) + n for name, n in zip(names, counts, strict=True)}

    def _next_step(self) -> tuple[list[Batch], Tensor]:
        """Take the microbatches of the next step that has targets, and count those of all ranks; none at the end."""
        empty_rows = 0
        while empty_rows < self.train_data.num_lanes:
            begin = time.perf_counter()
            microbatches = [next(self.train_data) for _ in range(self.num_microbatches)]
            self.own_data_s += time.perf_counter() - begin
            num_tokens = self._count_targets(microbatches)
            if num_tokens > 0:
                return [self._to_device(batch) for batch in microbatches], num_tokens
            empty_rows += self.rows_per_step
        return [], torch.zeros(())

    def _count_targets(self, microbatches: list[Batch]) -> Tensor:
        """Count the targets of all ranks: the one denominator, known before the first microbatch."""
        count = sum((batch.labels_BL != IGNORE_INDEX).sum() for batch in microbatches)
        return self._sum_over_data_parallel(count.to(self.device))  # type: ignore[union-attr]

    def _sum_over_data_parallel(self, x: Tensor) -> Tensor:
        for axis in ("dp_shard", "dp_replicate"):
            if axis in (self.mesh.mesh_dim_names or ()):
                dist.all_reduce(x, group=self.mesh.get_group(axis))
        return x

    def _to_device(self, batch: Batch) -> Batch:
        return Batch(*(x.to(self.device, non_blocking=True) for x in batch))

    def _sum_if_finite(self, loss: Tensor, grad_norm: Tensor) -> float:
        """Give the loss of all ranks; stop before the optimizer touches a parameter if it or the norm is not finite.

        What a rank has to tell travels along: a signal, so that all stop after the same step, and news of its saves.
        """
        news = loss.new_tensor([self.checkpointer.news(), stop.received()])
        gathered = loss.new_empty(dist.get_world_size(), 3)
        dist.all_gather(list(gathered.unbind()), torch.cat([loss[None], news]))
        by_rank, of_saves, signals = gathered.T.tolist()
        self.stop_signal = int(max(signals))
        self.checkpointer.hear([int(x) for x in of_saves])
        if all(map(math.isfinite, by_rank)) and math.isfinite(float(grad_norm)):
            return math.fsum(by_rank) / self.dims.tp
        local = torch.tensor([not all(p.grad.to_local().isfinite().all() for p in self.model.parameters())])  # type: ignore[union-attr]
        found = [torch.zeros_like(local) for _ in by_rank]
        dist.all_gather(found, local)
        ranks = [r for r, x in enumerate(by_rank) if not math.isfinite(x)]
        gradients = [r for r, x in enumerate(found) if x.item()]
        raise NonFiniteError(
            f"step {self.step + 1}: the loss is not finite on ranks {ranks or 'none'}, the gradient norm is "
            f"{float(grad_norm)}, with non-finite gradients at rest on ranks {gradients or 'none'}; no parameter was "
            "touched. Resume from the last checkpoint with a lower optimizer.lr or longer lr_scheduler.warmup_steps, "
            "and look at the step's data"
        )

    def _flops(self, microbatches: list[Batch]) -> float | None:
        if self.steps.flops is None or self.device.type == "cpu":
            return None
        visible = (self.model.visible_pairs(batch.documents_BL, batch.positions_BL) for batch in microbatches)
        return sum(map(self.steps.flops.of, visible))

    @torch.no_grad()
    def validate(self) -> float:
        """Give the mean loss per target of the validation split, or of its first `validation.steps` microbatches."""
        data, config = self.validation_data.rewind(), self.config.validation
        loss_sum, num_targets, empty_rows, taken = 0.0, 0, 0, 0
        while empty_rows < data.num_lanes and taken != config.steps:
            batch = next(data)
            count = int(self._count_targets([batch]))
            taken += 1
            empty_rows = 0 if count else empty_rows + config.local_batch_size * self.dims.dp
            if count:
                batch = self._to_device(batch)
                one = torch.ones((), dtype=torch.int64, device=self.device)
                assert self.steps.evaluate is not None, "built when validation is enabled"
                masks = self.model.masks(batch.documents_BL, batch.positions_BL)
                with self.builder.loss_context():
                    loss = self.steps.evaluate(batch, masks, one)
                loss_sum += float(self._sum_over_data_parallel(loss.double()))
                num_targets += count
        if num_targets == 0:
            raise UserError("validation.dataset: its validation split holds no document with a target")
        return loss_sum / num_targets

    def _resume(self) -> None:
        state = self.checkpointer.load(self.config.training.steps)
        if not self.checkpointer.loaded_optimizer:
            forget_rehearsal(self.optimizer)
        if state is not None:
            try:
                self._load_train_state(state)
            except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
                raise UserError(f"the checkpoint's train_state.json can't be used: {error!r}") from error
            logger.info(f"resuming after step {self.step}")
            if self.step >= self.config.training.steps:
                logger.info(f"training.steps = {self.config.training.steps}: there is no step left to do")
        elif self.config.checkpoint.initial_load_in_hf:
            path = Path(self.config.checkpoint.initial_load_path or self.assets or "")
            quantized = self.config.checkpoint.initial_load_in_hf_quantized
            try:
                load_weights(self.model, self.family, path, quantized=quantized)
            except ValueError as error:
                raise UserError(f"checkpoint.initial_load_in_hf = true: {error}") from error
            logger.info(f"loaded the weights of {path}")
        elif not self.config.checkpoint.initial_load_path and self.assets and any(self.assets.glob("*.safetensors")):
            logger.info(
                f"training begins with random weights: those in {self.assets} (model.hf_assets_path) are loaded with "
                "checkpoint.initial_load_in_hf = true"
            )

    def _load_train_state(self, state: dict[str, Any]) -> None:
        """Go on from what `_train_state` returned; what checkpoint.exclude_from_loading names is not in it."""
        self.step, self.tokens_seen = state.get("step", 0), state.get("tokens_seen", 0)
        self.tokens_by_source = state.get("tokens_by_source", {})
        if "data" in state:
            self.train_data.load_state_dict(state["data"])
        if "rng" in state:
            torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["rng"])), dtype=torch.uint8))

    def _save_in_hugging_face_format(self) -> None:
        """Write `step-N-hf` before the last checkpoint: a run killed in between does this step, and this, again."""
        config = self.config.checkpoint
        if config.enable and not config.load_only:
            self.checkpointer.wait()  # it deletes what killed saves left, step-N-hf.tmp included
            path = self.checkpointer.folder / f"step-{self.step}-hf"
            dtype = getattr(torch, config.export_dtype)
            try:
                save_weights(self.model, self.family, path, dtype=dtype, assets=self.assets, replace=True)
            except (OSError, SafetensorError) as error:
                raise SaveError(f"{path} could not be saved: {error}") from error
            logger.info(f"saved {path}")

    def _train_state(self) -> dict[str, Any]:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.train_data.state_dict())
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "tokens_by_source": self.tokens_by_source,
            "data": merge_states(parts),
            "rng": bytes(torch.get_rng_state().tolist()).hex(),
        }

    def _shorten_timeouts(self) -> None:
        """Wait less for a collective once everything is warm: a hang is then noticed soon."""
        groups = [dist.group.WORLD, *self.mesh.get_all_groups()]
        for group in groups:
            set_timeout(group, self.config.comm.train_timeout_seconds)  # type: ignore[arg-type]


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm became infinite or not a number."""
