"""The graphs of a job's ranks, built as in a run, in a fake process group of one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.fx import GraphModule

from torchtitan_graph.analysis.cost import Link
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.config import DRY, JobConfig, check, load, ranks_asked_for
from torchtitan_graph.config.check import MOST_RANKS
from torchtitan_graph.config.job import OPTIONS
from torchtitan_graph.config.resolve import COMMAND_LINE
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.forecast import Forecast, forecast
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.log import logger
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.schedule import Schedule
from torchtitan_graph.plan.depth import kind_of
from torchtitan_graph.rates import Rates
from torchtitan_graph.run.status import device_of
from torchtitan_graph.steps import Graphs, StepOptions, build_graphs, num_replicas
from torchtitan_graph.steps.budget import state_of_stored
from torchtitan_graph.steps.choices import check_disabled
from torchtitan_graph.steps.held import in_flight
from torchtitan_graph.torch_private.distributed import fake_process_group

CPU = "CPU"  # name of this machine's CPU as a device


class Rank(NamedTuple):
    """The graphs and figures of one rank of a job.

    rank      its number among all ranks
    graphs    its steps
    links     of its groups, by their names in the graphs
    forecast  its memory, communication and operations
    visible   by block the fraction of all pairs of positions that attention sees, in rows of one document
    names     of its modules, by their names in the graphs, which may be those of a rank with equal stages
    state     the number and dtype of the optimizer's tensors for each trained parameter; None: not known
    """

    rank: int
    graphs: Graphs
    links: Mapping[str, Link]
    forecast: Forecast
    visible: Mapping[str, float]
    names: Mapping[str, str]
    state: Mapping[str, tuple[int, torch.dtype | None]] | None = None

    @property
    def modules(self) -> list[GraphModule]:
        """The graphs of a training step; in a pipeline, those of its stages' parts."""
        train = self.graphs.train
        if isinstance(train, TracedResult):
            return [train.gm]
        if isinstance(train, StageGraph):
            return [part.gm for part in train.parts.by_name.values()]
        return [part.gm for stage in train.values() for part in stage.parts.by_name.values()]


