"""Timing of steps, and logging of some to the console, metrics.jsonl, TensorBoard, W&B and MLflow."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchtitan_graph.capture.step import METRIC, TERM
from torchtitan_graph.config import JobConfig, dump_toml
from torchtitan_graph.config.dump import shown
from torchtitan_graph.config.job import OPTIONS, VALIDATION_LOSS, get
from torchtitan_graph.device import device, peak_memory_gib
from torchtitan_graph.errors import printable, without_secrets
from torchtitan_graph.log import logger, show_status
from torchtitan_graph.metrics.console import progress, progress_bar, step_line
from torchtitan_graph.metrics.health import Alarm, compare_ranks
from torchtitan_graph.metrics.histograms import histograms
from torchtitan_graph.metrics.jsonl import append, begin
from torchtitan_graph.metrics.mlflow import MLflow
from torchtitan_graph.metrics.tensorboard import TensorBoard, verbatim
from torchtitan_graph.metrics.weights_and_biases import WeightsAndBiases
from torchtitan_graph.patience import refuse_unwritable, retry_io
from torchtitan_graph.runtime.observe import Stopwatch, stopwatch
from torchtitan_graph.transient import is_transient

METRICS = "metrics"  # prefix of the names of the curves of a model's or loss's own metrics
# Key of a record -> name of its curve.
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_seen": "train/tokens_seen",
    "tokens_per_second": "performance/tokens_per_second",
    "step_time_s": "performance/step_time_s",
    "data_loading_s": "performance/data_loading_s",
    "data_share": "performance/data_share",
    "documents_per_second": "performance/documents_per_second",
    "read_mb_per_second": "performance/read_mb_per_second",
    "mfu": "performance/mfu",
    "memory_gib": "performance/memory_gib",
    "expert_imbalance": "experts/imbalance",
    VALIDATION_LOSS: "validation/loss",  # of one of several sets, with /NAME
    "skipped_steps": "train/skipped_steps",
    "roll_backs": "train/roll_backs",
    "slowest_rank": "ranks/slowest",
    "slowest_busy_s": "ranks/slowest_busy_s",
    "slowest_data_s": "ranks/slowest_data_s",
    "median_busy_s": "ranks/median_busy_s",
    "replicas": "replicas/living",
    "redone_steps": "replicas/redone_steps",
    "heal_s": "replicas/heal_s",
}


class Dashboard(Protocol):
    """Interface of TensorBoard, Weights & Biases and MLflow: points of curves, and texts."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def texts(self, step: int, values: Mapping[str, str]) -> None: ...

    def close(self, failed: bool = False) -> None: ...


_FLOPS = "flops"  # the name of a stage's FLOPs and 1, so that their sums over the stages give the mean
_LOAD = ".load"  # the suffix of the names of experts' loads in a step's state


