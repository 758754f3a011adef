"""The configuration of a run: options, TOML files, the command line, and all checks on them."""

from torchtitan_graph.config.beginning import check_beginning
from torchtitan_graph.config.check import (
    check,
    check_data,
    check_length,
    ranks_asked_for,
    ranks_started,
    shard_degree,
    smallest_world,
    target_of,
)
from torchtitan_graph.config.dump import dump_toml
from torchtitan_graph.config.job import JobConfig, run_folder
from torchtitan_graph.config.load import DRY, load, read_beside

__all__ = [
    "DRY",
    "JobConfig",
    "check",
    "check_data",
    "check_length",
    "check_beginning",
    "dump_toml",
    "load",
    "ranks_asked_for",
    "ranks_started",
    "read_beside",
    "run_folder",
    "shard_degree",
    "smallest_world",
    "target_of",
]
