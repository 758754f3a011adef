"""The trainer: from text to trained parameters."""

from __future__ import annotations

import copy
import gc
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from torchtitan_graph import device as devices
from torchtitan_graph import stop
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.step import StepOutput
from torchtitan_graph.capture.uncollected import uncollected
from torchtitan_graph.checkpoint import (
    Best,
    Checkpointer,
    SaveError,
    best_of,
    check_loadable,
    find_best,
    find_likely,
    find_train_state,
    is_new_run,
    is_used_up,
)
from torchtitan_graph.config import check_beginning, check_length, dump_toml, job
from torchtitan_graph.config.job import validation_metrics
from torchtitan_graph.data.addresses import Listing
from torchtitan_graph.data.counts import Counts, in_words
from torchtitan_graph.data.feed import Feed, Microbatches
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.lengths import epochs_in_words
from torchtitan_graph.data.loader import DataLoader, build_dataloader
from torchtitan_graph.data.open_corpus import Opened, list_corpora, naming_set, validation_corpus
from torchtitan_graph.data.positions import merge_states, rows_of_epochs
from torchtitan_graph.delivery import Delivery, base_of, deliver
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.forecast import check_fits, forecast
from torchtitan_graph.log import logger
from torchtitan_graph.metrics import (
    Leaps,
    Metrics,
    maybe_profile,
    model_table,
    out_of_memory,
)
from torchtitan_graph.models.hf import load_adapter, load_weights, save_adapter, save_weights
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.layers.lora import num_elements, packed_weights
from torchtitan_graph.models.spec import plan_of
from torchtitan_graph.optim import (
    Average,
    build_lr_scheduler,
    build_optimizer,
    forget_rehearsal,
    ranks_with_non_finite_gradients,
)
from torchtitan_graph.parallel.agree import FILES_TIMEOUT, LateMax, files_group, on_rank_0
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.patience import find_full_disk, retry_io
from torchtitan_graph.quantize.state import convert
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.hang import HangWatch
from torchtitan_graph.steps import (
    EagerUpdate,
    Steps,
    Update,
    bind_graphs,
    build_graphs,
    build_steps,
    rows_per_microbatch,
)
from torchtitan_graph.steps.reading import Read, Reading
from torchtitan_graph.steps.table import step_table
from torchtitan_graph.torch_private.distributed import set_timeout

if TYPE_CHECKING:
    from torchtitan_graph.replicas.replicas import Replicas

# A rank's flag for a lost run's folder; its saves have flags of their own. Larger than the number of any signal.
LOST = 1024
GC_STEPS = 50  # steps between Python's garbage collections, so that all ranks collect together


