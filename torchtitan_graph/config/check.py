"""Checks that need several options, or the number of processes."""

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

from torchtitan_graph.config import checkpoint, graph, places, quantize
from torchtitan_graph.config.job import OPTIONS, JobConfig, get, source_name
from torchtitan_graph.config.job import named as _name
from torchtitan_graph.config.option import brief, nearest
from torchtitan_graph.config.resolve import one_line, problem_list
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.rates import RATES

SMALLEST_WEIGHT = 10000  # parts of the sum: a mixture rounds weights to parts of somewhat more rows
MOST_RANKS = 2**20  # several times the largest cluster; torch lists the ranks of a group
MOST_TOKENS = 2**26  # that a rank takes at a time: the bytes of all pairs of them, by head, are then numbers of 64 bits
# Environment variables that are numbers, and the least of each.
_OF_LAUNCHERS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
_SHARD = "data_parallel_shard_degree"
_DEGREES = (  # that multiply to the number of processes
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    _SHARD,
    "context_parallel_degree",
    "tensor_parallel_degree",
)
_ONLY_DRY = {"fake_rank": "builds another rank", "fake_device": "estimates for another device"}
_PP = "parallelism.pipeline_parallel_degree"
_PARTS = "parallelism.module_fqns_per_model_part"
# What makes a run another run, where it changes between a start and a resume; job.allow_changed names exceptions.
RUN_DEFINING = (
    "model.name",
    "model.flavor",
    "model.hf_assets_path",
    "model.num_mtp_layers",
    "training.dataset",
    "training.dataset_path",
    "training.seq_len",
    "training.dynamic_seq_len",
    "training.dtype",
    "debug.seed",
)


def check(config: JobConfig, world_size: int) -> list[str]:
    """Check a configuration for `world_size` processes, and return its notices, a line each.

    Raises:
        UserError: options contradict each other or the number of processes; the message lists all of it. Or as
            `check_environment`.
    """
    check_environment()
    if problems := [*_check_values(config, world_size)]:  # what a file or a command line gives has been checked
        raise UserError(problem_list(problems))
    problems = [*_check_degrees(config, world_size), *_check_tables(config, world_size)]
    problems += graph.find_problems(config) + checkpoint.find_problems(config, world_size)
    problems += quantize.find_problems(config) + places.find_problems(config)
    if problems:
        raise UserError(problem_list(problems))
    return [*config.notices, *_notices(config)]