class BuiltJob(NamedTuple):
    """A job with the graphs of its ranks: `ranks` has one for each place along pp, the first of its stage."""

    config: JobConfig
    dims: ParallelDims
    options: StepOptions
    rows_per_step: int
    ranks: Sequence[Rank]

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.config.training.seq_len

    @property
    def num_ranks(self) -> int:
        """The ranks of all replica groups together; `dims` and `ranks` are those of one group."""
        return self.dims.num_ranks * self.options.num_replicas

    @property
    def num_microbatches(self) -> int:
        """The microbatches that a rank computes in a step while all replica groups live: the most of any group."""
        return -(-self.options.num_microbatches // self.options.num_replicas)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of a pipeline for so many microbatches."""
        return self.options.fewer.get(self.num_microbatches, self.options.pipeline)


def load_dry(words: Sequence[str]) -> JobConfig:
    """Return the configuration of a dry run. A run's folder stands for the device that it was on, too: what `auto` was
    there is in its config.toml.

    Raises:
        UserError: as a dry run of it.
    """
    config = load([*words, *DRY])
    folder = Path(config.job.config_file or "")
    device = device_of(folder) if config.job.config_file and folder.is_dir() else None
    if device is not None and config.sources.get("comm.fake_device") != COMMAND_LINE:
        config.comm.fake_device, config.sources["comm.fake_device"] = device, str(folder)
    return config


def configuration(words: Sequence[str], num_ranks: int) -> JobConfig:
    """Return a job's configuration, checked for this number of ranks, all replica groups together.

    Raises:
        UserError: as a run of it; or it has too many ranks, or they are not as many in each replica group, or an option
            is one that only a dry run looks at.
    """
    if not 1 <= num_ranks <= MOST_RANKS:
        raise UserError(f"--world {num_ranks}: must be the number of ranks, from 1 to {MOST_RANKS}")
    config = load([*words, *DRY])
    if (rank := config.comm.fake_rank) != OPTIONS["comm.fake_rank"].default:
        raise UserError(f"comm.fake_rank = {rank}: is of a dry run; a forecast is of all ranks, so leave it out")
    if (device := config.comm.fake_device) != OPTIONS["comm.fake_device"].default:
        raise UserError(f"comm.fake_device = {device}: is of a dry run; here --device says it, so leave it out")
    return _checked(config, ranks_of_group(config, num_ranks))


def ranks_of_group(config: JobConfig, num_ranks: int) -> int:
    """Return the ranks of each replica group of a job of so many: torchrun's world. Without groups, all.

    Raises:
        UserError: the groups don't divide them.
    """
    each, rest = divmod(num_ranks, groups := num_replicas(config))
    if rest:
        near = " or ".join(str(number * groups) for number in (each, each + 1) if number)
        raise UserError(
            f"--world {num_ranks}: must be a multiple of fault_tolerance.replicas = {groups}, such as {near}: it is the"
            " number of all ranks, and each replica group has as many"
        )
    return each


def _checked(config: JobConfig, world_size: int) -> JobConfig:
    """Return the configuration once a run would accept it. Its graphs are traced: precompiled ones are equal, but of
    one layout, and after the last pass only."""
    config.compile.precompiled = None
    for notice in check(config, world_size):
        logger.warning(notice)
    check_disabled(config.compile.disable_passes)
    return config


@contextlib.contextmanager
def dry_rank(config: JobConfig) -> Iterator[Blueprint]:
    """Yield the blueprint of one of the ranks that NGPU asks for, on a fake process group.

    Raises:
        UserError: as a run of that configuration.
    """
    world_size = ranks_asked_for() or 1
    blueprint = Blueprint(_checked(config, world_size), world_size)
    with fake_process_group(world_size, config.comm.fake_rank):
        yield blueprint


def build(config: JobConfig, world_size: int, rates: Rates, make: Callable[..., Blueprint] = Blueprint) -> BuiltJob:
    """Build the graphs of a job's ranks on devices of a kind. Pipeline ranks with equal stages share theirs.

    Args:
        world_size: the ranks of a replica group; without groups, of the job.
        make: constructor of a blueprint, from a configuration, a number of ranks and their device.

    Raises:
        UserError: as a run of that configuration.
    """
    make = partial(_blueprint, make, config, world_size, rates)
    first = make()
    places: dict[Hashable, list[int]] = {}
    for place in range(first.dims.pp):
        places.setdefault(_kind(place, first.model, first.options), []).append(place)
    ranks: dict[int, Rank] = {}
    for number, alike in enumerate(places.values(), start=1):
        if len(places) > 1:
            logger.info(f"graphs {number} of {len(places)}, of the pipeline's rank {', '.join(map(str, alike))}")
        blueprint = first if number == 1 else make()
        ranks |= _ranks_at(alike, blueprint, world_size)
    return BuiltJob(config, first.dims, first.options, first.rows_per_step, [ranks[place] for place in sorted(ranks)])


def _blueprint(make: Callable[..., Blueprint], config: JobConfig, world_size: int, rates: Rates) -> Blueprint:
    target = dataclasses.replace(Target.of(rates), runs=rates.name == CPU)  # a replay on this CPU runs compiled code
    blueprint = make(config, world_size, target)
    blueprint.options = dataclasses.replace(blueprint.options, dump_to=None, picture=None)
    return blueprint


def _ranks_at(places: Sequence[int], blueprint: Blueprint, world_size: int) -> dict[int, Rank]:
    """Return the ranks at some places along pp, with the graphs of the first, which is built."""
    num_ranks = world_size // blueprint.dims.pp
    stands_for = "gloo" if blueprint.target.rates.name == CPU else "nccl"
    with fake_process_group(world_size, places[0] * num_ranks, stands_for):
        assembly = blueprint.assembly
        options, model = assembly.options, assembly.model
        graphs = build_graphs(assembly)
        links = assembly.layout.links(options.target.rates.num_near)
        visible = assembly.visible_in_one_document(options.rows[1])
        found = {}
        for place in places:
            names = _names(options, places[0], place) or {name: name for name in model.modules_in_order}
            own = _renamed(graphs, options, names, place)
            of_rank = forecast(assembly, own, blueprint.config.optimizer, place)
            state = state_of_stored(own.storages, model, blueprint.config.optimizer)
            found[place] = Rank(place * num_ranks, own, links, of_rank, visible, names, state)
        return found


def _names(options: StepOptions, built: int, place: int) -> dict[str, str]:
    """Return the module names of a place along pp by those of the place that was built for it; {} without stages."""
    if options.pipeline is None:
        return {}
    theirs, own = (
        [name for stage in options.pipeline.stages_of(each) for name in options.pipeline.stages[stage]]
        for each in (built, place)
    )
    return dict(zip(theirs, own, strict=True))


def _renamed(graphs: Graphs, options: StepOptions, names: Mapping[str, str], place: int) -> Graphs:
    """Return graphs for the stages of a place along pp that equal the built ones, with its own parameters' names."""
    if not isinstance(graphs.train, dict):
        return graphs
    assert options.pipeline is not None
    stages = zip(options.pipeline.stages_of(place), graphs.train.values(), strict=True)
    storages = {}
    for name, storage in graphs.storages.items():
        module = block_of(name, names) or ""  # "" for a tied embedding in the output's stage
        storages[names.get(module, "") + name[len(module) :]] = storage
    return graphs._replace(train=dict(stages), storages=storages)


def _kind(place: int, model: Decoder, options: StepOptions) -> Hashable:
    """Return a key that is equal for places along pp whose stages have equal graphs: their blocks' kinds and the
    options for each. User's passes are opaque: each place then differs."""
    if options.pipeline is None:
        return 0
    if options.extra or options.budget_gib is not None:
        return place
    described = []
    for stage in options.pipeline.stages_of(place):
        held = in_flight(options.pipeline, stage) if options.recompute.budget is not None else 0
        described.append((held, *(kind_of(name, model, options) for name in options.pipeline.stages[stage])))
    stages = options.pipeline.stages_of(place)
    pairs = [(stages.index(forward), stages.index(backward)) for forward, backward in options.pipeline.pairs_of(place)]
    return tuple(described), tuple(sorted(pairs))