class Trainer:
    """One process of a training job: its steps, its state and its data, made from a blueprint."""

    def __init__(self, blueprint: Blueprint) -> None:
        """Build the steps and allocate the state, or load it. The process group exists.

        Raises:
            UserError: the step does not fit into memory, or data or a checkpoint can't be used.
        """
        self.blueprint, self.config = blueprint, blueprint.config
        self.model, self.layout, self.device = blueprint.model, blueprint.assembly.layout, blueprint.target.device
        self.rank = dist.get_rank()
        self.step = self.tokens_seen = 0
        self.stop_signal = 0  # the signal that asked a rank to stop; the same on all ranks
        self.is_unvalidated = False  # whether a signal ended the validation that is due after `step`
        self._may_stop = True  # whether a signal may end validation and samples
        self.tokens_by_source: dict[str, int] = {}
        self.best: Best | None = None  # of the validations so far, where anything depends on it
        config = self.config
        self.replicas: Replicas | None = None  # the groups that this one trains with, once it trains
        self.run: RunFolder | None = None  # once it trains
        with _reporting_out_of_memory(self._progress, blueprint):
            saved = on_rank_0(partial(retry_io, partial(_saved_state, blueprint)), files_group())
            done, position = _Done.by(saved), saved.get("data")
            if config.checkpoint.enable or config.checkpoint.initial_load_path:
                num_steps = _num_steps(blueprint, rows_of_epochs(position), done)
                on_rank_0(partial(retry_io, partial(_check_tensors_to_load, blueprint, num_steps)), files_group())
            self.delivery = self._delivery()
            is_new = not any(blueprint.checkpoints.glob("step-*"))
            listed = on_rank_0(partial(list_corpora, config, is_new=is_new), files_group())
            self.train_data, self.validation_data = retry_io(partial(_open_data, blueprint, done, listed))
            count_rows(self.train_data, position)
            self.train_data.refuse_empty()
            for data, *_ in self.validation_data.values():
                count_rows(data)
            self._check_validation()
            self.num_steps = _num_steps(blueprint, self.train_data.num_rows, done)  # of the run
            self._log_epochs()
            self.feed = self._new_feed()
            self._log_model()
            self.model_table = model_table(
                self.model,
                plan_of(blueprint.family, self.model),
                blueprint.options.precision.storage,
                packed_weights(self.model),
            )
            self.scope_table = ""  # cost of the step's modules and functions, where it is shown
            self.planned = ""  # the forecast of its memory, in words; "" in eager mode
            self.steps = self._build_steps()
            initialize(self.model, blueprint.seed, self.device)
            if blueprint.reference is not None:
                blueprint.reference.load()
                number = sum(p.numel() for p in blueprint.reference.model.parameters())
                logger.info(f"loaded the reference model of {blueprint.reference.path}: {number:,} parameters, frozen")
            self.optimizer = build_optimizer(self.model, config.optimizer, in_part=blueprint.dims.pp > 1)
            self.lr_scheduler = build_lr_scheduler(self.optimizer, config.lr_scheduler, self.num_steps)
            decay = config.optimizer.ema_decay
            self.average = None if decay is None else Average(self.optimizer, decay)
            patience = config.training.roll_back_after
            self.leaps = Leaps(config.training.skip_leaps, patience) if config.training.skip_leaps else None
            self.update: Update = EagerUpdate(self.steps, self.optimizer, config.training.max_norm)
            if config.compile.optimizer_in_graph:
                self.update = blueprint.update_in_graph(self.steps, self.optimizer)
            self.checkpointer = self._new_checkpointer()
            self.hang = HangWatch(config.comm, blueprint.dump_folder, self.rank)
            self._resume()
            self._warn_of_length()
            if self.average is not None and not self.checkpointer.loaded_optimizer:
                self.average.begin()

    def _progress(self) -> str:
        return f"rank {self.rank}, after {self.step} steps"

    def _delivery(self) -> Delivery | None:
        """Return what goes with the weights of an export, None without one. What can't be read is refused now."""
        checkpoint = self.config.checkpoint
        if not checkpoint.enable or checkpoint.load_only:
            return None
        if not checkpoint.last_save_in_hf and not checkpoint.last_save_adapter:
            return None
        reading = RowFormat.of(self.config.training, self.blueprint.tokenizer)
        return on_rank_0(partial(retry_io, partial(deliver, reading, self.blueprint.assets)), files_group())

    @property
    def _ends_with(self) -> str:
        """The option that sets the number of steps, with its value."""
        training = self.config.training
        is_by_epochs = self.num_steps < training.steps
        return f"training.epochs = {training.epochs}" if is_by_epochs else f"training.steps = {training.steps}"

    def _log_epochs(self) -> None:
        """Log what the epochs hold, before the first step."""
        training, rows_per_step = self.config.training, self.blueprint.rows_per_step
        if training.epochs:
            lengths, is_fixed = self.train_data.lengths, not training.dynamic_seq_len
            words = epochs_in_words(lengths, training.epochs, training.seq_len, rows_per_step, is_fixed)
            logger.info("; ".join(words))

    def _warn_of_length(self) -> None:
        """Warn if a run of epochs ends before its data, or before what is to be done in it."""
        training, data = self.config.training, self.train_data
        if training.epochs:
            last_row = data.num_taken + (self.num_steps - self.step) * self.blueprint.rows_per_step
            if not all(each.has_ended for each in data.lengths) or data.num_rows > last_row:
                logger.warning(
                    f"training.steps = {training.steps}: the run ends before its data does (training.epochs ="
                    f" {training.epochs})"
                )
            for notice in check_length(self.config, self.num_steps) if self.rank == 0 else ():
                logger.warning(notice)

    def _new_feed(self, **of_replicas: Any) -> Feed:
        return Feed(
            self.train_data,
            self.layout,
            self.device,
            in_pairs=self.config.training.format == "preference",
            num_ahead=self.config.model.num_mtp_layers,
            **of_replicas,
        )

    def _new_checkpointer(self, **of_replicas: Any) -> Checkpointer:
        return Checkpointer(
            self.blueprint.checkpoints,
            self.config.checkpoint,
            self.model,
            self.optimizer,
            self.lr_scheduler,
            dump_toml(self.config),
            **of_replicas,
        )

    def _log_model(self) -> None:
        config = self.config
        number, trained = num_elements(self.model), num_elements(self.model, only_trained=True)
        of_them = f", {trained:,} of them trained" if trained < number else ""
        logger.info(
            f"{config.model.name} {config.model.flavor or 'as in config.json'}: {number:,} parameters{of_them}, "
            f"{config.compile.mode} mode, mesh {self.layout}, "
            f"{self.blueprint.num_microbatches} x {rows_per_microbatch(config)} rows of "
            f"{'up to ' * config.training.dynamic_seq_len}{config.training.seq_len} tokens per rank and step"
            f"{', dealt to the replicas that live' if config.fault_tolerance.enable else ''}"
        )
        self.blueprint.log_tokenizer()

    def _build_steps(self) -> Steps:
        assembly = self.blueprint.assembly
        if assembly.options.mode != "graph":
            return build_steps(assembly)
        graphs = build_graphs(assembly)
        expected = forecast(assembly, graphs, self.config.optimizer)
        logger.info("\n".join(["this rank:", *expected.lines()]))
        check_fits(expected, self.blueprint.forecast_with)
        self.planned = f"planned {expected.in_all / devices.GIB:.3f} GiB{expected.unknown}, "
        if self.config.compile.record_call_hierarchy and self.config.metrics.enable_tensorboard:
            self.scope_table = "\n".join(step_table(assembly, graphs))
        return bind_graphs(graphs, assembly)

    def train(self, run: RunFolder) -> None:
        """Train from the newest checkpoint to `training.steps`, to the end of the data, or to a signal.

        `stop_signal` is set afterwards if it was a signal; then there is a checkpoint to resume from.
        """
        with _reporting_out_of_memory(self._progress, self.blueprint, self.optimizer):
            self._train(run)

    def _train(self, run: RunFolder) -> None:
        config, self.run = self.config, run
        on_rank_0(run.check_lock, files_group())  # set-up may have taken long
        self.checkpointer.saver.check = run.check_lock
        self.checkpointer.saver.check_copying = run.check_copying
        with (
            uncollected(),  # ranks that collect at different moments wait for each other
            closing(self.steps),
            Metrics(
                config,
                self.blueprint.dump_folder,
                rank=self.rank,
                total_steps=self.num_steps,
                start_step=self.step,
                tokens_seen=self.tokens_seen,
                peak_flops=devices.peak_flops(),
                model_table=self.model_table,
                scope_table=self.scope_table,
                of_all_stages=self.layout.of_all_stages,
            ) as metrics,
            maybe_profile(config.profiling, self.blueprint.dump_folder, self.rank, self.step) as profiler_step,
            self.checkpointer,
            self.hang,
            self._among_others(),
        ):
            first = self.step + 1
            last = self._is_over()
            run.resume(self.step, self.num_steps)
            run.planned = self.planned
            if self.replicas is not None and not last:
                run.wait_for_replicas(config, self.num_steps)
            if self.is_unvalidated:
                last = self._end_step(metrics, run, last)
            elif last and self._saves:
                with run.during("checkpoint"):
                    self.checkpointer.copy_last(self.step)
            while not last and not self.stop_signal:
                metrics.start_step()
                with self.hang.watch(first=self.step < first):
                    trained = self.train_step(metrics)
                if not trained and not self.stop_signal and not self._is_over():
                    logger.info(f"the data is used up after step {self.step}")
                    metrics.log_pending()
                if self.leaps is not None and self.leaps.is_lost():
                    with run.during("checkpoint"):
                        self._roll_back(self.leaps)
                last = self._is_over() or not (trained or self.stop_signal)
                run.done(self.step, metrics.loss, None if self.replicas is None else self.replicas.state())
                if self.step == first:
                    self._set_timeouts(self._patience())  # all is warm: detect a hang soon
                if self.step % GC_STEPS == 0:
                    gc.collect(1)
                last = self._end_step(metrics, run, last)
                profiler_step()
            if last and not self.stop_signal and self._saves:
                with run.during("checkpoint"), self._average_in_place():
                    self._export(replaces=self.step >= first)

    def _end_step(self, metrics: Metrics, run: RunFolder, last: bool) -> bool:
        """Do what is due after a step: validate, write samples, save. Return whether it is the `last` one.

        A signal ends validation and samples early. What is saved then says that the validation is missing: the run that
        resumes begins with it.
        """
        config, is_best = self.config, False
        self._may_stop = self._can_stop(last)
        self.is_unvalidated = config.validation.enable and (last or self.step % config.validation.freq == 0)
        if self.is_unvalidated and not self.stop_signal:
            with run.during("validation"), self._average_in_place():
                losses = self.validate()
            if losses is not None:
                self.is_unvalidated = False
                metrics.log_validation(self.step, losses)
                is_best = self._note_best(losses)
            last = last or self._is_over()
        if self.blueprint.samples is not None and (last or self.step % config.samples.freq == 0):
            with run.during("validation"), self._average_in_place():
                samples = None if self.stop_signal else self.samples()
            if samples is not None:
                metrics.log_samples(self.step, samples)
        if last and not self.is_unvalidated:
            self.stop_signal = 0  # there is nothing left to stop
            if self.replicas is not None:
                with run.during("waiting"):
                    self.replicas.meet_at_end()
        if self.stop_signal and self.replicas is not None:
            self.replicas.close()  # the others go on meanwhile
        with run.during("checkpoint"):
            if not self._saves:
                pass
            elif self.stop_signal:
                self.checkpointer.save(self.step, self._train_state())
            elif last and config.checkpoint.last_save_model_only:
                with self._average_in_place():
                    self.checkpointer.maybe_save(self.step, self._train_state, last=True, is_best=is_best)
            else:
                self.checkpointer.maybe_save(self.step, self._train_state, last=last, is_best=is_best)
        return last

    def _can_stop(self, last: bool) -> bool:
        """Return whether a signal may end what follows this step. The `last` step of replica groups is one that all of
        them end together."""
        return self.replicas is None or not last

    def _is_to_stop(self, flags: LateMax) -> bool:
        """Return whether a signal has asked a rank to stop, all ranks together: between the microbatches of a
        validation, and the tokens of samples. `stop_signal` is then set. Raises FolderLost like a step."""
        most = flags.exchange(LOST if self._has_lost_folder() else stop.received() if self._may_stop else 0)
        self._raise_if_lost(most == LOST)
        self.stop_signal = self.stop_signal or most
        return most > 0

    def _has_lost_folder(self) -> bool:
        return self.run is not None and self.run.has_lost()

    def _raise_if_lost(self, is_lost: bool) -> None:
        if is_lost:
            raise FolderLost(
                f"{self.blueprint.dump_folder}: after step {self.step} this run has lost its folder: another run may"
                " have it, or its storage did not answer in time. Nothing is saved. Started again, the run resumes from"
                " its newest checkpoint, unless another one runs there"
            )

    def train_step(self, metrics: Metrics) -> bool:
        """Run an optimizer step: batches -> loss, gradients -> clip -> optimizer; return False at the data's end."""
        found = self._compute(metrics)
        if found is None:
            return False
        batches, (loss, state, terms, own_metrics) = found
        limits = self._limits(loss)
        grad_norm = self.update.clip(loss, limits)
        reading = self._begin_to_read(loss, grad_norm, batches.num_tokens, limits)
        (lr, *_) = self.lr_scheduler.get_last_lr()
        metrics.maybe_log_histograms(self.step + 1, self.model)
        self.update.step(reading.stops)
        if self.step + 1 < self.num_steps:
            self.feed.read_ahead()
        flops = self.steps.count_flops(batches.on_host) if self.device.type != "cpu" else None
        read = reading.wait()  # after all launches: the device has work while the host goes on
        total_loss = self._loss_if_finite(read)
        self.update.finish(read.skips)
        self.lr_scheduler.step()
        self.step += 1
        if self.leaps is not None:
            self.leaps.add(self.step, total_loss, read.grad_norm, read.skips)
        if not read.skips:
            self.model.after_step(state)
            if self.average is not None:
                self.average.update()
        self._count(read)
        metrics.end_step(
            self.step,
            loss=total_loss,
            grad_norm=read.grad_norm,
            lr=float(lr),
            tokens_seen=self.tokens_seen,
            data_loading_s=self.feed.seconds,
            own_data_s=self.feed.own_s,
            documents=self.feed.documents,
            bytes_read=self.feed.bytes_read,
            flops=flops,
            state=state,
            loss_terms=terms,
            own_metrics=own_metrics,
            tokens_by_source=self.tokens_by_source,
            skipped_steps=None if self.leaps is None else self.leaps.num_skipped,
            roll_backs=self.leaps.num_roll_backs if self.leaps is not None and self.leaps.patience else None,
            replicas=None if self.replicas is None else self.replicas.numbers(),
        )
        return True

    def _compute(self, metrics: Metrics) -> tuple[Microbatches, StepOutput] | None:
        """Compute a step's gradients; return its microbatches and its output, None at the data's end."""
        batches = self.feed.next()
        if batches is None:
            return None
        stop.begin_steps()
        with metrics.watch_work(self.step + 1):
            return batches, self.steps.train(batches.on_device, batches.divisor, batches.on_host, batches.totals)

    def _roll_back(self, leaps: Leaps) -> None:
        """Go back to the weights of the newest checkpoint with other ones than now, and on with the data. All ranks
        skip the same steps, so they go back after the same one. Raises UserError if the run has gone back too often."""
        training, in_a_row, leaps.num_in_a_row = self.config.training, leaps.num_in_a_row, 0
        if leaps.num_roll_backs == training.most_roll_backs:
            raise UserError(
                f"step {self.step}: {in_a_row} steps in a row were skipped, and the run has gone back"
                f" {leaps.num_roll_backs} times (training.most_roll_backs = {training.most_roll_backs}). Lower"
                " optimizer.lr, look at the data, or start from an older checkpoint by checkpoint.load_step"
            )
        found = self.checkpointer.roll_back(leaps.weights_of)
        what = f"step {self.step}: {in_a_row} steps in a row were skipped (training.roll_back_after)"
        if found is None:
            logger.warning(f"{what}; there is no checkpoint to go back to from the weights of step {leaps.weights_of}")
            return
        leaps.num_roll_backs, leaps.weights_of = leaps.num_roll_backs + 1, found
        logger.warning(f"{what}: going on with the weights of step {found}, and with the data after this step")

    def _limits(self, loss: Tensor) -> Tensor | None:
        """Return the limits of the sum of all ranks' losses and of the norm, where leaps are skipped."""
        if self.leaps is None:
            return None
        of_loss, of_norm = self.leaps.limits()  # as the kernels' arguments: no copy from the host's memory
        both = of_loss * self.blueprint.dims.tp, of_norm  # ranks along tp report the same loss
        return torch.stack([loss.new_full((), x, dtype=torch.float64) for x in both])

    @contextmanager
    def _average_in_place(self) -> Iterator[None]:
        """Have the moving average of the weights in their place, if there is one; only trained weights are averaged."""
        with nullcontext() if self.average is None else self.average.in_place_of_weights():
            yield

    def _begin_to_read(self, loss: Tensor, grad_norm: Tensor, num_tokens: Tensor, limits: Tensor | None) -> Reading:
        """Start the asynchronous device-to-host copy of the step's scalars, all in one: the host waits for it alone.

        It includes each rank's signal, so that all stop after the same step, and the state of its saves.
        """
        # Numbers as kernels' arguments: `new_tensor` would copy them from the host's memory, and wait for that.
        flags = self.checkpointer.flags() + LOST * self._has_lost_folder()
        mine = [loss, loss.new_full((), flags), loss.new_full((), stop.received())]
        gathered = loss.new_empty(dist.get_world_size(), len(mine))
        dist.all_gather(list(gathered.unbind()), torch.stack(mine))
        by_source = None
        if len(self.train_data.source_names) > 1:
            targets = self.train_data.take_targets().to(self.device, non_blocking=True)
            by_source = self.layout.sum_over_rows(targets)
        return Reading(gathered, grad_norm, num_tokens, by_source, limits, self.update.stops)

    def _count(self, read: Read) -> None:
        """Count the step's targets of all ranks: in all and, where the data is a mixture, of each source."""
        self.tokens_seen += int(read.num_tokens)
        before, names = self.tokens_by_source, self.train_data.source_names
        if read.by_source:
            counted = zip(names, read.by_source, strict=True)
            self.tokens_by_source = {name: before.get(name, 0) + int(n) for name, n in counted}

    def _loss_if_finite(self, read: Read) -> float:
        """Return the loss of all ranks; raise if it or the norm is not finite: then no parameter is changed."""
        self.stop_signal = read.signal
        self._raise_if_lost(any(flags & LOST for flags in read.of_saves))
        self.checkpointer.check_flags(read.of_saves)
        if not (wrong := read.not_finite()):
            return self.layout.total_loss(read.losses)
        gradients = ranks_with_non_finite_gradients(self.model.parameters(), self.device)
        where = f", with gradients that are not finite on ranks {gradients}" if gradients else ""
        raise NonFiniteError(
            f"step {self.step + 1}: {wrong}{where}; no parameter was touched. Start again with a lower optimizer.lr or"
            " longer lr_scheduler.warmup_steps, and look at the step's data"
        )

    @torch.no_grad()
    def validate(self) -> dict[str, float] | None:
        """Return the validation losses by their metrics' names, the same on all ranks, which decide by them; None if a
        signal ended it: then `stop_signal` is set."""
        means, flags = [], LateMax(self.device)
        for data, most, _ in self.validation_data.values():
            if (mean := self._validate(data, most, flags)) is None:
                return None
            means.append(mean)
        losses = torch.stack(means)
        dist.broadcast(losses, src=0)
        return dict(zip(self.validation_data, losses.tolist(), strict=True))  # the only wait for the device

    def _validation_feed(self, data: DataLoader, most: int) -> Feed:
        in_pairs = self.config.training.format == "preference"
        return Feed(data.rewind(), self.layout, self.device, most=most, in_pairs=in_pairs)

    def _check_validation(self) -> None:
        """Check before the first step that each validation corpus has something to measure the loss of."""
        for data, most, option in self.validation_data.values():
            if self._validation_feed(data, most).next() is None:
                which = f"the first {most} microbatches" if most >= 0 else "the whole corpus"
                why = "".join(f"; {line}" for line in in_words(data.left_out)) or "; no document has text"
                raise UserError(
                    f"{option}: there is no target in {which}, in rows of validation.seq_len ="
                    f" {self.config.validation.seq_len} tokens{why}. Name other documents, or make the rows longer"
                )

    def _validate(self, data: DataLoader, most: int, flags: LateMax) -> Tensor | None:
        """Return the mean loss per target of a corpus, or of its first `most` microbatches; None if it is stopped."""
        feed = self._validation_feed(data, most)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # sums of losses, and of targets
        batch = feed.next()
        assert batch is not None, "checked at start"
        while batch is not None:
            if self._is_to_stop(flags):
                return None
            loss = self.layout.sum_over_data(self.steps.evaluate(batch.on_device[0], batch.on_host[0]).double())
            totals += torch.stack([loss, batch.divisor.double()])
            batch = feed.next()
        return totals[0] / totals[1]

    def _note_best(self, losses: dict[str, float]) -> bool:
        """Take validation losses into account for the best one, and return whether they hold it."""
        validation = self.config.validation
        if not validation.patience and not self.config.checkpoint.keep_best:
            return False
        metric = validation.best_metric or next(iter(losses))
        self.best = find_best(self.best, metric, self.step, losses[metric])
        if self.best is not None and is_used_up(validation.patience, self.best.since):
            logger.info(
                f"{self.best.since} validations in a row found no {metric} below {self.best.value:.4f}, of step "
                f"{self.best.step}: the run ends after step {self.step} (validation.patience = {validation.patience})"
            )
        return self.best is not None and self.best.step == self.step

    def _is_over(self) -> bool:
        """Return whether the run has done all its steps, or has no patience left."""
        out_of_patience = self.best is not None and is_used_up(self.config.validation.patience, self.best.since)
        return self.step >= self.num_steps or out_of_patience

    def samples(self) -> list[tuple[str, str]] | None:
        """Return the prompts of [samples], each with its continuation; None if a signal ended it: then `stop_signal` is
        set."""
        samples, options = self.blueprint.samples, self.blueprint.options
        assert samples is not None, "built where samples.prompts is set"
        is_to_stop = partial(self._is_to_stop, LateMax(self.device))
        texts = samples.write(self.layout, options.precision.compute, self.device, options.mode == "eager", is_to_stop)
        return None if texts is None else list(zip(samples.prompts, texts, strict=True))

    def _resume(self) -> None:
        assets = self.blueprint.assets
        state = self.checkpointer.load(self.num_steps, self.config.validation.patience)
        if state is None:  # certain only now where checkpoints are remote
            check_beginning(self.config, is_new=True)
        if not self.checkpointer.loaded_optimizer:
            forget_rehearsal(self.optimizer)
        if state is not None:
            try:
                self._load_train_state(state)
            except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
                raise UserError(f"the checkpoint's train_state.json can't be used: {error!r}") from error
            self.num_steps = _num_steps(
                self.blueprint, self.train_data.num_rows, _Done(self.step, self.train_data.num_taken)
            )
            self.lr_scheduler.set_total_steps(self.num_steps)
            logger.info(f"resuming after step {self.step}{self._left()}")
            if self.step >= self.num_steps:
                logger.info(f"{self._ends_with}: there is no step left to do")
            elif self._is_over():
                patience = self.config.validation.patience
                logger.info(f"validation.patience = {patience}: it is used up, so there is no step left to do")
        elif self.config.checkpoint.initial_load_in_hf:
            quantized = self.config.checkpoint.initial_load_in_hf_quantized
            with self.blueprint.initial_load_in_hf() as path:
                load_weights(self.model, self.blueprint.family, path, quantized=quantized)
            logger.info(f"loaded the weights of {path}")
        elif not self.config.checkpoint.initial_load_path and _has_weights(assets):
            logger.info(
                f"training begins with random weights: those in {assets} (model.hf_assets_path) are loaded with "
                "checkpoint.initial_load_in_hf = true"
            )
        if state is None and self.config.checkpoint.initial_load_adapter:
            with self.blueprint.initial_load_adapter() as path:
                load_adapter(self.model, self.blueprint.family, path)
            logger.info(f"loaded the adapter of {path}")

    def _left(self) -> str:
        """Return in words what is left of a run's epochs, "" without epochs."""
        rows = self.train_data.num_rows
        if rows == math.inf:
            return ""
        steps = self.num_steps - self.step
        return f": {max(rows - self.train_data.num_taken, 0):,} of {rows:,} rows are left, and {steps:,} steps"

    def _load_train_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `_train_state` returned, without the parts in checkpoint.exclude_from_loading."""
        self.step, self.tokens_seen = state.get("step", 0), state.get("tokens_seen", 0)
        self.tokens_by_source = state.get("tokens_by_source", {})
        self.is_unvalidated = self.config.validation.enable and state.get("is_unvalidated", False)
        self.best = best_of(state, self.config.validation.best_metric or validation_metrics(self.config)[0])
        if "data" in state:
            self.train_data.load_state_dict(state["data"])
        if self.leaps is not None and "leaps" in state:
            self.leaps.load_state_dict(state["leaps"])
        if "rng" in state:
            torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["rng"])), dtype=torch.uint8))

    def _export(self, replaces: bool) -> None:
        """Write `step-N-hf` and `step-N-adapter`, as asked for, after the last checkpoint; one that exists, only if
        `replaces`.

        A run that was killed in between finds its last checkpoint, trains no step, and does this again.
        """
        config, delivery = self.config.checkpoint, self.delivery
        if delivery is None:
            return
        dtype = getattr(torch, config.export_dtype)
        if config.last_save_in_hf:
            save = partial(save_weights, files=delivery.files, config=delivery.config, replace=True, dtype=dtype)
            self._write_export("hf", save, replaces)
        if config.last_save_adapter:
            save = partial(save_adapter, files=delivery.files, base=base_of(self.config), replace=True, dtype=dtype)
            self._write_export("adapter", save, replaces)

    def _write_export(self, kind: str, save: Callable[..., None], replaces: bool) -> None:
        path = self.checkpointer.folder / f"step-{self.step}-{kind}"
        if on_rank_0(path.exists, files_group()) and not replaces:
            return
        assert self.run is not None, "of the training that ends"
        on_rank_0(self.run.check_lock, files_group())
        self._set_timeouts(int(FILES_TIMEOUT.total_seconds()))  # the others wait for rank 0's files
        try:
            save(self.model, self.blueprint.family, path)
        except (OSError, SafetensorError) as error:
            why = find_full_disk(path.parent, str(error)) or error
            if self.rank == 0:
                shutil.rmtree(path.with_name(f"{path.name}.tmp"), ignore_errors=True)
            raise SaveError(
                f"{path} could not be saved: {why}; the checkpoint of this step is whole. Start the run again: it does "
                "only this, or use python -m torchtitan_graph.convert_to_hf"
            ) from error
        assert self.delivery is not None, "what is exported has it"
        logger.info(f"saved {path}: weights in {self.config.checkpoint.export_dtype}; {self.delivery.summary}")

    def _train_state(self) -> dict[str, Any]:
        data = position_of_all(self.train_data.state_dict(), self.layout)
        if left_out := in_words(Counts(*data["counted"])):
            logger.info(f"the data so far: {'; '.join(left_out)}")
        return {**self._own_state(), "data": data}

    def _own_state(self) -> dict[str, Any]:
        """Return the state of the run but its position in the data, without asking other ranks."""
        leaps = {} if self.leaps is None else {"leaps": self.leaps.state_dict()}
        return {
            **leaps,
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "tokens_by_source": self.tokens_by_source,
            **({} if self.best is None else {"best": self.best._asdict()}),
            **({"is_unvalidated": True} if self.is_unvalidated else {}),
            "rng": bytes(torch.get_rng_state().tolist()).hex(),
        }

    def _among_others(self) -> AbstractContextManager[Any]:
        """Return the context in which these ranks train with other groups, where there are any."""
        return nullcontext()

    @property
    def _saves(self) -> bool:
        """Whether these ranks save: of replica groups that are equal, one does."""
        return self.replicas is None or self.replicas.saves

    def _patience(self) -> int:
        """Return the timeout of training's collectives after the first step."""
        return self.config.comm.train_timeout_seconds

    def _set_timeouts(self, seconds: int) -> None:
        """Set the timeout of training's collectives from now on."""
        for group in [dist.group.WORLD, *self.layout.all_groups]:
            set_timeout(group, seconds)  # type: ignore[arg-type]


