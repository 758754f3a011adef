"""A training job built from a configuration: everything checked, its graphs built, nothing allocated or trained."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_graph.capture.dynamo import CAPTURES
from torchtitan_graph.capture.uncollected import uncollected
from torchtitan_graph.checkpoint import check_choice, is_new_run
from torchtitan_graph.checkpoint.folder import checkpoint_folder
from torchtitan_graph.config import JobConfig, run_folder, shard_degree, target_of
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import check_names
from torchtitan_graph.data.tokenizer import Tokenizer, find_assets, load_tokenizer
from torchtitan_graph.data.turn_ends import ends_of_texts
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.forecast import Forecast, forecast
from torchtitan_graph.generate.samples import Samples
from torchtitan_graph.log import logger
from torchtitan_graph.metrics import check_mlflow, check_profiling, check_wandb
from torchtitan_graph.models.hf import check_adapter, check_exportable, check_weights, choose_model, own_attention
from torchtitan_graph.optim import build_optimizer, check_first_step, check_optimizer
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.steps import (
    Assembly,
    Graphs,
    GraphUpdate,
    Steps,
    bind_graphs,
    build_graphs,
    check_own_step,
    check_reference,
    check_steps,
    num_replicas,
    rewrite_steps,
    rows_per_microbatch,
    step_options,
)
from torchtitan_graph.steps.fingerprint import fingerprint
from torchtitan_graph.steps.precompiled import Precompiled, open_precompiled, steps_to_data
from torchtitan_graph.steps.reference import Reference, new_reference


class Blueprint:
    """A training job before it runs: its model on meta, its layout, its steps' options, all checked.

    The constructor needs no process group; `assembly` and what is built from it do: a fake one of any size is enough.
    """

    def __init__(self, config: JobConfig, world_size: int, target: Target | None = None):
        """Resolve a configuration for a number of ranks and the device that its graphs are for (default: its own).

        Raises:
            UserError: it asks for something that is not supported, does not exist, or does not go together.
        """
        check_wandb(config.metrics.enable_wandb)
        check_mlflow(config.metrics.enable_mlflow, run_folder(config))
        check_profiling(config.profiling)
        check_names(config)
        self.target = target or target_of(config)
        self.config, self.seed = config, config.debug.seed or 0
        parallelism = config.parallelism
        self.dims = ParallelDims(
            pp=parallelism.pipeline_parallel_degree,
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=shard_degree(config, world_size),
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            etp=parallelism.expert_tensor_parallel_degree,
            ep_near=self._ep_near(world_size),
        )
        training = config.training
        self.rows_per_step = training.global_batch_size
        if self.rows_per_step == -1:
            self.rows_per_step = training.local_batch_size * self.dims.data * num_replicas(config)
        # Of a step, over all replicas: one that lives alone takes them all.
        self.num_microbatches = self.rows_per_step // (rows_per_microbatch(config) * self.dims.data)
        path = config.model.hf_assets_path
        self.assets = find_assets(path) if path else None
        dry = config.comm.mode == "fake_backend" and self.assets is not None and not self.assets.exists()
        self.tokenizer: Tokenizer = load_tokenizer(None if dry else path)
        is_auto = config.model.attn == "auto"
        self.family, self.model, resolved = choose_model(config, self.assets, self.tokenizer.vocab_size, self.target)
        self.config = config = dataclasses.replace(config, model=resolved)
        if dry:
            logger.info(
                f"{path} is not there, and a dry run needs no tokenizer: {config.model.name} {config.model.flavor} has "
                f"its own vocabulary of {self.model.config.vocab_size}"
            )
        self.reference = self._reference(is_auto)
        self.options = step_options(config, self.model, self.num_microbatches, self.target)
        if config.compile.precompiled is not None:
            self.options = dataclasses.replace(self.options, precompiled=self._open_precompiled())
        self.capture = partial(
            CAPTURES[config.compile.capture],
            stack_traces=config.debug.stack_traces or config.debug.dump_graphs,
            call_hierarchy=config.compile.record_call_hierarchy,
        )
        check_steps(config, self.model, self.family, self.dims, self.options)
        if self.options.own_step is not None:
            if self.reference is not None:
                with _named(f"reference.path = {config.reference.path!r}"):
                    check_reference(config, self.model, self.reference, self.dims, self.options)
            given = self.options.own_step, self.family, self.model, self.reference, self.dims.cp
            if not_checked := check_own_step(*given):
                logger.warning(not_checked)
        check_optimizer(self.model, config.optimizer)
        self.samples = self._samples() if config.samples.prompts else None
        self.dump_folder = run_folder(config)
        self.checkpoints = checkpoint_folder(config)
        if config.comm.mode != "fake_backend":  # a dry run loads nothing
            self._check_what_is_loaded()

    @functools.cached_property
    def assembly(self) -> Assembly:
        """All that this rank's steps are built from."""
        layout = self.dims.layout(self.target.device.type)
        return Assembly(self.model, self.family, layout, self.options, self.capture, self.reference)

    def _ep_near(self, world_size: int) -> int:
        """Return the ranks of ep that share a machine, 0 where tokens are exchanged directly."""
        parallelism = self.config.parallelism
        ep, etp = parallelism.expert_parallel_degree, parallelism.expert_tensor_parallel_degree
        if parallelism.expert_exchange == "direct" or ep == 1:
            return 0
        near = self._ranks_per_machine(world_size)
        if near % (ep * etp) and (near % etp or ep * etp % near):
            change = "parallelism.expert_parallel_degree"
            if parallelism.ranks_per_machine is not None:
                divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
                legal = [str(n) for n in divisors if n % (ep * etp) == 0 or (n % etp == 0 == ep * etp % n)]
                change = f"parallelism.ranks_per_machine, which can be {', '.join(legal)}, or {change}"
            raise UserError(
                f"parallelism.expert_exchange = 'by_machine': {near} ranks share a machine, and the {ep * etp} ranks"
                f" that share a layer's experts must fill whole machines, or a whole part of one: change {change},"
                " or leave expert_exchange at direct"
            )
        return ep if near >= ep * etp else near // etp

    def _ranks_per_machine(self, world_size: int) -> int:
        """Return how many ranks share a machine: as set, as launched, or by the device's rates where nothing is."""
        if (near := self.config.parallelism.ranks_per_machine) is not None:
            return near
        if os.environ.get("WORLD_SIZE") != str(world_size) or self.config.comm.mode == "fake_backend":
            return self.target.rates.num_near
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise UserError(
                "parallelism.expert_exchange = 'by_machine': the launcher does not say how many processes share a"
                " machine (LOCAL_WORLD_SIZE); set parallelism.ranks_per_machine"
            )
        return int(os.environ["LOCAL_WORLD_SIZE"])

    def _reference(self, is_auto: bool) -> Reference | None:
        """Return the frozen model of `reference.path`, on meta, None without one; where `is_auto`, it has an attention
        of its own if it can't have the trained model's."""
        path = self.config.reference.path
        if path is None:
            return None
        with _named(f"reference.path = {path!r}"):
            reference = new_reference(Path(path), self.config.model.attn)
            if is_auto and reference.model.attn == "varlen":
                reference.model.attn, why = own_attention(reference.model)
                if reference.model.attn != "varlen":
                    logger.info(f"model.attn = auto: {reference.model.attn} for the reference model, {why}")
            return reference

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of this job's graphs."""
        reference = None if self.reference is None else self.reference.model
        return fingerprint(self.config, self.model, self.dims, self.options, reference)

    def _open_precompiled(self) -> Precompiled:
        file = f" --job.config_file {self.config.job.config_file}" if self.config.job.config_file else ""
        again = f"NGPU={self.dims.num_ranks} python -m torchtitan_graph.precompile{file}, with this run's options"
        if self.dims.ep_near and self.config.parallelism.ranks_per_machine is None:
            near = self._ranks_per_machine(self.dims.num_ranks)  # where it is traced nothing is launched
            again += f" and --parallelism.ranks_per_machine {near} in both"
        path = self.config.compile.precompiled or ""
        with refuse_unreadable(f"compile.precompiled = {path!r}"):
            return open_precompiled(Path(path), self.fingerprint(), again)

    def _check_what_is_loaded(self) -> None:
        config = self.config.checkpoint
        if self.reference is not None:
            with _named(f"reference.path = {self.config.reference.path!r}"):
                self.reference.check_weights()
        folder = self.checkpoints
        check_choice(folder, config, self.config.training.steps)
        if config.initial_load_in_hf and is_new_run(folder, config):
            with self.initial_load_in_hf() as path:
                check_weights(self.model, self.family, path, quantized=config.initial_load_in_hf_quantized)
        if config.initial_load_adapter and is_new_run(folder, config):
            with self.initial_load_adapter() as path:
                check_adapter(self.model, self.family, path)
        if config.last_save_adapter:
            with _named("checkpoint.last_save_adapter = true"):
                check_exportable(self.model, self.family)

    def _samples(self) -> Samples:
        """Return the samples, which end where a chat with the model does."""
        reading = RowFormat.of(self.config.training, self.tokenizer)
        ends = ends_of_texts(reading, [self.assets])
        return Samples(self.config.samples, self.model, self.tokenizer, ends)

    @contextmanager
    def initial_load_in_hf(self) -> Iterator[Path]:
        """Yield the folder of checkpoint.initial_load_in_hf; errors inside name that option."""
        with _named("checkpoint.initial_load_in_hf = true"):
            yield Path(self.config.checkpoint.initial_load_path or self.assets or "")

    @contextmanager
    def initial_load_adapter(self) -> Iterator[Path]:
        """Yield the folder of checkpoint.initial_load_adapter; errors inside name that option."""
        path = self.config.checkpoint.initial_load_adapter or ""
        with _named(f"checkpoint.initial_load_adapter = {path!r}"):
            yield Path(path)

    def log_tokenizer(self) -> None:
        path, size = self.config.model.hf_assets_path, f"{self.tokenizer.vocab_size:,} tokens"
        if self.assets is None:
            logger.info(f"tokenizer: the bytes of UTF-8, {size}; model.hf_assets_path is not set")
        elif self.assets.exists():
            here = Path(path or "").exists()
            note = "" if here else f"; {path} is not in this folder, so this is torchtitan_graph's own of that name"
            logger.info(f"tokenizer: {self.assets.absolute()}, {size}{note}")

    @uncollected()
    def dry_run(self) -> list[str]:
        """Build the graphs, and return the forecast of this rank as lines."""
        self.log_tokenizer()
        graphs, optimizer = build_graphs(self.assembly), self.config.optimizer
        lines = forecast(self.assembly, graphs, optimizer).lines()
        if "." in optimizer.name:
            check_first_step(self.model, graphs.storages, optimizer, in_part=self.dims.pp > 1)
        if self.config.compile.optimizer_in_graph and "." in optimizer.name:
            logger.info("optimizer step: not traced in a dry run, since its state is known after its first step")
        elif self.config.compile.optimizer_in_graph:
            self._trace_update(graphs)
        return lines

    def _trace_update(self, graphs: Graphs) -> None:
        """Trace the optimizer's step too, on meta parameters."""
        target = dataclasses.replace(self.target, device=torch.device("meta"))
        options = dataclasses.replace(self.options, target=target, recorders=None)
        steps = bind_graphs(graphs, dataclasses.replace(self.assembly, options=options))
        optimizer = build_optimizer(self.model, self.config.optimizer, in_part=self.dims.pp > 1)
        gradients = {name: torch.empty_like(p) for name, p in self.model.named_parameters() if p.requires_grad}
        self.update_in_graph(steps, optimizer).trace(gradients, torch.empty((), device="meta"), self.target.device)

    def precompile(self) -> bytes:
        """Build this rank's graphs, and return them as stored in `compile.precompiled`."""
        steps, storages = rewrite_steps(self.assembly)
        return steps_to_data(steps, self.assembly.layout, storages, self.target.device)

    def update_in_graph(self, steps: Steps, optimizer: torch.optim.Optimizer) -> GraphUpdate:
        """Return the end of the optimizer step, as a graph that its first call traces."""
        dump_to = self.options.dump_to if dist.get_rank() == 0 else None
        return GraphUpdate(
            steps,
            optimizer,
            self.config.training.max_norm,
            costs=self.assembly.costs,
            extra=self.options.extra,
            dump_to=dump_to and dump_to / "optimizer",
            stack_traces=self.config.debug.stack_traces,
            verify=self.options.verify,
        )

    def forecast_with(self, recompute: Recompute) -> Forecast:
        """Return this rank's forecast with another recomputation policy; nothing of the run changes."""
        family, model, _ = choose_model(self.config, self.assets, self.tokenizer.vocab_size, self.target)
        ours = self.options.recompute
        options = dataclasses.replace(
            self.options,
            target=dataclasses.replace(self.target, runs=False),
            recompute=dataclasses.replace(
                recompute, saved=recompute.saved | ours.saved, again=recompute.again | ours.again
            ),
            budget_gib=None,
            dump_to=None,
            picture=None,
            verify=False,
            precompiled=None,
        )
        assembly = Assembly(model, family, self.assembly.layout, options, self.capture)
        return forecast(assembly, build_graphs(assembly), self.config.optimizer)


@contextmanager
def _named(option: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{option}: {error}") from error