def _check_values(config: JobConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each table or value of a configuration built in Python that is no legal option."""
    if type(world_size) is not int or world_size < 1:
        yield f"world_size = {world_size!r}: must be the number of processes, a whole number of at least 1"
    if not isinstance(config, JobConfig):
        yield f"config is of class {type(config).__name__}: must be a JobConfig, as load(argv) returns"
        return
    wrong = [*_misplaced(config, JobConfig, "")]
    yield from wrong
    for key, option in OPTIONS.items() if not wrong else ():
        value = get(config, key)
        try:
            if option.row is None:
                option.accept(value)
            elif not isinstance(value, list) or not all(isinstance(entry, option.row) for entry in value):
                raise UserError(f"must be a list of {option.row.__name__}")
        except UserError as error:
            yield f"{key} = {brief(value)}: {error}"


def _misplaced(config: Any, kind: type, prefix: str) -> Iterator[str]:
    """Yield a line for each table of a wrong class and each attribute that is no option."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in vars(config).keys() - known.keys():
        near = nearest(prefix + name, [*OPTIONS])
        yield f"{prefix}{name} is not an option" + (f"; did you mean {near}?" if near else "")
    for name, field in known.items():
        table = field.default_factory
        if isinstance(table, type) and dataclasses.is_dataclass(table):
            found = getattr(config, name)
            if isinstance(found, table):
                yield from _misplaced(found, table, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name} is of class {type(found).__name__}: set its options one by one, as attributes"


def ranks_asked_for() -> int | None:
    """Return the number of ranks in the environment variable NGPU; None where it is not set.

    Raises:
        UserError: it is no number of ranks.
    """
    given = os.environ.get("NGPU")
    if given is None:
        return None
    if not given.isdecimal() or len(given) > 100 or not 0 < int(given) <= MOST_RANKS:
        raise UserError(f"NGPU = {brief(given)}: must be the number of ranks, a whole number from 1 to {MOST_RANKS}")
    return int(given)


def ranks_started() -> int:
    """Return how many processes a launcher has started for this run; 1 where there is none.

    Raises:
        UserError: as `check_environment`.
    """
    check_environment()
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_environment() -> None:
    """Check the environment variables that launchers set, such as RANK and WORLD_SIZE.

    Raises:
        UserError: one is no whole number, or a rank is not below its number of processes.
    """
    for name, least in _OF_LAUNCHERS.items():
        given = os.environ.get(name, str(least))
        if not given.isdecimal() or len(given) > 100 or not least <= int(given) <= MOST_RANKS:
            raise UserError(
                f"{name} = {brief(given)}: must be a whole number from {least} to {MOST_RANKS}; launchers set it, "
                "torchrun among them: unset it to run one process"
            )
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number, among = os.environ.get(rank, "0"), os.environ.get(size)
        if among is not None and int(number) >= int(among):
            raise UserError(f"{rank} = {number!r}: must be below {size} = {among}; launchers set both")


def shard_degree(config: JobConfig, world_size: int) -> int:
    """Return data_parallel_shard_degree, inferred from the number of processes where it is -1."""
    given = config.parallelism.data_parallel_shard_degree
    return given if given != -1 else max(1, world_size // _other_degrees(config))


def target_of(config: JobConfig) -> Target:
    """Return the device that a job's graphs are for: in a dry run comm.fake_device, else this process's own."""
    return Target.of(RATES[config.comm.fake_device]) if config.comm.mode == "fake_backend" else Target.here()


def smallest_world(config: JobConfig) -> int:
    """Return the smallest number of processes that the degrees allow."""
    others, experts = _other_degrees(config), config.parallelism.expert_parallel_degree
    given = config.parallelism.data_parallel_shard_degree
    if given != -1 or experts == 1:
        return max(1, given) * others
    experts *= config.parallelism.expert_tensor_parallel_degree
    inside = config.parallelism.context_parallel_degree * config.parallelism.tensor_parallel_degree
    return others * (math.lcm(experts, inside) // inside)


def _other_degrees(config: JobConfig) -> int:
    return math.prod(getattr(config.parallelism, key) for key in _DEGREES if key != _SHARD)


def _check_degrees(config: JobConfig, world_size: int) -> list[str]:
    degrees, problems = config.parallelism, []
    shards = shard_degree(config, world_size)
    product = shards * _other_degrees(config)
    if product != world_size:
        of = {key: getattr(degrees, key) for key in _DEGREES} | {_SHARD: shards}
        inferred = degrees.data_parallel_shard_degree == -1
        shown = [
            f"{key} {degree}" + " (inferred)" * (key == _SHARD and inferred)
            for key, degree in of.items()
            if degree > 1 or not key.startswith(("pipeline", "context"))
        ]
        culprit = next((key for key in _DEGREES if getattr(degrees, key) > 1), _SHARD)
        problems.append(
            f"{_name(config, f'parallelism.{culprit}')}: the degrees must multiply to the number of processes:"
            f" {' * '.join(shown)} = {product}, not {world_size}; start {product} processes, or let"
            f" data_parallel_shard_degree be -1 and the product of the others divide {world_size}"
        )
    problems += _check_expert_degrees(config, shards) + _check_pipeline(config)
    if config.model.num_mtp_layers and max(degrees.pipeline_parallel_degree, degrees.context_parallel_degree) > 1:
        problems.append(
            f"{_name(config, 'model.num_mtp_layers')}: not with pipeline or context parallel, whose ranks lack the next"
            " tokens; use data_parallel_shard_degree, tensor_parallel_degree or expert_parallel_degree"
        )
    data_degree = degrees.data_parallel_replicate_degree * shards
    microbatch = config.training.local_batch_size * data_degree
    rows = config.training.global_batch_size
    if product == world_size and rows != -1 and rows % microbatch:
        problems.append(
            f"{_name(config, 'training.global_batch_size')}: must be a multiple of training.local_batch_size"
            f" {config.training.local_batch_size} * data-parallel degree {data_degree} = {microbatch}, or -1"
        )
    return problems + _check_rows(config)


def _check_rows(config: JobConfig) -> list[str]:
    cp, tp = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    problems = []
    for table in ["training"] + ["validation"] * config.validation.enable:
        key, rows = f"{table}.seq_len", f"{table}.local_batch_size"
        if table == "training" and config.parallelism.pipeline_parallel_degree > 1:
            rows = "parallelism.pipeline_parallel_microbatch_size"
        seq_len = get(config, key)
        if (tokens := seq_len * get(config, rows)) > MOST_TOKENS:
            problems.append(
                f"{_name(config, key)}: times {rows} = {get(config, rows)} these are {tokens:,} tokens at a time, and"
                f" {MOST_TOKENS:,} are the most; use shorter rows or fewer of them"
            )
        if cp > 1 and seq_len % (2 * cp):
            problems.append(
                f"{_name(config, key)}: context parallel deals equal blocks of a row forth and back, which needs a"
                f" multiple of 2 * parallelism.context_parallel_degree {cp} = {2 * cp}"
            )
        elif seq_len % (cp * tp):
            of = f"parallelism.tensor_parallel_degree {tp}"
            problems.append(
                f"{_name(config, key)}: sequence parallel needs a multiple of"
                f" {f'parallelism.context_parallel_degree {cp} * {of} = {cp * tp}' if cp > 1 else of}"
            )
    return problems


def _check_expert_degrees(config: JobConfig, shards: int) -> list[str]:
    degrees, problems = config.parallelism, []
    ep, etp, tp = (
        degrees.expert_parallel_degree,
        degrees.expert_tensor_parallel_degree,
        degrees.tensor_parallel_degree,
    )
    if etp not in (1, tp):
        problems.append(
            f"{_name(config, 'parallelism.expert_tensor_parallel_degree')}: legal are 1, each expert whole, and"
            f" parallelism.tensor_parallel_degree {tp}"
        )
    reused = shards * degrees.context_parallel_degree * tp
    if ep > 1 and reused % (ep * etp):
        problems.append(
            f"{_name(config, 'parallelism.expert_parallel_degree')}: experts reuse the ranks of"
            f" data_parallel_shard_degree {shards} * context_parallel_degree {degrees.context_parallel_degree}"
            f" * tensor_parallel_degree {tp} = {reused}; expert_parallel_degree * expert_tensor_parallel_degree {etp}"
            " must divide that"
        )
    return problems


def _check_pipeline(config: JobConfig) -> list[str]:
    degrees, problems = config.parallelism, []
    if degrees.pipeline_parallel_degree == 1:
        return []
    size, rows = degrees.pipeline_parallel_microbatch_size, config.training.local_batch_size
    if rows % size:
        problems.append(
            f"{_name(config, 'parallelism.pipeline_parallel_microbatch_size')}: must divide training.local_batch_size"
            f" {rows}"
        )
    if config.compile.mode == "eager":
        problems.append(
            f"{_name(config, 'parallelism.pipeline_parallel_degree')}: a pipeline runs parts of a graph, and"
            " compile.mode = eager has none; use compile.mode = graph"
        )
    if config.checkpoint.last_save_in_hf:
        problems.append(
            f"{_name(config, 'checkpoint.last_save_in_hf')}: no rank of a pipeline can gather the whole model; convert"
            " the last checkpoint with scripts/convert_to_hf.py"
        )
    return problems


def _check_tables(config: JobConfig, world_size: int) -> list[str]:
    problems = []
    if unknown := [key for key in config.job.allow_changed if key not in RUN_DEFINING]:
        problems.append(
            f"{_name(config, 'job.allow_changed')}: {one_line(', '.join(unknown))} may change anyway, or is no"
            f" option; legal are {', '.join(RUN_DEFINING)}"
        )
    profiling = config.profiling
    if profiling.enable_profiling and profiling.profile_freq < profiling.profiler_active + profiling.profiler_warmup:
        problems.append(
            f"{_name(config, 'profiling.profile_freq')}: must be at least profiler_active {profiling.profiler_active}"
            f" + profiler_warmup {profiling.profiler_warmup}"
        )
    if config.debug.verify_passes and config.comm.mode == "fake_backend":
        problems.append(
            f"{_name(config, 'debug.verify_passes')}: a dry run sends nothing, so there are no numbers to compare; "
            "remove it, or comm.mode = fake_backend"
        )
    if config.comm.mode == "fake_backend" and config.comm.fake_rank >= world_size:
        name = _name(config, "comm.fake_rank")
        problems.append(f"{name}: must be from 0 to {world_size - 1}, as NGPU, the number of ranks, is {world_size}")
    for table in ("training", "validation"):
        loader = get(config, f"{table}.dataloader")
        for name in ("persistent_workers", "prefetch_factor"):
            if getattr(loader, name) and not loader.num_workers:
                key = f"{table}.dataloader.{name}"
                problems.append(f"{_name(config, key)}: needs {table}.dataloader.num_workers of at least 1")
    return problems + _check_sources(config)


def _check_sources(config: JobConfig) -> list[str]:
    training, sources, problems = config.training, config.training.sources, []
    if not sources:
        return []
    for key in ("training.dataset", "training.dataset_path"):
        if get(config, key) != OPTIONS[key].default:
            problems.append(f"{_name(config, key)}: is not used beside training.sources; make it an entry")
    if not training.repeat:
        problems.append(f"{_name(config, 'training.repeat')}: each of training.sources repeats by itself; remove it")
    validation = config.validation
    if validation.enable and validation.steps == -1 and not (validation.dataset or validation.dataset_path):
        problems.append(
            f"{_name(config, 'validation.steps')}: the sources of a mixture don't end together; set a number of"
            " microbatches, or name one corpus in validation.dataset or validation.dataset_path"
        )
    where = f"{config.sources.get('training.sources', 'default')}: training.sources"
    for number, source in enumerate(sources, 1):
        if not source.dataset and not source.dataset_path:
            problems.append(f"{where}, entry {number}: needs dataset or dataset_path")
    total = sum(source.weight for source in sources)
    if not 0 < total < math.inf or any(0 < source.weight < total / SMALLEST_WEIGHT for source in sources):
        problems.append(f"{where}: each weight must be 0 or at least 1/{SMALLEST_WEIGHT} of their sum")
    names = [source_name(source) for source in sources]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{where}: several entries are called {', '.join(repeated)}; give each a name of its own")
    return problems


def _notices(config: JobConfig) -> list[str]:
    notices = graph.unused(config) + quantize.unused(config)
    total_steps, steps = config.lr_scheduler.total_steps, config.training.steps
    if total_steps is not None and total_steps < steps:
        notices.append(
            f"{_name(config, 'lr_scheduler.total_steps')}: the schedule ends before training.steps {steps};"
            " the learning rate then stays where it is"
        )
    of_model = config.checkpoint.enable and config.checkpoint.last_save_model_only
    if config.checkpoint.export_dtype != "float32" and not config.checkpoint.last_save_in_hf and not of_model:
        notices.append(
            f"{_name(config, 'checkpoint.export_dtype')}: nothing is exported without checkpoint.last_save_in_hf or"
            " last_save_model_only"
        )
    if not config.checkpoint.enable:
        if config.checkpoint.remote_folder is not None:
            name = _name(config, "checkpoint.remote_folder")
            notices.append(f"{name}: nothing is copied while checkpoint.enable is false")
        if config.checkpoint.last_save_in_hf:
            name = _name(config, "checkpoint.last_save_in_hf")
            notices.append(f"{name}: nothing is saved while checkpoint.enable is false")
    if config.parallelism.expert_tensor_parallel_degree > 1 and config.parallelism.expert_parallel_degree == 1:
        name = _name(config, "parallelism.expert_tensor_parallel_degree")
        notices.append(f"{name}: experts are split as all else while parallelism.expert_parallel_degree is 1")
    if config.metrics.histogram_freq and not config.metrics.enable_tensorboard:
        name = _name(config, "metrics.histogram_freq")
        notices.append(f"{name}: there are no histograms while metrics.enable_tensorboard is false")
    if (
        config.training.mtp_loss_weight != OPTIONS["training.mtp_loss_weight"].default
        and not config.model.num_mtp_layers
    ):
        name = _name(config, "training.mtp_loss_weight")
        notices.append(f"{name}: there is no such loss while model.num_mtp_layers is 0")
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        name = _name(config, "debug.deterministic_warn_only")
        notices.append(f"{name}: there is nothing to warn of while debug.deterministic is false")
    notices += _stage_notices(config)
    if config.comm.mode != "fake_backend":
        notices += [
            f"{_name(config, f'comm.{key}')}: only a dry run, comm.mode = fake_backend, {what}"
            for key, what in _ONLY_DRY.items()
            if getattr(config.comm, key) != OPTIONS[f"comm.{key}"].default
        ]
    return notices


def _stage_notices(config: JobConfig) -> list[str]:
    """Return a notice for each pipeline option that is set and has no effect."""
    options = config.parallelism
    keys = [key for key in OPTIONS if key.startswith("parallelism.pipeline_parallel_") and key != _PP]
    chosen = [key for key in [*keys, _PARTS] if get(config, key) != OPTIONS[key].default]
    if options.pipeline_parallel_degree == 1:
        return [f"{_name(config, key)}: there are no stages while {_PP} is 1" for key in chosen]
    divides = [key for key in chosen if key.endswith(("_layers", "_layers_per_stage"))]
    if options.module_fqns_per_model_part:
        return [f"{_name(config, key)}: {_PARTS} says what each stage has" for key in divides]
    if not options.pipeline_parallel_schedule_csv:
        return []
    counted = [key for key in divides if key.endswith("_per_stage")]
    return [f"{_name(config, key)}: there are as many stages as pipeline_parallel_schedule_csv has" for key in counted]
