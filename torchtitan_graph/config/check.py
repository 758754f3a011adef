"""Checks that need several options, or the number of processes."""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_graph.config import checkpoint, fault_tolerance, graph, quantize
from torchtitan_graph.config.addresses import find_bad_address, is_address
from torchtitan_graph.config.beginning import builds_on_weights, loads_weights
from torchtitan_graph.config.columns import find_wrong_column
from torchtitan_graph.config.job import (
    OPTIONS,
    JobConfig,
    LRScheduler,
    Problem,
    Validation,
    ValidationSet,
    get,
    is_set,
    lines,
    source_name,
    unused,
    validation_metrics,
)
from torchtitan_graph.config.option import brief
from torchtitan_graph.config.resolve import one_line, problem_list
from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.rates import RATES

if TYPE_CHECKING:
    from torchtitan_graph.device import Target

_HELD_OUT = "without a corpus of its own validation reads documents that training holds out, in training.format"
SMALLEST_WEIGHT = 10000  # parts of the sum: a mixture rounds weights to parts of somewhat more rows
_MOST_CHOICES = 16  # in one message
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
_PP, _CP, _TP, _EP, _ETP = (
    f"parallelism.{axis}_parallel_degree" for axis in ("pipeline", "context", "tensor", "expert", "expert_tensor")
)
DPO = "torchtitan_graph.goals.dpo"
_PARTS = "parallelism.module_fqns_per_model_part"
# What makes a run another run, where it changes between a start and a resume; job.allow_changed names exceptions.
RUN_DEFINING = (
    "model.name",
    "model.flavor",
    "model.hf_assets_path",
    "model.num_mtp_layers",
    "model.freeze",
    "model.lora.rank",
    "model.lora.alpha",
    "model.lora.rslora",
    "model.lora.base",
    "model.lora.targets",
    "training.step",
    "training.step_options",
    "reference.path",
    "training.dataset",
    "training.dataset_path",
    "training.seq_len",
    "training.dynamic_seq_len",
    "training.dtype",
    "debug.seed",
    "fault_tolerance.semi_sync_method",
)


def check(config: JobConfig, world_size: int) -> list[str]:
    """Check a configuration for `world_size` processes, and return its notices, a line each.

    Raises:
        UserError: options contradict each other or the number of processes; the message lists all of it. Or as
            `check_environment`.
    """
    check_environment()
    if wrong := [*_check_values(config, world_size)]:  # what a file or a command line gives has been checked
        raise UserError(problem_list(wrong))
    problems = [
        *_degrees(config, world_size),
        *_experts(config, world_size),
        *_rows(config),
        *_loss(config),
        *_step(config),
        *_preferences(config),
        *_adapters(config),
        *_tables(config, world_size),
        *_samples(config),
    ]
    problems += [
        *_sources(config),
        *_addresses(config),
        *_columns(config),
        *_validation(config),
        *_optimizer(config),
        *graph.problems(config),
        *checkpoint.problems(config),
        *quantize.problems(config),
        *fault_tolerance.problems(config),
    ]
    if problems:
        raise UserError(problem_list(lines(config, problems)))
    of_tables = (graph, quantize, checkpoint, fault_tolerance)
    notices = [*(problem for table in of_tables for problem in table.notices(config)), *_notices(config)]
    return [*config.notices, *lines(config, notices)]


def check_data(config: JobConfig) -> None:
    """Raise UserError with all that is wrong with the options of the data, whatever the number of processes."""
    if problems := [*_preferences(config), *_sources(config), *_addresses(config), *_columns(config)]:
        raise UserError(problem_list(lines(config, problems)))


