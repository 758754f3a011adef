"""All replica groups of a job on this machine, and their lighthouse: a launcher for each, started again when it dies.

Each group's output is in replica_N/output.log in the dump folder; that of the first is shown too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph import stop
from torchtitan_graph.checkpoint.folder import checkpoint_folder, list_steps
from torchtitan_graph.config import JobConfig
from torchtitan_graph.config.fault_tolerance import check_here
from torchtitan_graph.config.job import replica_folder
from torchtitan_graph.launch.output import Output
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.join import LOOPBACK
from torchtitan_graph.patience import refuse_unwritable
from torchtitan_graph.run.failure import FAULT, FINAL
from torchtitan_graph.run.status import FINISHED, Written, read_status

OUTPUT = "output.log"
MOST_FRUITLESS = 3  # starts of a group in a row that did no step
LIGHTHOUSE_AGAIN_S = 1.0  # between two starts of the lighthouse
OTHERS_END_S = 120.0  # for the other groups to end by themselves, once one has finished the run


class _Child:
    """A process that can be started again. Its output is copied to the end of the file `log`, or shown, or both."""

    def __init__(
        self, name: str, words: Sequence[str], env: dict[str, str], log: Path | None = None, shown: bool = True
    ) -> None:
        self.name, self._words, self._env, self._log, self._shown = name, words, env, log, shown
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._words, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self.process.stdout is not None, "it is a pipe"
        self.output = Output(self.name, self.process.stdout, self._log, self._shown)

    def wait(self) -> None:
        """Wait for its end, and for its output."""
        self.process.wait()
        self.output.finish()


class Group(_Child):
    """A replica group's launcher; what the first one prints is shown, too."""

    def __init__(self, number: int, config: JobConfig, options: Sequence[str], env: dict[str, str]) -> None:
        self.folder = replica_folder(config, number)
        self.fruitless, self.reached = 0, 0
        words = [sys.executable, "-m", "torchtitan_graph.launch", *options, f"--fault_tolerance.replica={number}"]
        super().__init__(f"replica {number}", words, env, self.folder / OUTPUT, shown=number == 0)

    def is_fruitless(self) -> bool:
        """Return whether too many starts in a row did no step."""
        status = _read_status(self.folder)
        step = status["step"] if status else 0
        self.fruitless, self.reached = (0 if step > self.reached else self.fruitless + 1), max(step, self.reached)
        return self.fruitless >= MOST_FRUITLESS


def run(config: JobConfig, options: Sequence[str], num_ranks: int) -> int:
    """Run all groups with `num_ranks` ranks each, and return the exit code: 0, or that of the first that failed."""
    from torchtitan_graph.device import share_gpus  # imports torch, which takes seconds

    check_here(config.fault_tolerance)
    table = config.fault_tolerance
    gpus = share_gpus(table.replicas, num_ranks)
    for number in range(table.replicas):
        folder = replica_folder(config, number)
        with refuse_unwritable(f"job.dump_folder = {config.job.dump_folder!r}", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / OUTPUT).open("ab").close()
    lighthouse = f"http://{LOOPBACK}:{_free_port()}"
    options = [*options, f"--fault_tolerance.lighthouse={lighthouse}"]
    env = {**os.environ, "NGPU": str(num_ranks), stop.PARENT: str(os.getpid())}
    words = [sys.executable, "-m", "torchtitan_graph.launch.lighthouse", *options]
    signals: list[int] = []
    stop.begin_steps()  # from here on a signal does not end this process, but is passed on
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda received, _: signals.append(received))
    server = _Child("the lighthouse", words, env)
    mine = [{"CUDA_VISIBLE_DEVICES": names} for names in gpus] or [{}] * table.replicas
    groups = [Group(number, config, options, env | mine[number]) for number in range(table.replicas)]
    try:
        code = _watch(server, groups, signals)
    finally:
        for child in (*groups, server):
            if child.process.poll() is None:
                child.process.terminate()
        for child in (*groups, server):
            child.wait()
    if code == 0 and not signals and (problem := find_unsaved(config)):
        logger.error(problem)
        return FAULT
    return code


def find_unsaved(config: JobConfig) -> str | None:
    """Return what to do if the last step of a run that has ended is not saved, for the group that saved it died."""
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    if not saves or config.fault_tolerance.semi_sync_method is not None:  # then each group saves its own
        return None
    folders = (replica_folder(config, number) for number in range(config.fault_tolerance.replicas))
    done = max((status["step"] for status in map(_read_status, folders) if status), default=0)
    saved = max(list_steps(checkpoint_folder(config)), default=0)
    if saved >= done:
        return None
    return (
        f"step {done} is done, and the newest checkpoint is of step {saved}: start the run again, and it goes on there"
    )


def _watch(server: _Child, groups: list[Group], signals: list[int]) -> int:
    running, codes, passed_on, finished, restarted = list(groups), [], 0, 0.0, 0.0
    while running:
        time.sleep(0.1)
        for number in signals[passed_on:]:
            passed_on += 1
            for group in running:
                group.process.send_signal(number)
        if server.process.poll() is not None and not signals and time.monotonic() > restarted + LIGHTHOUSE_AGAIN_S:
            logger.warning("the lighthouse died, and is started again")
            restarted = time.monotonic()
            server.wait()
            server.start()
        for group in [group for group in running if group.process.poll() is not None]:
            group.wait()
            code = group.process.returncode
            code = 128 - code if code < 0 else code
            if code == 0 or code in FINAL or signals or group.is_fruitless():
                running.remove(group)
                codes.append(code)
                finished = finished or (time.monotonic() if _has_finished(group) else 0.0)
                if code:
                    logger.error(f"{group.name} ended with exit code {code}; see {group.folder / OUTPUT}")
            else:
                logger.warning(f"{group.name} ended with exit code {code}, and is started again")
                group.start()
        if finished and time.monotonic() > finished + OTHERS_END_S:
            for group in running:
                group.process.terminate()
            finished = time.monotonic()
    if finished or not codes:
        return 0
    if signals and not any(codes):
        return 0
    return next((code for code in codes if code), FAULT)


def _read_status(folder: Path) -> Written | None:
    """Return the status of the run in a folder, None where there is none; also where a file server is away, with a
    warning: the groups wait for it, or end by themselves."""
    try:
        return read_status(folder)
    except OSError as error:
        logger.warning(f"the status of {folder.name} can't be read: {error}")
        return None


def _has_finished(group: Group) -> bool:
    status = _read_status(group.folder)
    return status is not None and status["state"] == FINISHED


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as free:
        return int(free.getsockname()[1])