class _Done(NamedTuple):
    """The steps that a run has trained, and the rows of its data that it has read on from."""

    steps: int = 0
    rows: int = 0

    @staticmethod
    def by(state: dict[str, Any]) -> _Done:
        return _Done(state.get("step", 0), (state.get("data") or {}).get("rows", 0))


def _num_steps(blueprint: Blueprint, num_rows: float, done: _Done) -> int:
    """Return the number of a run's steps: training.steps, or fewer where its data has no more than `num_rows`.

    The steps done may have had another number of rows, or other data.
    """
    steps = blueprint.config.training.steps
    if num_rows == math.inf:
        return steps
    return min(steps, done.steps + math.ceil(max(num_rows - done.rows, 0) / blueprint.rows_per_step))


def _saved_state(blueprint: Blueprint) -> dict[str, Any]:
    """Return the state in a run's newest checkpoint, which has the rows of its epochs; {} without either."""
    if not blueprint.config.training.epochs or is_new_run(blueprint.checkpoints, blueprint.config.checkpoint):
        return {}
    return find_train_state(blueprint.checkpoints)


def _check_tensors_to_load(blueprint: Blueprint, num_steps: int) -> None:
    config = blueprint.config.checkpoint
    folder = blueprint.checkpoints
    path = find_likely(folder, config, num_steps, blueprint.config.validation.patience)
    if path is None:
        return
    model = blueprint.model
    if blueprint.options.float8 is not None:  # its history is checked too
        model = copy.deepcopy(model)
        convert(model, blueprint.options.float8)
    optimizer = None  # the state of a user's class is known after its first step
    if "." not in blueprint.config.optimizer.name:
        optimizer = build_optimizer(model, blueprint.config.optimizer)
    check_loadable(path, folder, config, model, optimizer)


