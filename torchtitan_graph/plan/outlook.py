"""Additions to a forecast from more facts: the storage's rate, nodes' failures, uneven experts."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.config import JobConfig
from torchtitan_graph.config.job import Optimizer
from torchtitan_graph.device import GIB
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.optim import AVERAGE_DTYPE
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.plan.expert_loads import (
    Busiest,
    busiest_by_layer,
    experts_of,
    peak_with_loads,
    read_loads,
    rows_sent,
    uneven,
)
from torchtitan_graph.plan.failures import Failures, Replicas, Saving, expect, expect_replicas, saving
from torchtitan_graph.plan.ranks import BuiltJob, Rank
from torchtitan_graph.plan.simulate import JobForecast, Prices, simulate
from torchtitan_graph.steps import Graphs, StepOptions
from torchtitan_graph.steps.interleave import with_joined, with_pairs

_HOUR, _GB = 3600.0, 1e9
_RESTART_MINUTES = 10.0  # assumed: a job is scheduled, and its processes start and load a checkpoint
_DETECT_SECONDS = 10.0  # assumed: heartbeats stop for 5 s, torchft's default, and communicators are made again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this module's options to a parser."""
    parser.add_argument(
        "--storage_gb_per_s",
        type=float,
        metavar="GB/S",
        help="GB that the storage takes in a second from all ranks together; for the time of a checkpoint",
    )
    parser.add_argument(
        "--node_mtbf_hours",
        type=float,
        metavar="HOURS",
        help="mean time between failures of one node; with --storage_gb_per_s, for the best interval between"
        " checkpoints, and the share of time that trains",
    )
    parser.add_argument(
        "--restart_minutes",
        type=float,
        metavar="MINUTES",
        help=f"with --node_mtbf_hours: from a failure until the run trains again (default {_RESTART_MINUTES:g})",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="GROUPS",
        help="with --node_mtbf_hours, for a job without fault_tolerance.enable: also the share of time that trains if"
        " the nodes are so many replica groups, which fail one at a time while the others train on",
    )
    parser.add_argument(
        "--detect_seconds",
        type=float,
        metavar="SECONDS",
        help="with --node_mtbf_hours and replica groups: from a group's failure until the others train on (default"
        f" {_DETECT_SECONDS:g})",
    )
    parser.add_argument(
        "--expert_load",
        type=Path,
        metavar="FILE",
        help="loads of the experts, for the cost of imbalance: JSON, a list or one by layer, or a run's metrics.jsonl",
    )


def check_arguments(args: argparse.Namespace, config: JobConfig) -> None:
    """Check, before any work, that these options are legal for the job."""
    for name in ("storage_gb_per_s", "node_mtbf_hours", "restart_minutes", "detect_seconds"):
        given = getattr(args, name)
        if given is not None and not (1e-9 <= given <= 1e9):
            raise UserError(f"--{name} {given:g}: must be a number above 0, from 1e-9 to 1e9")
    if args.node_mtbf_hours is not None and args.storage_gb_per_s is None:
        raise UserError(
            "--node_mtbf_hours: a failure costs what was trained since the last checkpoint, and what those"
            " cost depends on the storage; give --storage_gb_per_s too"
        )
    if args.storage_gb_per_s is not None and "." in config.optimizer.name:
        raise UserError(
            f"--storage_gb_per_s: what optimizer.name = {config.optimizer.name!r} keeps is not known before its first "
            "step, nor so a checkpoint's size; leave it out, or take AdamW"
        )
    if args.restart_minutes is not None and args.node_mtbf_hours is None:
        raise UserError(
            f"--restart_minutes {args.restart_minutes:g}: is what a failure costs; give --node_mtbf_hours too"
        )

    if args.replicas is not None and config.fault_tolerance.enable:
        raise UserError(
            f"--replicas {args.replicas}: the job has replica groups, fault_tolerance.replicas ="
            f" {config.fault_tolerance.replicas}, and the forecast is of those; leave it out"
        )
    if args.replicas is not None and args.node_mtbf_hours is None:
        raise UserError(f"--replicas {args.replicas}: is about nodes that fail; give --node_mtbf_hours too")
    if args.detect_seconds is not None:
        what = f"--detect_seconds {args.detect_seconds:g}: is what a group's failure costs"
        if args.replicas is None and not config.fault_tolerance.enable:
            raise UserError(f"{what}; give --replicas too, or set fault_tolerance.enable")
        if args.node_mtbf_hours is None:
            raise UserError(f"{what}; give --node_mtbf_hours too")


