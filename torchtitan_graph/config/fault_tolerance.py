"""Checks of [fault_tolerance]."""

import importlib.util
from collections.abc import Iterator

from torchtitan_graph.config.job import OPTIONS, FaultTolerance, JobConfig, Problem, unused
from torchtitan_graph.errors import UserError

_TABLE = "fault_tolerance"
AUTO = "auto"  # a lighthouse where the dump folder says
PACKAGE = "torchft==0.2.0"
_OF_DILOCO = (
    *("num_fragments", "fragment_sync_delay", "fragment_update_alpha", "should_quantize"),
    *("outer_lr", "outer_momentum", "outer_nesterov"),
)


def problems(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the options of replica groups."""
    table = config.fault_tolerance
    if not table.enable:
        return
    if table.min_replicas > table.replicas:
        yield Problem(
            f"{_TABLE}.min_replicas",
            f"there are {table.replicas} (fault_tolerance.replicas): must be from 1 to {table.replicas}",
        )
    if table.replica is not None and table.replica >= table.replicas:
        yield Problem(f"{_TABLE}.replica", f"must be from 0 to {table.replicas - 1} (fault_tolerance.replicas)")
    address = table.lighthouse or AUTO
    if address != AUTO and not 0 < int(address.rpartition(":")[2]) < 2**16:
        yield Problem(f"{_TABLE}.lighthouse", "its port must be from 1 to 65535")
    if table.replica is not None and table.lighthouse is None:
        yield Problem(
            f"{_TABLE}.replica",
            "one group alone is started: set fault_tolerance.lighthouse too, to auto or an address; leave both out, and"
            " python -m torchtitan_graph.launch starts all groups on this machine",
        )
    if table.replica is None and table.lighthouse is not None:
        yield Problem(f"{_TABLE}.lighthouse", "say which group is started here, in fault_tolerance.replica")
    if config.moe.load_balance_loss and config.moe.load_balance_over == "batch":
        yield Problem(
            "moe.load_balance_over",
            "batch: not with fault_tolerance.enable, for that loss needs the loads of all replicas in the middle of the"
            " step; set it to sequence",
        )
    if config.quantize.linear.float8.recipe_name == "tensorwise_delayed" and "float8" in config.model.converters:
        yield Problem(
            "quantize.linear.float8.recipe_name",
            "not with fault_tolerance.enable, for replicas would scale by histories of their own; take tensorwise",
        )
    if config.parallelism.pipeline_parallel_schedule_csv is not None:
        yield Problem(
            "parallelism.pipeline_parallel_schedule_csv",
            "not with fault_tolerance.enable, for it has one number of microbatches, and a replica takes more where"
            " fewer live; take pipeline_parallel_schedule",
        )
    if "." in config.optimizer.name:
        yield Problem(
            "optimizer.name",
            "not with fault_tolerance.enable: a class of your own makes its state in its first step, and a group that"
            " returns has to receive it before; take AdamW, Adam or Muon",
        )
    if config.training.enable_cpu_offload:
        yield Problem(
            "training.enable_cpu_offload", "not with fault_tolerance.enable: gradients are summed where they are"
        )
    for key in ("remote_folder", "initial_load_path"):
        if "://" in (getattr(config.checkpoint, key) or ""):
            yield Problem(
                f"checkpoint.{key}",
                "not with fault_tolerance.enable, for all groups would fetch it into one folder; name a folder that"
                " they share, and copy checkpoints from there",
            )
    if config.training.roll_back_after:
        yield Problem(
            "training.roll_back_after",
            "not with fault_tolerance.enable: replicas could go back to different checkpoints; set it to 0",
        )
    if table.semi_sync_method is not None:
        yield from _problems_in_rounds(config)


def _problems_in_rounds(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of groups that meet after several steps."""
    table, method = (
        config.fault_tolerance,
        f"fault_tolerance.semi_sync_method = {config.fault_tolerance.semi_sync_method}",
    )
    steps, fragments, checkpoint = table.sync_steps, table.num_fragments, config.checkpoint
    if method.endswith("diloco"):
        if steps % fragments:
            legal = ", ".join(str(n) for n in range(1, min(steps, 100) + 1) if steps % n == 0)
            yield Problem(f"{_TABLE}.num_fragments", f"must divide sync_steps = {steps}: {legal}")
        elif table.fragment_sync_delay >= steps // fragments:
            most = steps // fragments - 1
            yield Problem(
                f"{_TABLE}.fragment_sync_delay",
                f"must be at most {most}: a synchronisation comes every {most + 1} steps (sync_steps / num_fragments)",
            )
        if table.fragment_update_alpha == 1:
            yield Problem(f"{_TABLE}.fragment_update_alpha", "1 keeps each group's own parameters: take less than 1")
        if table.outer_lr == 0:
            yield Problem(f"{_TABLE}.outer_lr", "0 would train nothing: take more; 0.7 is the paper's")
    periods = {"training.steps": config.training.steps}
    if checkpoint.enable and not checkpoint.load_only:
        periods |= {"checkpoint.interval": checkpoint.interval, "checkpoint.keep_every": checkpoint.keep_every}
        if checkpoint.keep_best:
            periods["validation.freq"] = config.validation.freq
    for key, number in periods.items():
        if number % steps:
            nearest = max(steps, round(number / steps) * steps)
            yield Problem(
                key,
                f"must be a multiple of fault_tolerance.sync_steps = {steps}, for groups are saved and end where they"
                f" have met: such as {nearest}",
            )
    refused = {
        "checkpoint.interval_minutes": (checkpoint.interval_minutes, "saves where groups have not met; set it to 0"),
        "checkpoint.remote_folder": (
            checkpoint.remote_folder,
            "is one address, and each group has checkpoints of its own; leave it out, and copy their folders",
        ),
        "validation.patience": (
            config.validation.enable and config.validation.patience,
            "groups validate parameters of their own, and would end after different steps; set it to 0",
        ),
        "training.epochs": (
            config.training.epochs,
            "a group that trains alone does not know where the others' data ends; set it to 0, and training.steps to"
            " the steps of so many epochs",
        ),
        "optimizer.ema_decay": (
            config.optimizer.ema_decay,
            "groups would average parameters of their own, and an average is never synchronised; leave it out",
        ),
    }
    for key, (value, why) in refused.items():
        if value:
            yield Problem(key, f"not with {method}: {why}")


def check_member(config: JobConfig) -> None:
    """Raise UserError if this process, a rank of a replica group, does not know which one, or torchft is missing."""
    table = config.fault_tolerance
    if not table.enable:
        return
    if table.replica is None:
        raise UserError(
            "fault_tolerance.enable = true: start the run by python -m torchtitan_graph.launch (run_train.sh calls it),"
            " which starts all replica groups; under SLURM submit a job array with a group in each element (sbatch"
            " --array=0-1); or set fault_tolerance.replica and fault_tolerance.lighthouse"
        )
    check_here(table)


def check_here(table: FaultTolerance) -> None:
    """Raise UserError if replica groups can't run on this machine: torchft is missing, or what an option needs."""
    check_package()
    if table.semi_sync_method == "diloco" and table.should_quantize:
        _check_quantizes()


def _check_quantizes() -> None:
    """Raise UserError if torchft can't quantize here: it would send the numbers as they are, without a word."""
    from torchtitan_graph.device import device_type

    lacking = "a GPU" if device_type() != "cuda" else "Triton" if importlib.util.find_spec("triton") is None else ""
    if lacking:
        raise UserError(f"fault_tolerance.should_quantize = true: needs {lacking}; set it to false")


def check_package() -> None:
    """Raise UserError if torchft is missing."""
    if importlib.util.find_spec("torchft") is None:
        raise UserError(
            f"fault_tolerance.enable = true: needs torchft: pip install {PACKAGE} (PyPI has it for Linux on x86_64;"
            " from source it needs Rust)"
        )


def notices(config: JobConfig) -> Iterator[Problem]:
    """Yield options of replica groups that have no effect."""
    if not config.fault_tolerance.enable:
        of_scripts = ("enable", "replica", "lighthouse")  # a script sets them for any job of an array
        others = [f"{_TABLE}.{name}" for name in of_scripts]
        keys = [key for key in OPTIONS if key.startswith(f"{_TABLE}.") and key not in others]
        yield from unused(config, "there are no replica groups while fault_tolerance.enable is false", *keys)
        return
    method = config.fault_tolerance.semi_sync_method
    if method is None:
        keys = [f"{_TABLE}.{name}" for name in ("sync_steps", *_OF_DILOCO)]
        yield from unused(config, "replicas meet in every step while semi_sync_method is not set", *keys)
    elif method == "local_sgd":
        keys = [f"{_TABLE}.{name}" for name in _OF_DILOCO]
        yield from unused(config, "is about semi_sync_method = diloco alone", *keys)
    elif config.fault_tolerance.outer_nesterov and not config.fault_tolerance.outer_momentum:
        yield Problem(f"{_TABLE}.outer_nesterov", "without effect: there is no momentum (outer_momentum)")