def _check_values(config: JobConfig, world_size: int) -> Iterator[str]:
    """Yield a line for each table or value of a configuration built in Python that is not a legal option."""
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
    """Yield a line for each table of a wrong class and each attribute that is not an option."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in vars(config).keys() - known.keys():
        yield f"{prefix}{name} is not an option{did_you_mean(prefix + name, OPTIONS)}"
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
        UserError: it is not a number of ranks.
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
        UserError: one is not a whole number, or a rank is not below its number of processes.
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


def target_of(config: JobConfig) -> "Target":
    """Return the device that a job's graphs are for: in a dry run comm.fake_device, else this process's own."""
    from torchtitan_graph.device import Target  # and torch, which takes seconds to import

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


def _legal_degrees(config: JobConfig, key: str, world_size: int) -> list[int]:
    """Return the values of a degree with which the degrees, the others as they are, multiply to `world_size`."""
    given = {each: getattr(config.parallelism, each) for each in _DEGREES}
    is_inferred = key != _SHARD and given[_SHARD] == -1
    rest = math.prod(value for each, value in given.items() if each != key and value != -1)
    if world_size % rest:
        return []
    return divisors(world_size // rest) if is_inferred else [world_size // rest]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _or(numbers: Sequence[int]) -> str:
    """Return numbers as the choices in a message; of many, the smallest and the largest."""
    words = [str(number) for number in numbers]
    if len(words) > _MOST_CHOICES:
        words = [*words[: _MOST_CHOICES // 2], "...", *words[-_MOST_CHOICES // 2 :]]
    return " or ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def _near(number: int, factor: int) -> str:
    """Return the multiples of a factor next to a number that is not one, for a message."""
    below = number // factor * factor
    return _or([multiple for multiple in (below, below + factor) if multiple])


def _degrees(config: JobConfig, world_size: int) -> Iterator[Problem]:
    degrees = config.parallelism
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
        legal = {key: _legal_degrees(config, key, world_size) for key in _DEGREES if getattr(degrees, key) > 1}
        culprit = next((key for key, values in legal.items() if values), next(iter(legal), _SHARD))
        instead = [f"set it to {_or(legal[culprit])}"] if legal.get(culprit) else []
        if world_size % _other_degrees(config) == 0:
            instead.append(f"set {_SHARD} to -1, which is then {world_size // _other_degrees(config)}")
        count = f"a multiple of {_other_degrees(config)}" if inferred else str(product)
        yield Problem(
            f"parallelism.{culprit}",
            f"the degrees must multiply to the number of processes: {' * '.join(shown)} = {product}, not {world_size};"
            f" {', or '.join([*instead, f'start {count} processes'])}",
        )
    data_degree = degrees.data_parallel_replicate_degree * shards
    microbatch = config.training.local_batch_size * data_degree
    rows = config.training.global_batch_size
    if product == world_size and rows != -1 and rows % microbatch:
        yield Problem(
            "training.global_batch_size",
            f"must be a multiple of training.local_batch_size {config.training.local_batch_size} * data-parallel degree"
            f" {data_degree} = {microbatch}, such as {_near(rows, microbatch)}, or -1",
        )
    replicas = config.fault_tolerance.replicas if config.fault_tolerance.enable else 1
    if rows != -1 and rows < microbatch * replicas and rows % microbatch == 0:
        yield Problem(
            "training.global_batch_size",
            f"has {rows // microbatch} microbatches of {microbatch} rows, and each of fault_tolerance.replicas"
            f" {replicas} needs one: at least {microbatch * replicas}",
        )
    pp, cp = degrees.pipeline_parallel_degree, degrees.context_parallel_degree
    if config.model.num_mtp_layers and max(pp, cp) > 1:
        yield Problem(
            "model.num_mtp_layers",
            "not with pipeline or context parallel, whose ranks lack the next tokens; use data_parallel_shard_degree,"
            " tensor_parallel_degree or expert_parallel_degree",
        )
    if pp > 1 and config.training.local_batch_size % degrees.pipeline_parallel_microbatch_size:
        yield Problem(
            "parallelism.pipeline_parallel_microbatch_size",
            f"must divide training.local_batch_size {config.training.local_batch_size}: set it to"
            f" {_or(divisors(config.training.local_batch_size))}",
        )


def _experts(config: JobConfig, world_size: int) -> Iterator[Problem]:
    degrees, shards = config.parallelism, shard_degree(config, world_size)
    cp, tp = degrees.context_parallel_degree, degrees.tensor_parallel_degree
    ep, etp = degrees.expert_parallel_degree, degrees.expert_tensor_parallel_degree
    if etp not in (1, tp):
        yield Problem(_ETP, f"legal are 1, each expert whole, and {_TP} {tp}")
    ranks = shards * cp * tp
    if ep > 1 and ranks % (ep * etp):
        yield Problem(
            _EP,
            f"experts reuse the ranks of data_parallel_shard_degree {shards} * context_parallel_degree {cp} *"
            f" tensor_parallel_degree {tp} = {ranks}; expert_parallel_degree * expert_tensor_parallel_degree {etp} must"
            f" divide that: set this to {_or(divisors(max(1, ranks // etp)))}",
        )
    near = degrees.ranks_per_machine
    if near is not None and world_size % near and ep > 1 and degrees.expert_exchange == "by_machine":
        yield Problem(
            "parallelism.ranks_per_machine",
            f"{world_size} processes don't fill machines of as many; set it to {_or(divisors(world_size))}",
        )


def _adapters(config: JobConfig) -> Iterator[Problem]:
    model = config.model
    if not model.lora.rank:
        of_lora = [key for key in OPTIONS if key.startswith("model.lora.")]
        adapters = [f"checkpoint.{key}" for key in ("initial_load_adapter", "last_save_adapter")]
        for key in (*of_lora, *adapters):
            if get(config, key) != OPTIONS[key].default:
                yield Problem(key, "there are no adapters while model.lora.rank is 0: set that, or remove this")
        return
    if model.freeze:
        yield Problem("model.freeze", "with model.lora.rank all but the adapters is frozen; remove it")
    if not model.lora.targets:
        yield Problem("model.lora.targets", "names no layer; set it to ['*'] for all, or model.lora.rank to 0")
    if model.converters:
        yield Problem("model.converters", "layers with adapters are not quantised; remove it, or model.lora.rank")


def _rows(config: JobConfig) -> Iterator[Problem]:
    cp, tp = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    for table in ["training"] + ["validation"] * config.validation.enable:
        key, rows = f"{table}.seq_len", f"{table}.local_batch_size"
        if table == "training" and config.parallelism.pipeline_parallel_degree > 1:
            rows = "parallelism.pipeline_parallel_microbatch_size"
        seq_len = get(config, key)
        if (tokens := seq_len * get(config, rows)) > MOST_TOKENS:
            yield Problem(
                key,
                f"times {rows} = {get(config, rows)} these are {tokens:,} tokens at a time, and {MOST_TOKENS:,} are the"
                " most; use shorter rows or fewer of them",
            )
        if cp > 1 and seq_len % (2 * cp):
            yield Problem(
                key,
                f"context parallel's zigzag sharding needs a multiple of 2 * {_CP} {cp} = {2 * cp},"
                f" such as {_near(seq_len, 2 * cp)}",
            )
        elif seq_len % (cp * tp):
            needed = f"{_CP} {cp} * {_TP} {tp} = {cp * tp}" if cp > 1 else f"{_TP} {tp}"
            yield Problem(key, f"sequence parallel needs a multiple of {needed}, such as {_near(seq_len, cp * tp)}")


def _loss(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of a loss of the user's."""
    if "." not in config.loss.name:
        return
    why = f"only cross entropy has it, and loss.name = {config.loss.name} computes what it wants; leave it at 0"
    yield from unused(config, why, "loss.label_smoothing", "loss.z_loss")
    if config.training.loss_chunks > 1:
        yield Problem(
            "training.loss_chunks", f"not with loss.name = {config.loss.name}, which sees all logits; set it to 1"
        )