def check_replicas(groups: int, config: JobConfig, world: int, num_near: int) -> None:
    """Check, before any work, that a job of `world` ranks, `num_near` on a node, can be so many replica groups that
    fail one at a time."""
    has_groups = config.fault_tolerance.enable
    degree = config.parallelism.data_parallel_replicate_degree
    num_nodes, rest = divmod(world, num_near)
    legal = [number for number in range(2, num_nodes + 1) if not rest and num_nodes % number == 0]
    if groups not in legal:
        option = "--node_mtbf_hours: fault_tolerance.replicas =" if has_groups else "--replicas"
        raise UserError(
            f"{option} {groups}: must divide {world} ranks, {num_near} on a node, into two or more equal groups of"
            f" whole nodes: {', '.join(map(str, legal)) or 'there is no such number; take more nodes'}"
        )
    if degree % groups and not has_groups:
        raise UserError(
            f"--replicas {groups}: each group holds the whole state, so that parallelism.data_parallel_replicate_degree"
            f" = {degree} must be a multiple of it; set it to {groups}"
        )


def check_loads(path: Path, model: Decoder) -> None:
    """Check that loads are of a model's experts, before its graphs are built.

    Raises:
        UserError: they don't fit.
    """
    try:
        busiest_by_layer(read_loads(path), experts_of(model), ep=1)
    except UserError as error:
        text = str(error)
        raise UserError(text.replace("--expert_load:", f"--expert_load {str(path)!r}:", 1)) from error