def _open_data(
    blueprint: Blueprint, done: _Done, listed: dict[str, Listing]
) -> tuple[DataLoader, dict[str, tuple[DataLoader, int, str]]]:
    """Open the corpora of training and of validation, so that their problems are reported before any step."""
    training = blueprint.config.training
    corpus = dict(dataset=training.dataset, dataset_path=training.dataset_path, sources=training.sources)
    rows = rows_per_microbatch(blueprint.config)
    reading = RowFormat.of(training, blueprint.tokenizer, listed)
    corpus["split"] = "train"
    rows_per_step = blueprint.rows_per_step
    most_rows = max(training.steps * rows_per_step, done.rows + (training.steps - done.steps) * rows_per_step)
    opened: Opened = {}
    train_data = _open_corpus(blueprint, training, corpus, training.epochs, most_rows, rows, reading, opened)
    return train_data, open_validation(blueprint, listed, opened) if blueprint.config.validation.enable else {}


def open_validation(
    blueprint: Blueprint, listed: dict[str, Listing], opened: Opened | None = None
) -> dict[str, tuple[DataLoader, int, str]]:
    """Return a loader of each validation corpus, its number of microbatches and the option that names it, by the name
    of its loss in the metrics.

    listed: the files at addresses, as `list_corpora` found them.
    opened: as in `open_corpus`.
    """
    config, table, loaders = blueprint.config, blueprint.config.validation, {}
    sets: Sequence[job.ValidationSet | None] = table.sets or [None]
    for number, (of, metric) in enumerate(zip(sets, validation_metrics(config), strict=True)):
        with naming_set(None if of is None else number):
            corpus = validation_corpus(config, of)
            epochs = 0 if corpus["sources"] else 1  # sources don't end together
            reading = RowFormat.of(config.training, blueprint.tokenizer, listed).of_validation(of or table)
            most, rows = table.steps if of is None or of.steps is None else of.steps, table.local_batch_size
            most_rows = math.inf if most == -1 else most * rows * blueprint.dims.data
            data = _open_corpus(blueprint, table, corpus, epochs, most_rows, rows, reading, opened)
        option = "validation.dataset" if of is None else f"validation.sets, entry {number + 1}"
        loaders[metric] = data, most, option
    return loaders