def _step(config: JobConfig) -> Iterator[Problem]:
    """Yield what a step of the user's, and its reference model, don't go together with."""
    training = config.training
    if training.step is None:
        yield from unused(config, "there is no step to take them; set training.step", "training.step_options")
        if config.reference.path is not None:
            yield Problem("reference.path", "only a training.step reads a reference model; set that, or remove this")
        return
    option = f"training.step = {training.step}"
    of_loss = ("loss.name", "loss.label_smoothing", "loss.z_loss")
    yield from unused(config, f"{option} computes the loss itself; remove it", *of_loss)
    if training.loss_chunks > 1:
        yield Problem("training.loss_chunks", f"not with {option}, which sees all logits; set it to 1")
    if config.parallelism.pipeline_parallel_degree > 1:
        yield Problem(
            _PP,
            f"not with {option}, which runs whole models, and a stage has a part of the layers; use"
            " data_parallel_shard_degree or tensor_parallel_degree",
        )
    if config.model.num_mtp_layers:
        yield Problem(
            "model.num_mtp_layers", f"not with {option}: the loss of further tokens is cross entropy; set it to 0"
        )


def _preferences(config: JobConfig) -> Iterator[Problem]:
    """Yield what preferences don't go together with."""
    training, key = config.training, "training.format"
    if training.step == DPO and training.format != "preference":
        yield Problem("training.step", "compares the two answers of preferences; set training.format = preference")
    formats = {source.format for source in training.sources if source.format is not None}
    if training.format != "preference":
        if "preference" in formats:
            yield Problem(key, "an entry of training.sources holds preferences: set this to preference")
        return
    if others := formats - {"preference"}:
        yield Problem(
            "training.sources", f"preferences are mixed with preferences alone, not with {', '.join(sorted(others))}"
        )
    if training.step is None:
        yield Problem(
            key,
            f"preferences are learned by a step that compares two answers; set training.step = {DPO}",
        )
    if config.parallelism.context_parallel_degree > 1:
        yield Problem(
            _CP,
            "not with training.format = preference: an answer's log-probability is a sum over its tokens, and a rank"
            " has a part of them; use data_parallel_shard_degree or tensor_parallel_degree",
        )
    why = "not with training.format = preference, which"
    if training.one_document_per_row:
        yield Problem("training.one_document_per_row", f"{why} has two documents in a row; set it to false")
    if training.loss_on != "assistant":
        yield Problem("training.loss_on", f"{why} is learned by its answers alone; leave it at assistant")