@dataclasses.dataclass(frozen=True)
class Uneven:
    """A step with uneven experts.

    by_layer    the busiest rank by layer
    step_s      the step's seconds, in the order for even loads
    even_s      with even loads
    ordered_s   in the best order found for these loads; None where no parts of several microbatches are ordered
    more_bytes  the additional bytes of the busiest rank; None in a pipeline
    """

    by_layer: Mapping[str, Busiest]
    ep: int
    mean_rows: int
    step_s: float
    even_s: float
    ordered_s: float | None
    more_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Hsdp:
    """A job of replica groups alongside one of the same ranks with as many copies of the model in one mesh, by HSDP.

    with_groups_s  seconds of a step of the job
    tokens         of a step of either
    step_s         seconds of a step by HSDP; None: a run of it is not legal, for the reason `why`
    waits_s        those in which it waits for the sum over the copies
    """

    with_groups_s: float
    tokens: int
    step_s: float | None = None
    waits_s: float = 0.0
    why: str = ""

    def line(self) -> str:
        if self.step_s is None:
            return f"  HSDP in place of the replica groups: no forecast, for {self.why}"
        by = self.with_groups_s / self.step_s - 1
        return (
            f"  HSDP in place of the replica groups: {self.step_s:.4g} s a step, of which it waits {self.waits_s:.3g} s"
            f" for the sum over the copies; these take {self.with_groups_s:.4g} s, {by:+.1%}"
        )


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Additions to a forecast; None for those that were not requested. `hsdp` is there for a job of replica groups."""

    hsdp: Hsdp | None = None
    saving: Saving | None = None
    failures: Failures | None = None
    replicas: Replicas | None = None
    uneven: Uneven | None = None
    is_async: bool = False

    def lines(self) -> list[str]:
        of_hsdp = [] if self.hsdp is None else [self.hsdp.line()]
        return [*of_hsdp, *self._of_saving(), *self._of_failures(), *self._of_replicas(), *self._of_experts()]

    def data(self) -> dict[str, Any]:
        """Return the additions as plain data, for JSON."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    def _of_saving(self) -> Iterator[str]:
        if (saved := self.saving) is not None:
            written = f"; whole after {saved.written:.3g} s" if self.is_async else ""
            yield f"  a checkpoint: {saved.num_bytes / GIB:.4g} GiB; training waits {saved.waits:.3g} s{written}"

    def _of_failures(self) -> Iterator[str]:
        if (found := self.failures) is not None:
            yield (
                f"  failures: one in {found.mtbf_s / _HOUR:.3g} hours; best save every {found.interval_steps} steps,"
                f" {found.interval_s / 60:.3g} minutes"
            )
            yield (
                f"  goodput {found.goodput:.1%}; saves take {found.saving:.1%}, work done again {found.redone:.1%},"
                f" restarts {found.restarting:.1%}"
            )

    def _of_replicas(self) -> Iterator[str]:
        if (found := self.replicas) is not None and self.failures is not None:
            yield (
                f"  with {found.groups} replica groups of {found.group_nodes} node{'s' * (found.group_nodes > 1)}:"
                f" goodput {found.goodput:.1%} (without: {self.failures.goodput:.1%}); fewer groups cost"
                f" {found.fewer:.1%}, stops {found.stops:.1%}; best save every {found.interval_steps} steps"
            )
            if (hsdp := self.hsdp) is not None and hsdp.step_s is not None:
                own, other = (
                    share * hsdp.tokens / step_s
                    for share, step_s in ((found.goodput, hsdp.with_groups_s), (self.failures.goodput, hsdp.step_s))
                )
                yield f"  with failures {own:.0f} tokens/s; by HSDP {other:.0f}: {own / other - 1:+.1%}"

    def _of_experts(self) -> Iterator[str]:
        if (found := self.uneven) is None:
            return
        name, worst = max(found.by_layer.items(), key=lambda each: each[1].over_mean)
        mean = sum(each.over_mean for each in found.by_layer.values()) / len(found.by_layer)
        if found.ep == 1:
            yield "  experts: each rank has all of them, so its rows are as many however they fall"
            return
        yield (
            f"  experts: the busiest rank of ep has {mean:.3g} times the mean {found.mean_rows} rows of a microbatch,"
            f" averaged over layers; most in {name}, rank {worst.rank}: {worst.over_mean * found.mean_rows:.0f} rows"
        )
        more = "" if found.more_bytes is None else f", and {found.more_bytes / GIB:.3f} GiB more on that rank"
        by = found.step_s / found.even_s - 1
        yield f"  with these loads a step takes {found.step_s:.4g} s, {by:+.1%}{more}"
        if found.ordered_s is not None:
            yield (
                f"  in an order for these loads it would take {found.ordered_s:.4g} s: the order for even loads, in"
                f" which it runs, loses {found.step_s / found.ordered_s - 1:.2%}"
            )


