"""The entry point: `torchrun -m torchtitan_graph.train --job.config_file F`; plain `python -m` is one process."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_graph import device as devices
from torchtitan_graph.compiler import check_disabled
from torchtitan_graph.config import JobConfig, check, dump_toml, load
from torchtitan_graph.graph.torch_private import init_fake_process_group
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.trainer import NonFiniteError, Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say. Returns the exit code: 0 done, 2 something to change, 3 non-finite numbers."""
    begin = time.perf_counter()
    init_logging()
    try:
        config = load(sys.argv[1:] if argv is None else argv)
        fake = config.comm.mode == "fake_backend"
        world_size = int(os.environ.get("NGPU" if fake else "WORLD_SIZE", "1"))
        init_logging(color=not config.metrics.disable_color_printing)
        for notice in check(config, world_size):
            logger.warning(notice) if _is_rank_0() else None
        check_disabled(config.compile.disable_passes)
        trainer = Trainer(config, world_size)
        _start(config, world_size, fake)
        try:
            if fake:
                _dry_run(trainer, begin)
                return 0
            trainer.setup()
        except ValueError:
            dist.destroy_process_group()
            raise
    except ValueError as error:
        return _report(error, 2)
    # From here on a ValueError is no setting to change but a fault, which is best told with its traceback.
    try:
        trainer.train()
        dist.barrier()  # gloo aborts a rank whose peer tears down while it still listens
    except NonFiniteError as error:
        return _report(error, 3)
    finally:
        dist.destroy_process_group()
    return 0


def _report(error: Exception, code: int) -> int:
    """Log what the user has to change: the message says it all, a traceback would bury it."""
    logger.error(str(error))
    if not _is_rank_0():
        # torchrun ends all ranks as soon as one exits, and mostly rank 0's output is shown: it reports first.
        time.sleep(30)
    return code


def _start(config: JobConfig, world_size: int, fake: bool) -> None:
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)
    torch.manual_seed(config.debug.seed or 0)
    if fake:
        init_fake_process_group(world_size)
        return
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # plain python: one process
    if devices.device_type() == "cuda":
        torch.cuda.set_device(devices.device())
    dist.init_process_group(
        "nccl" if devices.device_type() == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=config.comm.init_timeout_seconds),
    )
    if dist.get_rank() == 0 and config.job.save_config_file:
        path = Path(config.job.dump_folder) / config.job.save_config_file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dump_toml(config))
        except OSError as error:
            raise ValueError(f"job.dump_folder = {config.job.dump_folder!r}: can't be written to: {error}") from error
    if config.job.print_config and dist.get_rank() == 0:
        logger.info(f"configuration:\n{dump_toml(config)}")
    logger.info(f"{config.job.description}: {world_size} processes on {devices.device_type()}")


def _dry_run(trainer: Trainer, begin: float) -> None:
    """Build rank 0's graphs of a job of any size, and say what they cost; nothing is allocated, sent or trained."""
    trainer.setup_dry()
    logger.info(
        f"dry run of {dist.get_world_size()} ranks done in {time.perf_counter() - begin:.1f} s, "
        f"peak memory of this process {devices.peak_memory_gib():.2f} GiB"
    )


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