def _tables(config: JobConfig, world_size: int) -> Iterator[Problem]:
    is_dry = config.comm.mode == "fake_backend"
    if unknown := [key for key in config.job.allow_changed if key not in RUN_DEFINING]:
        yield Problem(
            "job.allow_changed",
            f"{one_line(', '.join(unknown))} may change anyway, or is unknown; legal are {', '.join(RUN_DEFINING)}",
        )
    if config.debug.verify_passes and is_dry:
        yield Problem(
            "debug.verify_passes",
            "a dry run sends nothing, so there are no numbers to compare; remove it, or comm.mode = fake_backend",
        )
    if is_dry and config.comm.fake_rank >= world_size:
        yield Problem(
            "comm.fake_rank", f"must be from 0 to {world_size - 1}, as NGPU, the number of ranks, is {world_size}"
        )


def _samples(config: JobConfig) -> Iterator[Problem]:
    """Yield what samples can't be written with: their forward pass has all layers, whole rows and plain weights."""
    if not config.samples.prompts:
        return
    instead = "leave the prompts out, and run python -m torchtitan_graph.generate on the run's checkpoints"
    for key, what in ((_PP, "a stage has a part of the layers"), (_CP, "a rank has a part of each row")):
        if get(config, key) > 1:
            yield Problem("samples.prompts", f"not with {key} = {get(config, key)}: {what}; {instead}")
    if config.model.converters:
        yield Problem("samples.prompts", f"not with model.converters = {brief(config.model.converters)}; {instead}")