def look_ahead(args: argparse.Namespace, plan: JobForecast, prices: Prices, hsdp: Hsdp | None = None) -> Outlook:
    """Return the requested additions to a forecast.

    Args:
        hsdp: the forecast of a job of replica groups alongside HSDP's. The failures of a job without groups are then
        its.

    Raises:
        UserError: the loads don't fit the model.
    """
    job, saved, failures, replicas = plan.job, None, None, None
    is_async = job.config.checkpoint.async_mode != "disabled"
    if args.storage_gb_per_s is not None:
        copied_per_s = plan.rates.host if is_async else None
        num_bytes, of_rank = _checkpoint_bytes(job)
        saved = saving(num_bytes, of_rank, args.storage_gb_per_s * _GB, copied_per_s)
        if args.node_mtbf_hours is not None:
            num_nodes = -(-job.num_ranks // plan.rates.num_near)
            restart_s = (args.restart_minutes or _RESTART_MINUTES) * 60
            of_nodes = args.node_mtbf_hours * _HOUR, num_nodes, restart_s
            alone_s = plan.step.seconds if hsdp is None or hsdp.step_s is None else hsdp.step_s
            failures = expect(saved, alone_s, *of_nodes)
            has_groups = job.options.num_replicas > 1
            if (groups := job.options.num_replicas if has_groups else args.replicas) is not None:
                replicas = expect_replicas(
                    saved,
                    plan.step.seconds,
                    *of_nodes,
                    groups=groups,
                    num_microbatches=job.options.num_microbatches * (1 if has_groups else groups),
                    detect_s=args.detect_seconds or _DETECT_SECONDS,
                    heal_s=of_rank / (plan.rates.far * plan.rates.network_share),
                )
    found = None if args.expert_load is None else _uneven(read_loads(args.expert_load), plan, prices)
    return Outlook(hsdp, saved, failures, replicas, found, is_async)


def _checkpoint_bytes(job: BuiltJob) -> tuple[int, int]:
    """Return the bytes of a checkpoint of parameters, the optimizer's state and their moving average, and those of the
    rank with most of them. Quantized weights are not saved."""
    whole: dict[str, int] = {}
    largest = 0
    for rank in job.ranks:
        kept = {name: s for name, s in rank.graphs.storages.items() if s.precision.storage.itemsize > 1}
        assert rank.state is not None, "check_arguments refuses a class of the user's"
        each = {name: _bytes_each(s, rank.state.get(name), job.config.optimizer) for name, s in kept.items()}
        whole |= {name: s.shape.numel() * each[name] for name, s in kept.items()}
        largest = max(largest, sum(s.padded_shape.numel() * each[name] for name, s in kept.items()))
    return sum(whole.values()), largest


def _bytes_each(storage: Storage, state: tuple[int, torch.dtype | None] | None, optimizer: Optimizer) -> int:
    """Return the bytes of a checkpoint for each element of a parameter."""
    own = storage.precision.storage
    if state is None:  # it is not trained
        return own.itemsize
    number, dtype = state
    averaged = AVERAGE_DTYPE.itemsize if optimizer.ema_decay is not None else 0
    return own.itemsize + number * (dtype or own).itemsize + averaged


def _uneven(loads: Mapping[str, list[float]], plan: JobForecast, prices: Prices) -> Uneven:
    job = plan.job
    storages = itertools.chain.from_iterable(rank.graphs.storages.items() for rank in job.ranks)
    layers = {".".join(name.split(".")[:2]): s.shape[0] for name, s in storages if "experts" in name.split(".")}
    ep = job.dims.ep
    found = busiest_by_layer(loads, layers, ep)

    def loads_of(rank: Rank) -> dict[str, Busiest]:
        return {name: found[own] for name, own in rank.names.items() if own in found}

    def of(rank: Rank) -> Costs:
        return uneven(prices(rank), loads_of(rank))

    slow, ordered_s = simulate(job, of, plan.rates), None
    has_pairs = job.options.pipeline is not None and job.options.pipeline.pairs
    if ep > 1 and (has_pairs or isinstance(job.ranks[0].graphs.train, StageGraph)):
        known: dict[Any, Graphs] = {}  # of ranks with equal graphs and loads
        ranks = []
        for place, rank in enumerate(job.ranks):
            key = (*map(id, rank.modules), *((name, each.over_mean) for name, each in loads_of(rank).items()))
            if key not in known:
                known[key] = _ordered(rank.graphs, job.options, place, of(rank))
            own = known[key]
            if isinstance(own.train, dict):  # by its own stages' numbers
                own = own._replace(train=dict(zip(rank.graphs.train, own.train.values(), strict=True)))  # type: ignore[arg-type]
            ranks.append(rank._replace(graphs=own))
        other = simulate(job._replace(ranks=ranks), of, plan.rates)
        ordered_s = min(slow.step.seconds, other.step.seconds)
    more = None
    if isinstance(train := plan.rank.graphs.train, TracedResult):
        more = peak_with_loads(train.gm, found) - peak_memory(train.gm).num_bytes
    sent = (rows_sent(gm) for rank in job.ranks for gm in rank.modules)
    return Uneven(found, ep, max(sent), slow.step.seconds, plan.step.seconds, ordered_s, more)


def _ordered(graphs: Graphs, options: StepOptions, place: int, costs: Costs) -> Graphs:
    """Return graphs whose parts of several microbatches run in the order that is shortest by other costs."""
    train = graphs.train
    if isinstance(train, StageGraph):
        train = with_joined(train, costs, options.num_microbatches, in_pairs=train.in_pairs)
    elif isinstance(train, dict):
        assert options.pipeline is not None
        train = with_pairs(train, options.pipeline, place, costs)
    return graphs._replace(train=train)
