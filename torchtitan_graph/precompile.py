"""Trace and rewrite a job's graphs before it runs: `python -m torchtitan_graph.precompile`, then train with the same
options.

    NGPU=64 python -m torchtitan_graph.precompile --job.config_file F --compile.precompiled FOLDER
    torchrun ... -m torchtitan_graph.train        --job.config_file F --compile.precompiled FOLDER

One process writes the graphs of all NGPU ranks. The machine needs a device of the kind that the job trains on, but no
other rank, no data and no memory for parameters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.command import command
from torchtitan_graph.config import JobConfig, check, load, ranks_asked_for
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.steps.choices import check_disabled
from torchtitan_graph.steps.precompiled import AXES, Writer, ranks_to_trace
from torchtitan_graph.torch_private.distributed import init_fake_process_group


@command
def main(argv: Sequence[str]) -> int:
    """Write the graphs of all ranks. Return the exit code: 0 done, 2 something to change."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        print("Options are those of python -m torchtitan_graph.train --help.")
        return 0
    config, world_size = load(argv), ranks_asked_for() or 1
    for notice in check(config, world_size):
        logger.warning(notice)
    check_disabled(config.compile.disable_passes)
    precompile(config, world_size)
    return 0


def precompile(config: JobConfig, world_size: int) -> None:
    """Write the graphs of all ranks of a job to its `compile.precompiled`.

    Raises:
        UserError: that is not set, or the job can't be built or stored.
    """
    if config.compile.precompiled is None:
        raise UserError("compile.precompiled is not set: say in which folder the graphs are to be written")
    folder, config.compile.precompiled = Path(config.compile.precompiled), None
    config.comm.mode = "fake_backend"  # nothing is sent, nothing is loaded
    begin, writer = time.perf_counter(), None
    target = Target.here(runs=False)  # not the one that a dry run would estimate for
    blueprint = Blueprint(config, world_size, target)
    ranks = ranks_to_trace(blueprint.dims)
    for number, (place, rank) in enumerate(ranks.items(), start=1):
        blueprint = blueprint if number == 1 else Blueprint(config, world_size, target)
        writer = writer or Writer(folder, blueprint.fingerprint())
        init_fake_process_group(world_size, rank)
        try:
            writer.add(place, blueprint.precompile())
        finally:
            dist.destroy_process_group()
        where = ", ".join(f"{axis} {i}" for axis, i in zip(AXES, place, strict=True))
        logger.info(f"graphs {number} of {len(ranks)}, of ranks at {where}: {time.perf_counter() - begin:.1f} s")
    assert writer is not None
    writer.finish()
    if config.compile.optimizer_in_graph:
        logger.info("compile.optimizer_in_graph: that graph is not stored; each run traces it in its first step")
    logger.info(
        f"{folder}: {writer.num_different} different graphs for {world_size} ranks, {writer.num_bytes / 2**20:.2f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