def position_of_all(own: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the position of all ranks together. Those that read the same rows are one part of it."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (layout.data_rank, own))
    return merge_states(list(dict(parts).values()))


def count_rows(data: DataLoader, saved: dict[str, Any] | None = None) -> None:
    """Count the rows of a corpus' epochs, all ranks together, unless a saved position has their numbers."""
    data.count(saved, (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None)


def _open_corpus(
    blueprint: Blueprint,
    table: job.Training | job.Validation,
    corpus: dict[str, Any],
    epochs: int,
    most_rows: float,
    rows: int,
    reading: RowFormat,
    opened: Opened | None,
) -> DataLoader:
    return build_dataloader(
        **corpus,
        opened=opened,
        tokenizer=blueprint.tokenizer,
        reading=reading,
        seq_len=table.seq_len,
        alone=blueprint.config.training.one_document_per_row,
        multiple=job.ROW_MULTIPLE if isinstance(table, job.Training) and table.dynamic_seq_len else None,
        local_batch_size=rows,
        dp_rank=blueprint.assembly.layout.data_rank,
        dp_degree=blueprint.dims.data,
        num_microbatches=blueprint.num_microbatches if isinstance(table, job.Training) else 1,
        seed=blueprint.seed,
        epochs=epochs,
        most_rows=most_rows,
        too_long=blueprint.config.training.too_long,
        num_workers=table.dataloader.num_workers,
    )


def _has_weights(assets: Path | None) -> bool:
    return assets is not None and any(assets.glob("*.safetensors"))


@contextmanager
def _reporting_out_of_memory(
    progress: Callable[[], str], blueprint: Blueprint, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Log the memory's holders if an out-of-memory error is raised inside."""
    try:
        yield
    except Exception as error:
        if out_of_memory.is_out_of_memory(error):
            logger.error(out_of_memory.report(error, progress(), blueprint.model, optimizer, blueprint.config))
        raise


class NonFiniteError(RuntimeError):
    """Error: the loss or the gradient norm became infinite or not a number."""
