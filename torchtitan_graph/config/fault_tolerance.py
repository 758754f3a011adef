"""Checks of [fault_tolerance]."""

import importlib.util
from collections.abc import Iterator

from torchtitan_graph.config.job import OPTIONS, JobConfig, Problem, unused
from torchtitan_graph.errors import UserError

_TABLE = "fault_tolerance"
AUTO = "auto"  # a lighthouse where the dump folder says
PACKAGE = "torchft==0.2.0"


def problems(config: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the options of replica groups."""
    table = config.fault_tolerance
    if not table.enable:
        return
    if table.min_replicas > table.replicas:
        yield Problem(f"{_TABLE}.min_replicas", f"there are {table.replicas} (fault_tolerance.replicas)")
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


def check_member(config: JobConfig) -> None:
    """Raise UserError if this process, a rank of a replica group, does not know which one, or torchft is missing."""
    table = config.fault_tolerance
    if not table.enable:
        return
    if table.replica is None:
        raise UserError(
            "fault_tolerance.enable = true: start the run by python -m torchtitan_graph.launch (run_train.sh calls it),"
            " which starts all replica groups; or set fault_tolerance.replica and fault_tolerance.lighthouse"
        )
    check_package()


def check_package() -> None:
    """Raise UserError if torchft is missing."""
    if importlib.util.find_spec("torchft") is None:
        raise UserError(f"fault_tolerance.enable = true: needs torchft: pip install {PACKAGE}")


def notices(config: JobConfig) -> Iterator[Problem]:
    """Yield options of replica groups that have no effect."""
    if not config.fault_tolerance.enable:
        of_scripts = ("enable", "replica", "lighthouse")  # a script sets them for any job of an array
        others = [f"{_TABLE}.{name}" for name in of_scripts]
        keys = [key for key in OPTIONS if key.startswith(f"{_TABLE}.") and key not in others]
        yield from unused(config, "there are no replica groups while fault_tolerance.enable is false", *keys)