class Metrics:
    """Logging of step 1, every `metrics.log_freq`-th step, the last one, and each validation.

    Rank 0 logs; with `metrics.save_for_all_ranks` the others write files too, `metrics_rankR.jsonl` and a `rank_R`
    folder for TensorBoard; Weights & Biases and MLflow get rank 0's. Use as a context manager, or call `close()`.

    Args:
        start_step: steps done before this process began. What a killed run logged for later steps is dropped.
        tokens_seen: targets of those steps.
        peak_flops: FLOP/s this device can do; None: not known, and then there is no MFU.
        model_table, scope_table: Markdown, and text that may be empty, shown in TensorBoard.
        of_all_stages: a function from a step's state to that of all pipeline stages; all ranks call it together.
    """

    def __init__(
        self,
        config: JobConfig,
        dump_folder: Path,
        *,
        rank: int,
        total_steps: int,
        start_step: int = 0,
        tokens_seen: int = 0,
        peak_flops: float | None = None,
        model_table: str = "",
        scope_table: str = "",
        of_all_stages: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    ) -> None:
        self.options = options = config.metrics
        self._loss_alarm = Alarm("loss", "metrics.loss_alarm", options.loss_alarm)
        self._grad_norm_alarm = Alarm("gradient norm", "metrics.grad_norm_alarm", options.grad_norm_alarm)
        self.rank = rank
        self.first_step, self.total_steps = start_step + 1, total_steps
        self._of_all_stages = of_all_stages
        self.peak_flops = peak_flops
        self._json: Path | None = None
        self._tensorboard: TensorBoard | None = None
        self._dashboards: list[Dashboard] = []
        self._has_failed = False  # whether a write failed
        if rank == 0 or options.save_for_all_ranks:
            dump_folder.mkdir(parents=True, exist_ok=True)
            self._json = dump_folder / (f"metrics_rank{rank}.jsonl" if rank else "metrics.jsonl")
            begin(self._json, start_step)
            if options.enable_tensorboard:
                texts = {"config": verbatim(without_secrets(dump_toml(config))), "model": model_table}
                if scope_table:
                    texts["scopes"] = verbatim(scope_table)
                folder = dump_folder / "tb" / (f"rank_{rank}" if rank else "")
                with refuse_unwritable(f"metrics.enable_tensorboard = true: {folder}", folder):
                    self._tensorboard = TensorBoard(folder, start_step, texts, layout=rank == 0)
                self._dashboards.append(self._tensorboard)
            settings = {key: shown(get(config, key)) for key in OPTIONS}
            if options.enable_wandb and rank == 0:
                self._dashboards.append(WeightsAndBiases(dump_folder, start_step, settings))
            if options.enable_mlflow and rank == 0:
                self._dashboards.append(MLflow(dump_folder, start_step, settings))
        self.loss: float | None = None  # of the last step
        self._num_steps = 0  # this and the next four: since the last log
        self._flops: float | None = None
        self._step_time_s = 0.0
        self._data_loading_s = 0.0
        self._documents = self._bytes_read = 0  # this rank's, of the steps since the last log
        self._tokens_seen = tokens_seen
        self._began = 0.0
        # The last step: the first and the last keys of its record, and the model's state that it changed.
        self._record: dict[str, Any] = {}
        self._record_end: dict[str, Any] = {}
        self._state: dict[str, torch.Tensor] = {}
        self._work: Stopwatch | None = None

    def start_step(self) -> None:
        """Start the clock. The time between two steps (a save, a validation) is not counted."""
        self._began = time.perf_counter()

    @contextmanager
    def watch_work(self, step: int) -> Iterator[None]:
        """Time this rank's graphs in steps that compare the ranks; not in the first, which warms up."""
        self._work = None
        several = dist.is_initialized() and dist.get_world_size() > 1
        if several and self.options.straggler_share and self.is_due(step) and step != self.first_step:
            with stopwatch(device()) as self._work:
                yield
        else:
            yield

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be logged."""
        return step == 1 or step % self.options.log_freq == 0 or step == self.total_steps

    def end_step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens_seen: int,
        data_loading_s: float,
        state: Mapping[str, torch.Tensor] | None = None,
        loss_terms: Mapping[str, torch.Tensor] | None = None,
        own_metrics: Mapping[str, torch.Tensor] | None = None,
        own_data_s: float = 0.0,
        documents: int = 0,
        bytes_read: int = 0,
        flops: float | None = None,
        tokens_by_source: dict[str, int] | None = None,
        skipped_steps: int | None = None,
        roll_backs: int | None = None,
        replicas: Mapping[str, float] | None = None,
    ) -> None:
        """Stop the clock, check for outliers, and log if the step is due.

        Loss and gradient norm are numbers, so the device has computed them when the clock stops.

        Args:
            tokens_seen: all ranks' targets from the run's beginning.
            data_loading_s: seconds of the step spent waiting for data; `own_data_s` for this rank's own.
            documents: this rank has read from its corpora for the step; `bytes_read` from their files.
            state: the model's state that the step changed, by name; of a mixture of experts `layers.1.moe.load`, the
                slots of each expert.
            loss_terms: the loss's terms by name, where there are several; in a pipeline this stage's parts of them.
            own_metrics: the metrics of the model and of the loss by name, in the same way.
            flops: this device's in the step, without recomputation; None: not known. In a pipeline the mean over its
                stages is logged.
            tokens_by_source: all ranks' targets of each corpus of a mixture.
            skipped_steps: how many were skipped since the run's beginning, where steps that leap are.
            roll_backs: how often the run had gone back before this step, where it may.
            replicas: the replicas that live, the steps repeated and the seconds of healing so far, where there are
                replica groups.
        """
        self.loss = loss
        self._num_steps += 1
        self._flops = None if flops is None else (self._flops or 0.0) + flops
        step_s = time.perf_counter() - self._began
        self._step_time_s += step_s
        self._data_loading_s += data_loading_s
        self._documents += documents
        self._bytes_read += bytes_read
        self._record = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_seen": tokens_seen}
        self._record_end = {}
        self._state = dict(state or {})
        for prefix, numbers in ((TERM, loss_terms), (METRIC, own_metrics)):
            self._state |= {prefix + name: x for name, x in (numbers or {}).items()}
        if self._work is not None:
            share = self.options.straggler_share
            self._record_end |= compare_ranks(step, step_s, self._work.seconds(), own_data_s, share)
        if skipped_steps is not None:
            self._record_end["skipped_steps"] = skipped_steps
        if roll_backs is not None:
            self._record_end["roll_backs"] = roll_backs
        self._record_end |= replicas or {}
        if tokens_by_source:
            self._record_end["tokens_by_source"] = tokens_by_source
        if self.rank == 0:
            self._loss_alarm.watch(step, loss)
            self._grad_norm_alarm.watch(step, grad_norm)
        if self.is_due(step):
            self.log_pending()
        elif self.rank == 0:
            show_status(progress_bar(step, self.total_steps, self._step_time_s / self._num_steps))

    def log_pending(self) -> None:
        """Log the last step, unless it is logged: a run may end at a step that was not due."""
        if self._num_steps == 0:
            return
        of_stage = {} if self._flops is None else {_FLOPS: torch.tensor([self._flops, 1.0], dtype=torch.float64)}
        state = self._of_all_stages(self._state | of_stage)
        flops, num_stages = state.pop(_FLOPS, torch.zeros(2)).tolist()
        mfu = flops / num_stages / self._step_time_s / self.peak_flops if flops and self.peak_flops else None
        tokens_seen = self._record["tokens_seen"]
        record: dict[str, Any] = {
            **self._record,
            # Not below 0: of a replica group that is lost, the targets that were expected of it are taken back.
            "tokens_per_second": max(0, tokens_seen - self._tokens_seen) / self._step_time_s,
            "step_time_s": self._step_time_s / self._num_steps,
            "data_loading_s": self._data_loading_s / self._num_steps,
            "documents_per_second": self._documents / self._step_time_s,
            "read_mb_per_second": self._bytes_read / 1e6 / self._step_time_s,
            "mfu": mfu,
            "memory_gib": peak_memory_gib(),
        }
        loads = {name.removesuffix(_LOAD).removesuffix(".moe"): x for name, x in state.items() if name.endswith(_LOAD)}
        # The largest load of an expert over the mean load: 1 is perfect balance.
        by_layer = {name: float(load_E.max() / load_E.double().mean()) for name, load_E in loads.items()}
        terms, own = (
            {name.removeprefix(prefix): float(x) for name, x in state.items() if name.startswith(prefix)}
            for prefix in (TERM, METRIC)
        )
        record |= {key: numbers for key, numbers in {"loss_terms": terms, "metrics": own}.items() if numbers}
        if loads:
            record["expert_imbalance"] = sum(by_layer.values()) / len(by_layer)
            if self.options.log_expert_loads:
                record["expert_loads"] = {name: load_E.tolist() for name, load_E in loads.items()}
        self._num_steps, self._flops, self._step_time_s, self._data_loading_s = 0, None, 0.0, 0.0
        self._documents = self._bytes_read = 0
        self._tokens_seen = tokens_seen
        curves = {f"experts/imbalance/{name}": value for name, value in by_layer.items()}
        curves |= {f"{TAGS['loss']}/{name}": value for name, value in terms.items()}
        curves |= {f"{METRICS}/{name}": value for name, value in own.items()}
        self._write(record | self._record_end, curves)
        if self._tensorboard is not None and loads:
            with self._errors_logged():
                self._tensorboard.expert_loads(record["step"], loads)
        if self.rank == 0:
            logger.info(step_line(record, self.total_steps))

    def log_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Log the validation losses after `step`, by their metrics' names."""
        tags = {name: name.replace(VALIDATION_LOSS, TAGS[VALIDATION_LOSS]) for name in losses}
        self._write({"step": step, **losses}, {tags[name]: loss for name, loss in losses.items()})
        if self.rank == 0:
            sets = (f"{name.partition('/')[2]} {loss:.4f}".strip() for name, loss in losses.items())
            logger.info(f"{progress(step, self.total_steps)}  validation loss {', '.join(sets)}")

    def log_samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Log prompts with what the model continues them with after `step`."""
        record = {"step": step, "samples": [{"prompt": prompt, "text": text} for prompt, text in samples]}
        if self._json is not None:
            with self._errors_logged(but_transient=True):
                retry_io(partial(append, self._json, record))
        for dashboard in self._dashboards:
            with self._errors_logged():
                dashboard.texts(step, {f"samples/{n}": "".join(each) for n, each in enumerate(samples, 1)})
        if self.rank == 0:
            for prompt, text in samples:
                logger.info(f"{progress(step, self.total_steps)}  {printable(prompt)} -> {printable(text)}")

    def maybe_log_histograms(self, step: int, model: torch.nn.Module) -> None:
        """Log histograms of parameters and gradients every `metrics.histogram_freq` steps; all ranks together."""
        freq = self.options.histogram_freq
        if not self.options.enable_tensorboard or not freq or step % freq:
            return
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            tensors[f"parameters/{name}"] = parameter
            if parameter.grad is not None:
                tensors[f"gradients/{name}"] = parameter.grad
        counted = histograms(tensors, device())
        if self._tensorboard is not None:
            with self._errors_logged():
                self._tensorboard.histograms(step, counted)

    def close(self, failed: bool = False) -> None:
        """Close the dashboards; `failed` says that training ended by an error."""
        show_status("")
        for dashboard in self._dashboards:
            with self._errors_logged():
                dashboard.close(failed)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _write(self, record: dict[str, Any], curves: dict[str, float]) -> None:
        """Write a record to metrics.jsonl, and its numbers and `curves` to the dashboards."""
        if self._json is not None:
            with self._errors_logged(but_transient=True):
                retry_io(partial(append, self._json, record))
        shown = dict(record)
        if "data_loading_s" in record:
            shown["data_share"] = record["data_loading_s"] / record["step_time_s"]
        curves |= {tag: shown[key] for key, tag in TAGS.items() if shown.get(key) is not None}
        curves |= {f"data/tokens_{name}": tokens for name, tokens in record.get("tokens_by_source", {}).items()}
        for dashboard in self._dashboards:
            with self._errors_logged():
                dashboard.scalars(record["step"], curves)

    @contextmanager
    def _errors_logged(self, but_transient: bool = False) -> Iterator[None]:
        """Suppress an error in writing, and log the first: training continues, and the console has the numbers. With
        `but_transient` raise a transient one: a run that is started again then lacks no line."""
        try:
            yield
        except OSError as error:
            if but_transient and is_transient(error):
                raise
            if not self._has_failed:
                logger.error(f"numbers of steps are lost for metrics.jsonl or a dashboard, training continues: {error}")
            self._has_failed = True
