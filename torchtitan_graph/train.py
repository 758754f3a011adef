"""The entry point: `torchrun -m torchtitan_graph.train --job.config_file F`; plain `python -m` is one process."""

from __future__ import annotations

from torchtitan_graph import stop
from torchtitan_graph.transient import is_lost_peer, is_transient

if __name__ == "__main__":
    stop.install()  # before importing torch, which takes seconds

import datetime
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from torchtitan_graph import device as devices
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.checkpoint import SaveError, is_new_run
from torchtitan_graph.checkpoint.folder import checkpoint_folder
from torchtitan_graph.config import JobConfig, check, check_beginning, load, ranks_asked_for, ranks_started, run_folder
from torchtitan_graph.config.fault_tolerance import check_member
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.parallel.join import join, meet
from torchtitan_graph.patience import retry_io
from torchtitan_graph.replica_trainer import make_trainer
from torchtitan_graph.run.failure import (
    CONFIGURATION,
    FAULT,
    FOLDER_LOST,
    NON_FINITE,
    SAVE_FAILED,
    STORAGE_UNAVAILABLE,
    NotTriedAgain,
    refuse_to_repeat,
    report_to_launcher,
    write_failure,
)
from torchtitan_graph.run.folder import RunFolder, check_place
from torchtitan_graph.run.hang import set_up_flight_recorder
from torchtitan_graph.run.status import FAILED, FINISHED, STOPPED
from torchtitan_graph.steps.choices import check_disabled
from torchtitan_graph.torch_private.distributed import init_fake_process_group
from torchtitan_graph.trainer import NonFiniteError

EXIT_CODES: dict[type, int] = {UserError: CONFIGURATION, NonFiniteError: NON_FINITE, SaveError: SAVE_FAILED}


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the configuration of the arguments. Return the exit code.

    0 done, 2 something to change, 3 non-finite numbers, 4 a checkpoint could not be saved, 6 storage was unavailable,
    128 + N ended by signal N. Where the run's folder is lost, the process ends here with 7.
    """
    is_called_from_python = stop.install()
    try:
        return _main(argv)
    finally:
        if is_called_from_python:
            stop.restore()


def _main(argv: Sequence[str] | None) -> int:
    begin = time.perf_counter()
    stop.begin_setup()
    init_logging()
    folder: Path | None = None  # known once the configuration is
    run: RunFolder | None = None
    try:
        config = load(sys.argv[1:] if argv is None else argv)
        fake = config.comm.mode == "fake_backend"
        place = retry_io(lambda: check_place(str(run_folder(config))))
        folder = None if fake else place  # a dry run writes nothing there
        if folder is not None:
            refuse_to_repeat(folder)
        world_size = (ranks_asked_for() or 1) if fake else ranks_started()
        notices = check(config, world_size)
        check_disabled(config.compile.disable_passes)
        for notice in notices:
            logger.warning(notice) if _is_rank_0() else None
        if not fake:
            check_member(config)
            check_beginning(config, retry_io(lambda: is_new_run(checkpoint_folder(config), config.checkpoint)))
        blueprint = retry_io(partial(Blueprint, config, world_size))
        config = blueprint.config  # resolved: what is compared with an earlier start of the run, and saved
        start_process(config, world_size, fake)
        if fake:
            _dry_run(blueprint, begin)
            return 0
        run = RunFolder(config)
        trainer = make_trainer(blueprint)
        run.save_config(config)
        trainer.train(run)
        meet()  # gloo aborts a rank whose peer tears down while it still listens
        if trainer.stop_signal:
            reason = stop.name(trainer.stop_signal)
            logger.info(f"stopped by {reason} after step {trainer.step}; {_started_again(config)}")
        run.close(*(STOPPED, reason) if trainer.stop_signal else (FINISHED, ""))
    except SystemExit:  # of --help
        raise
    except stop.Stopped:
        return _end(stop.Stopped(stop.message()), stop.exit_code(), folder, run)
    except FolderLost as error:
        _end_without_folder(error)
    except BaseException as error:
        stop.restore()
        stop.begin_teardown()
        _leave_group()
        code = exit_code(error)
        if code == STORAGE_UNAVAILABLE:
            logger.error("storage is unavailable; start the run again once it is back, and it resumes")
        return _end(error, code, folder, run)
    stop.begin_teardown()
    _leave_group()
    return 0


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that ends with an error."""
    if isinstance(error, NotTriedAgain):
        return error.code
    if is_transient(error):
        return STORAGE_UNAVAILABLE
    if is_lost_peer(error):  # whatever became of it: it is nothing that the user, or this rank, can change
        return FAULT
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), FAULT)