def _sources(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of a mixture of corpora."""
    validation, sources, key = config.validation, config.training.sources, "training.sources"
    if not sources:
        return
    for alone in ("training.dataset", "training.dataset_path"):
        if is_set(config, alone):
            yield Problem(alone, "is not used with training.sources; make it an entry there")
    if config.training.epochs:
        yield Problem("training.epochs", "each of training.sources repeats by itself; remove it")
    corpora: Sequence[Validation | ValidationSet] = validation.sets or [validation]
    held_out = [each for each in corpora if not (each.dataset or each.dataset_path)]
    if validation.enable and any((validation.steps if x.steps is None else x.steps) == -1 for x in held_out):
        yield Problem(
            "validation.steps",
            "the sources of a mixture don't end together; set a number of microbatches, or name one corpus in"
            " validation.dataset or validation.dataset_path",
        )
    for number, source in enumerate(sources, 1):
        if not source.dataset and not source.dataset_path:
            yield Problem(key, f"entry {number}: needs dataset or dataset_path")
    total = sum(source.weight for source in sources)
    if not 0 < total < math.inf or any(0 < source.weight < total / SMALLEST_WEIGHT for source in sources):
        yield Problem(key, f"each weight must be 0 or at least 1/{SMALLEST_WEIGHT} of their sum")
    names = [source_name(source) for source in sources]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield Problem(key, f"several entries are called {', '.join(repeated)}; give each a name of its own")


def _addresses(config: JobConfig) -> Iterator[Problem]:
    """Yield the corpora at addresses that can't be opened here; nothing is opened."""
    training, validation = config.training, config.validation
    named: list[tuple[str, str, Any]] = [
        ("training.dataset_path", "", training),
        ("validation.dataset_path", "", validation),
    ]
    named += [("training.sources", f"entry {i}: ", each) for i, each in enumerate(training.sources, 1)]
    named += [("validation.sets", f"entry {i}: ", each) for i, each in enumerate(validation.sets, 1)]
    for key, entry, each in named:
        path = each.dataset_path
        if path is not None and is_address(path) and (problem := find_bad_address(path)):
            yield Problem(key, f"{entry}{problem}")


def _columns(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the columns that rows are read by."""
    training = config.training
    if wrong := find_wrong_column(training.columns, training.format):
        yield Problem("training.columns", wrong)
    for number, source in enumerate(training.sources, 1):
        if wrong := find_wrong_column(source.columns, source.format):
            yield Problem("training.sources", f"entry {number}: columns: {wrong}")
    validation = config.validation
    if wrong := find_wrong_column(validation.columns, validation.format):
        yield Problem("validation.columns", wrong)
    if validation.dataset is None and validation.dataset_path is None and not validation.sets:
        for key in ("validation.format", "validation.columns"):
            if is_set(config, key):
                yield Problem(key, f"{_HELD_OUT}; set validation.dataset_path or dataset, or remove it")
    for number, each in enumerate(validation.sets, 1):
        if wrong := find_wrong_column(each.columns, each.format):
            yield Problem("validation.sets", f"entry {number}: columns: {wrong}")
        if (each.format is not None or each.columns) and each.dataset is None and each.dataset_path is None:
            yield Problem(
                "validation.sets", f"entry {number}: format, columns: {_HELD_OUT}; give it a dataset_path or dataset"
            )


def _validation(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of validation's sets, and of what its best value decides."""
    validation, key, metrics = config.validation, "validation.sets", validation_metrics(config)
    for alone in ("validation.dataset", "validation.dataset_path", "validation.format", "validation.columns"):
        if validation.sets and is_set(config, alone):
            yield Problem(alone, f"is not used with {key}; make it an entry there")
    if repeated := sorted({name for name in metrics if metrics.count(name) > 1}):
        named = ", ".join(name.partition("/")[2] for name in repeated)
        yield Problem(key, f"several entries are called {named}; give each a name of its own")
    best = validation.best_metric
    if best is not None and best not in metrics:
        yield Problem(
            "validation.best_metric",
            f"is not a metric of validation; legal are {', '.join(metrics)}{did_you_mean(best, metrics)}",
        )
    for decided in ("validation.patience", "checkpoint.keep_best"):
        if get(config, decided) and not validation.enable:
            yield Problem(decided, "nothing is validated; set validation.enable = true")


def _optimizer(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of options of one optimizer that is not the chosen one."""
    optimizer, name = config.optimizer, config.optimizer.name
    for key in ("state_dtype", "ema_decay"):
        if "." in name and getattr(optimizer, key) is not None:
            yield Problem(
                f"optimizer.{key}", f"a class of your own, {name}, makes its state itself; remove it, or use AdamW"
            )
    if name == "Muon" and optimizer.implementation != "fused":
        yield Problem("optimizer.implementation", "Muon's AdamW is fused; remove it")
    if name != "Muon" and any(entry.name is not None for entry in optimizer.param_groups):
        yield Problem("optimizer.param_groups", f"name: is for optimizer.name = Muon, not {name}; remove it")


def _last_factor(schedule: LRScheduler, total_steps: int) -> float:
    """Return the part of the peak that the learning rate keeps after the schedule's end; see optim/schedule.py."""
    after_warmup = max(0, total_steps - schedule.warmup_steps)
    part = 1.0 if schedule.decay_ratio is None else schedule.decay_ratio
    return schedule.min_lr_factor if min(round(part * total_steps), after_warmup) else 1.0


def check_length(config: JobConfig, steps: int) -> list[str]:
    """Return notices of options that don't fit the run's number of steps, known once its epochs' rows are."""
    return lines(config, _of_length(config, steps, f"{steps:,} steps"))


def _of_length(config: JobConfig, steps: int, in_words: str) -> Iterator[Problem]:
    """Yield a schedule that ends before the run, and each number of steps that is longer than it, so that what it
    spaces never happens."""
    total_steps, profiling = config.lr_scheduler.total_steps, config.profiling
    if total_steps is not None and total_steps < steps:
        rate = config.optimizer.lr * _last_factor(config.lr_scheduler, total_steps)
        then = f"stays at {rate:g}" if rate else "is 0, and nothing is learned"
        yield Problem(
            "lr_scheduler.total_steps",
            f"the schedule ends before {in_words}; from step {total_steps + 1} on the learning rate {then}",
        )
    never = {
        "profiling.profile_freq": (
            "nothing is profiled",
            profiling.enable_profiling or profiling.enable_memory_snapshot,
        ),
        "metrics.histogram_freq": ("no histogram is written", config.metrics.enable_tensorboard),
        "checkpoint.keep_every": ("no checkpoint is kept for good", config.checkpoint.enable),
    }
    for key, (what, is_on) in never.items():
        if is_on and get(config, key) > steps:
            yield Problem(key, f"{what}, for the run has {in_words}: set it to at most that")


def _notices(config: JobConfig) -> Iterator[Problem]:
    """Yield each option that is set and has no effect, or one that may surprise."""
    if not config.training.epochs:  # else the number of steps is not known yet: see check_length
        yield from _of_length(config, steps := config.training.steps, f"training.steps {steps}")
    degrees, stages = config.parallelism, [key for key in OPTIONS if key.startswith(f"{_PP.removesuffix('degree')}")]
    if degrees.expert_tensor_parallel_degree > 1 and degrees.expert_parallel_degree == 1:
        yield Problem(_ETP, f"experts are split as all else while {_EP} is 1")
    if degrees.expert_parallel_degree == 1:
        exchange = [f"parallelism.{key}" for key in ("expert_exchange", "exchange_sums", "exchange_dtype")]
        yield from unused(
            config, f"no tokens are exchanged while {_EP} is 1", *exchange, "parallelism.ranks_per_machine"
        )
    elif degrees.expert_exchange == "direct":
        direct = "has no effect while parallelism.expert_exchange is direct; set that to by_machine"
        yield from unused(config, direct, "parallelism.exchange_sums", "parallelism.ranks_per_machine")
    is_v = degrees.pipeline_parallel_schedule == "DualPipeV" or degrees.pipeline_parallel_schedule_csv is not None
    if degrees.pipeline_parallel_degree > 1 and degrees.overlap_microbatches == "auto" and not is_v:
        yield Problem(
            "parallelism.overlap_microbatches",
            f"pipeline_parallel_schedule {degrees.pipeline_parallel_schedule} runs no forward alongside a backward;"
            " take DualPipeV for pairs",
        )
    if degrees.pipeline_parallel_degree == 1:
        yield from unused(config, f"there are no stages while {_PP} is 1", *stages, _PARTS)
    elif degrees.module_fqns_per_model_part:
        less = [key for key in stages if key.endswith("_less_layers")]
        yield from unused(config, f"{_PARTS} says what each stage has", *less)
    if config.optimizer.name != "Muon":
        keys = [key for key in OPTIONS if key.startswith("optimizer.muon.")]
        yield from unused(config, f"optimizer.name is {config.optimizer.name}, not Muon", *keys)
    if not config.metrics.enable_tensorboard:
        no_histograms = "there are no histograms while metrics.enable_tensorboard is false"
        yield from unused(config, no_histograms, "metrics.histogram_freq")
    if not config.validation.enable:
        yield from unused(config, "nothing is validated while validation.enable is false", "validation.sets")
    if not config.validation.patience and not config.checkpoint.keep_best:
        needless = "decides nothing while validation.patience is 0 and checkpoint.keep_best is false"
        yield from unused(config, needless, "validation.best_metric")
    if not config.model.num_mtp_layers:
        yield from unused(config, "there is no such loss while model.num_mtp_layers is 0", "training.mtp_loss_weight")
    if not builds_on_weights(config):
        needless = "nothing needs trained weights: there are no adapters, frozen parts or preferences"
        yield from unused(config, needless, "model.random_base")
    elif loads_weights(config):
        yield from unused(config, "weights are loaded; remove it", "model.random_base")
    if not config.samples.prompts:
        of_samples = [key for key in OPTIONS if key.startswith("samples.")]
        yield from unused(config, "there are no samples while samples.prompts is empty", *of_samples)
    if config.comm.mode != "fake_backend":
        yield from unused(config, "only a dry run, comm.mode = fake_backend, builds another rank", "comm.fake_rank")
        only_dry = "only a dry run, comm.mode = fake_backend, estimates for another device"
        yield from unused(config, only_dry, "comm.fake_device")
