"""A training job built from a configuration: everything checked, its graphs built, nothing allocated or trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_graph import device as devices
from torchtitan_graph.capture.dynamo import CAPTURES
from torchtitan_graph.checkpoint import begins_anew, check_choice
from torchtitan_graph.config import JobConfig, shard_degree
from torchtitan_graph.data.open_corpus import check_names
from torchtitan_graph.data.tokenizer import Tokenizer, find_assets, load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.forecast import Forecast, forecast
from torchtitan_graph.log import logger
from torchtitan_graph.metrics import check_profiling, check_wandb
from torchtitan_graph.models.hf import check_weights, choose_model
from torchtitan_graph.optim import build_optimizer, check_first_step, check_optimizer
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.steps import (
    Graphs,
    Steps,
    Update,
    bind_graphs,
    build_graphs,
    check_steps,
    costs_on,
    rewrite_steps,
    rows_per_microbatch,
    step_options,
)
from torchtitan_graph.steps.fingerprint import fingerprint
from torchtitan_graph.steps.precompiled import Precompiled, open_precompiled, steps_to_data


class Blueprint:
    """A training job before it runs: its model on meta, its layout, its steps' options, all checked.

    The constructor needs no process group; building the graphs does: a fake one of any size is enough.
    """

    def __init__(self, config: JobConfig, world_size: int):
        self.config = config
        check_wandb(config.metrics.enable_wandb)
        check_profiling(config.profiling)
        check_names(config)
        self.device = devices.device()
        self.seed = config.debug.seed or 0
        parallelism = config.parallelism
        self.dims = ParallelDims(
            pp=parallelism.pipeline_parallel_degree,
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=shard_degree(config, world_size),
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            etp=parallelism.expert_tensor_parallel_degree,
        )
        training = config.training
        self.rows_per_step = training.global_batch_size
        if self.rows_per_step == -1:
            self.rows_per_step = training.local_batch_size * self.dims.data
        self.num_microbatches = self.rows_per_step // (rows_per_microbatch(config) * self.dims.data)
        path = config.model.hf_assets_path
        self.assets = find_assets(path) if path else None
        dry = config.comm.mode == "fake_backend" and self.assets is not None and not self.assets.exists()
        self.tokenizer: Tokenizer = load_tokenizer(None if dry else path)
        self.family, self.model = choose_model(config, self.assets, self.tokenizer.vocab_size)
        if dry:
            logger.info(
                f"{path} is not there, and a dry run needs no tokenizer: {config.model.name} {config.model.flavor} has "
                f"its own vocabulary of {self.model.config.vocab_size}"
            )
        self.options = step_options(config, self.model, self.num_microbatches, self.device)
        if config.compile.precompiled is not None:
            self.options = dataclasses.replace(self.options, precompiled=self._open_precompiled())
        self.capture = partial(
            CAPTURES[config.compile.capture],
            stack_traces=config.debug.stack_traces or config.debug.dump_graphs,
            call_hierarchy=config.compile.record_call_hierarchy,
        )
        check_steps(config, self.model, self.family, self.dims, self.options)
        check_optimizer(self.model, config.optimizer)
        self.dump_folder = Path(config.job.dump_folder)
        if config.comm.mode != "fake_backend":  # a dry run loads nothing
            self._check_what_is_loaded()

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of this job's graphs."""
        return fingerprint(self.config, self.model, self.dims, self.options)

    def _open_precompiled(self) -> Precompiled:
        file = f" --job.config_file {self.config.job.config_file}" if self.config.job.config_file else ""
        again = f"NGPU={self.dims.num_ranks} python -m torchtitan_graph.precompile{file}, with this run's options"
        path = self.config.compile.precompiled or ""
        with refuse_unreadable(f"compile.precompiled = {path!r}"):
            return open_precompiled(Path(path), self.fingerprint(), again)

    def _check_what_is_loaded(self) -> None:
        config = self.config.checkpoint
        folder = self.dump_folder / config.folder
        check_choice(folder, config, self.config.training.steps)
        if config.initial_load_in_hf and begins_anew(folder, config):
            with self._of_initial_load_in_hf() as path:
                check_weights(self.model, self.family, path, quantized=config.initial_load_in_hf_quantized)

    @contextmanager
    def _of_initial_load_in_hf(self) -> Iterator[Path]:
        """Yield the folder of checkpoint.initial_load_in_hf; errors inside name that option."""
        try:
            yield Path(self.config.checkpoint.initial_load_path or self.assets or "")
        except UserError as error:
            raise UserError(f"checkpoint.initial_load_in_hf = true: {error}") from error

    def _tell_tokenizer(self) -> None:
        path, size = self.config.model.hf_assets_path, f"{self.tokenizer.vocab_size:,} tokens"
        if self.assets is None:
            logger.info(f"tokenizer: the bytes of UTF-8, {size}; model.hf_assets_path is not set")
        elif self.assets.exists():
            here = Path(path or "").exists()
            note = "" if here else f"; {path} is not in this folder, so this is torchtitan_graph's own of that name"
            logger.info(f"tokenizer: {self.assets.absolute()}, {size}{note}")

    def _join(self) -> None:
        self.rank = dist.get_rank()
        self.layout = self.dims.layout(self.device.type)

    def setup_dry(self) -> list[str]:
        """Build the graphs, on a fake process group, and return the forecast of this rank as lines."""
        self._tell_tokenizer()
        graphs = self.build_dry()
        told = forecast(self.model, graphs, self.layout, self.options, self.config.optimizer)
        if "." in self.config.optimizer.name:
            check_first_step(self.model, graphs.storages, self.config.optimizer, in_part=self.dims.pp > 1)
        if self.config.compile.optimizer_in_graph and "." in self.config.optimizer.name:
            logger.info("optimizer step: not traced in a dry run, for its first step tells what state it has")
        elif self.config.compile.optimizer_in_graph:
            self._trace_update(graphs)
        return told.lines()

    def build_dry(self) -> Graphs:
        """Build this rank's graphs, on a fake process group; nothing is allocated."""
        self._join()
        return build_graphs(self.model, self.family, self.layout, self.options, self.capture)

    def _trace_update(self, graphs: Graphs) -> None:
        """Trace the optimizer's step too, on meta parameters."""
        on_meta = dataclasses.replace(self.options, device=torch.device("meta"), recorders=None)
        steps = bind_graphs(graphs, self.model, self.layout, on_meta)
        optimizer = build_optimizer(self.model, self.config.optimizer, in_part=self.dims.pp > 1)
        gradients = {name: torch.empty_like(p) for name, p in self.model.named_parameters() if p.requires_grad}
        self._build_update(steps, optimizer).trace(gradients, torch.empty((), device="meta"), self.device)

    def precompile(self) -> bytes:
        """Build this rank's graphs, on a fake process group, and return them as stored in `compile.precompiled`."""
        self._join()
        steps, storages = rewrite_steps(self.model, self.family, self.layout, self.options, self.capture)
        return steps_to_data(steps, self.layout, storages, self.device)

    def _build_update(self, steps: Steps, optimizer: torch.optim.Optimizer) -> Update:
        folder = self.options.dump_to / "optimizer" if self.options.dump_to and self.rank == 0 else None
        return Update(
            steps,
            optimizer,
            self.config.training.max_norm,
            costs=costs_on(self.layout, self.options),
            extra=self.options.extra,
            dump_to=folder,
            stack_traces=self.config.debug.stack_traces,
            verify=self.options.verify,
        )

    def _forecast_with(self, recompute: Recompute) -> Forecast:
        """Return this rank's forecast with another recomputation policy; nothing of the run changes."""
        family, model = choose_model(self.config, self.assets, self.tokenizer.vocab_size)
        named = self.options.recompute
        recompute = dataclasses.replace(recompute, saved=named.saved, again=named.again)
        options = dataclasses.replace(
            self.options,
            recompute=recompute,
            budget_gib=None,
            dump_to=None,
            picture=None,
            verify=False,
            precompiled=None,
            compiles=False,
        )
        graphs = build_graphs(model, family, self.layout, options, self.capture)
        return forecast(model, graphs, self.layout, options, self.config.optimizer)