def _end_without_folder(error: FolderLost) -> NoReturn:
    """Report why this rank ends, and end it at once. Nothing is written to the run's folder; and a thread may hang in
    it, for which Python would wait."""
    if not report_to_launcher(error, FOLDER_LOST):
        logger.error(str(error))
        if not _is_rank_0():
            time.sleep(2)  # as in `_end`: rank 0 reports first
    os._exit(FOLDER_LOST)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _started_again(config: JobConfig) -> str:
    if config.checkpoint.enable and not config.checkpoint.load_only:
        return "started again, the run goes on from there"
    why = "checkpoint.load_only = true" if config.checkpoint.enable else "checkpoint.enable = false"
    return f"nothing of it is saved, for {why}"


def _end(error: BaseException, code: int, folder: Path | None, run: RunFolder | None) -> int:
    """Write why this rank ends to the run's folder, report it, and return the exit code.

    A launcher gets the report, and shows one rank's reason. A fault is raised again for its traceback.
    """
    stopped = isinstance(error, stop.Stopped)
    if folder is not None and not stopped:
        try:
            if run is not None:
                run.check_lock()
            write_failure(folder, error, code)
        except FolderLost as lost:
            logger.error(str(lost))
        except OSError as disk:  # the error itself may be about the disk
            logger.warning(f"why this run ends is not written to {folder}: {disk}")
    if run is not None:
        run.close(*(STOPPED, stop.name(stop.received())) if stopped else (FAILED, str(error)))
    if stopped:
        stop.end()
    if report_to_launcher(error, code):
        return code
    if code == FAULT:
        raise error
    logger.error(str(error))
    if not _is_rank_0() and not stop.received():
        # torchrun ends all ranks as soon as one exits, and mostly rank 0's output is shown: it reports first.
        time.sleep(30)
    return code


def start_process(config: JobConfig, world_size: int, fake: bool = False) -> None:
    """Prepare this process for a job, and join its ranks."""
    choose_kernels(config)
    torch.manual_seed(config.debug.seed or 0)
    if fake:
        init_fake_process_group(world_size, config.comm.fake_rank)
        return
    if devices.device_type() == "cuda":
        devices.check_local_rank()
        torch.cuda.set_device(devices.device())
        set_up_flight_recorder(run_folder(config))
        devices.bind_to_numa_node()
    join(
        "nccl" if devices.device_type() == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=config.comm.init_timeout_seconds),
    )
    if devices.device_type() == "cpu" and config.training.mixed_precision_param == "bfloat16" and dist.get_rank() == 0:
        warn_of_slow_products(devices.seconds_of_product(torch.bfloat16) / devices.seconds_of_product(torch.float32))
    logger.info(f"{world_size} process{'es' * (world_size > 1)} on {devices.device_type()}")


def warn_of_slow_products(times: float) -> None:
    """Log a warning where a product in bf16 takes many times as long as in fp32: a CPU without instructions for it."""
    if times >= 4:
        logger.warning(
            f"training.mixed_precision_param = 'bfloat16': on this processor a product takes {times:.0f} times as long "
            "in it as in float32; 'float32' trains faster here"
        )


def choose_kernels(config: JobConfig) -> None:
    """Set torch to deterministic kernels in this process: on a CPU, or where debug.deterministic is set.

    On a CPU they are no slower: of those in use only scatter-adds, as in the backward of `x[index]`, differ at all.
    """
    options = config.debug
    if not options.deterministic and devices.device_type() != "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Operators without such a kernel are refused only where the option is set.
    torch.use_deterministic_algorithms(True, warn_only=not options.deterministic)
    # It shows reads of uninitialized memory, and changes no other bit: on a GPU a kernel for each new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if devices.device_type() == "cuda":
        logger.info("debug.deterministic: kernels whose sums have a fixed order, which are slower; see docs/operate")


def _dry_run(blueprint: Blueprint, begin: float) -> None:
    """Build one rank's graphs of a job of any size, and log the forecast; nothing is allocated, sent or trained."""
    lines = blueprint.dry_run()
    layout = blueprint.assembly.layout
    logger.info("\n".join([f"rank {dist.get_rank()} of {dist.get_world_size()}, {layout}:", *lines]))
    logger.info(
        f"dry run of {dist.get_world_size()} ranks done in {time.perf_counter() - begin:.1f} s, "
        f"peak memory of this process {devices.host_peak_memory_gib():.2f} GiB"
    )


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
