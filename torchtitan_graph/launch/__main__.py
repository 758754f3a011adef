"""Start the processes of a run, and report their end: the first failing rank's reason, once, and its exit code.

    NGPU=2 python -m torchtitan_graph.launch --table.key value ...                 on this machine; see run_train.sh
    python -m torchtitan_graph.launch TORCHRUN'S OPTIONS -- --table.key value ...  as torchrun would
    python -m torchtitan_graph.launch --kubernetes jobset ...                      writes a manifest; see its --help

NGPU is the number of processes, of one replica group where fault_tolerance.enable is set. Without
fault_tolerance.replica all groups are started here, with their lighthouse.

torchrun's agent does the work, elastic restarts included. It runs in a thread, so that signals come here: they are
passed on to the workers, which save a checkpoint and end, however long that takes.
"""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torchtitan_graph import stop
from torchtitan_graph.config import check, load, ranks_asked_for
from torchtitan_graph.config.option import brief
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.run.failure import CONFIGURATION, FAULT, STORAGE_UNAVAILABLE, RankFailure
from torchtitan_graph.run.files import read_record
from torchtitan_graph.transient import is_transient

# The signal sent to workers for each signal to the launcher.
PASSED_ON = {number: number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
PASSED_ON |= {signal.SIGHUP: signal.SIGTERM, signal.SIGQUIT: signal.SIGTERM}
# Loggers of torchrun's agent: how workers ended, which `report` logs; and a lost store, with a C++ stack, as
# after many runs on several nodes, when the first agent ends before the others. Where it matters it is raised, too.
QUIET = ("multiprocessing", "rendezvous")
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"  # torch reads it when it is imported
ALONE_S = 5.0  # time in which a starting worker reports that it handles signals
TEARDOWN_S = 60.0  # time in which a worker that has finished its work ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher, and return the exit code: 0, or that of the first rank that failed."""
    stop.die_with_parent()
    stop.install()
    init_logging()
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        logger.error(str(error))
        return CONFIGURATION


def _main(words: list[str]) -> int:
    at = words.index("--") if "--" in words else -1
    torchrun, options = words[: max(at, 0)], words[at + 1 :]
    if any(word.partition("=")[0] == "--kubernetes" for word in torchrun or words):
        from torchtitan_graph.launch import kubernetes  # which most launches don't need

        return kubernetes.main(words)
    if options[-1:] in (["--help"], ["-h"]):
        print(__doc__, flush=True)  # the options of a run follow
    try:
        config = load(options)  # before importing torch, which takes seconds
        if config.comm.mode == "fake_backend":
            os.environ["NGPU"] = str(_num_ranks())
            os.execv(sys.executable, [sys.executable, "-m", "torchtitan_graph.train", *options])
        table = config.fault_tolerance
        has_all_groups = not torchrun and table.enable and table.replica is None
        if not torchrun:
            check(config, _num_ranks(table.replicas if has_all_groups else 1))
            _shown_ranks(_num_ranks(table.replicas if has_all_groups else 1))
        if has_all_groups:
            from torchtitan_graph.launch import replicas

            return replicas.run(config, options, _num_ranks(table.replicas))
    except OSError as error:
        if not is_transient(error):
            raise
        logger.error(str(error))
        return STORAGE_UNAVAILABLE
    try:
        folder = Path(tempfile.mkdtemp(prefix="torchtitan_graph."))
    except OSError as error:
        raise UserError(f"the launcher can't make its folder: {error}; name a writable one in TMPDIR") from error
    launch = Launch(folder)
    try:
        if not torchrun:
            from torchtitan_graph.device import share_gpus  # imports torch, as torchrun does

            share_gpus(1, _num_ranks())
            torchrun = on_this_machine(_num_ranks(), folder)
        return launch.run([*torchrun, "-m", "torchtitan_graph.train", *options])
    finally:
        if not launch.has_logs_to_read:
            shutil.rmtree(folder, ignore_errors=True)


def on_this_machine(num_ranks: int, folder: Path) -> list[str]:
    """Return torchrun's options for this machine alone; files are made in `folder`."""
    shown = _shown_ranks(num_ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))  # torchrun's own default is one
    # With a store shared with torchrun, a restarted worker would find its predecessor's addresses.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # A unique name, by which a restarted worker recognizes the lock of the attempt before it; in containers host name
    # and process id are not.
    os.environ.setdefault("PET_RDZV_ID", f"{os.uname().nodename}.{secrets.token_hex(8)}")
    output = ["--tee", "3", "--local_ranks_filter", shown]
    if sys.stderr.isatty() and shown == "0" and num_ranks <= 10:
        # On a terminal only rank 0 writes to it, for its progress bar. (--redirects takes ranks of one digit.)
        output = ["--redirects", ",".join(["0:0", *(f"{rank}:3" for rank in range(1, num_ranks))])]
    # torchrun's usual store would listen on every address of the machine; a file does not. It records there that it is
    # alive, once a minute (every 5 s would fill some 20 MB a day).
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", str(folder / "rendezvous")]
    rendezvous += ["--rdzv_conf", "store_type=file,keep_alive_interval=60", "--local_addr", "127.0.0.1"]
    (folder / "rendezvous").touch()
    output += ["--role", "rank", "--log_dir", str(folder / "logs")]
    return ["--nproc_per_node", str(num_ranks), *rendezvous, *output]


class Launch:
    """One run of torchrun's agent. `folder` has the workers' process ids and failure records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_logs_to_read = False
        self._signals: list[signal.Signals] = []
        self._signalled: set[Path] = set()  # the files of workers that got the last signal
        self._signalled_at = 0.0
        self._ended: BaseException | None = None

    def run(self, words: list[str]) -> int:
        """Start the workers, wait for them, log why they ended, and return the exit code.

        Raises UserError if torchrun does not take its options.
        """
        is_asked_for = LOG_LEVEL in os.environ
        os.environ.setdefault(LOG_LEVEL, "ERROR")
        from torch.distributed import run  # takes seconds
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if not is_asked_for:
            del os.environ[LOG_LEVEL]  # unchanged for the workers
        os.environ[stop.LAUNCHER] = str(self.folder)
        (self.folder / f"{os.getpid()}.launcher").touch()
        for name in QUIET:
            quiet = logging.getLogger(f"torch.distributed.elastic.{name}")
            quiet.addHandler(logging.NullHandler())
            quiet.propagate = False
        arguments = run.parse_args(words)
        try:
            run.config_from_args(arguments)
        except ValueError as error:
            raise UserError(f"torchrun can't take these options: {error}") from error
        stop.begin_steps()  # from here on a signal does not end this process, but is passed to the workers
        for number in PASSED_ON:
            signal.signal(number, self._on_signal)
        agent = threading.Thread(target=self._run, args=(run.run, arguments), daemon=True)
        agent.start()
        attempt = 0
        while agent.is_alive():
            agent.join(0.2)
            self._forward_signal()
            self._kill_hanging()
            if self._is_alone():
                self.report(attempt, {})
                name = stop.name(self._signals[-1])
                logger.warning(
                    f"stopped by {name} while no rank ran: torchrun waited for other machines, to start them"
                )
                return stop.exit_code(self._signals[-1])
            if self._attempt() > attempt:
                self.report(attempt, {})
                attempt = self._attempt()
                logger.warning(f"all ranks are started again: {attempt} of {arguments.max_restarts} times")
        if isinstance(self._ended, ChildFailedError):
            return self.report(attempt, self._ended.failures)
        if self._ended is not None:
            raise self._ended
        return self.report(attempt, {})

    def _run(self, run: Any, arguments: Any) -> None:
        try:
            run(arguments)
        except BaseException as error:
            self._ended = error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(PASSED_ON[signal.Signals(number)])
        self._signalled, self._signalled_at = set(), time.monotonic()

    def _forward_signal(self) -> None:
        """Send the last signal to each worker of the running attempt; it handles signals once its file exists."""
        if not self._signals:
            return
        for file in set(self.folder.glob(f"{self._attempt()}.*.pid")) - self._signalled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name.split(".")[1]), self._signals[-1])
                self._signalled.add(file)

    def _kill_hanging(self) -> None:
        """Kill a worker that hangs after its work is done: it handles no signal any more, and torchrun waits for it."""
        for file in self.folder.glob(f"{self._attempt()}.*.teardown"):
            pid = int(file.name.split(".")[1])
            if time.time() - file.stat().st_mtime > TEARDOWN_S and _is_child(pid):
                logger.error(f"process {pid} does not end {TEARDOWN_S:.0f} s after its work is done, and is killed")
                os.kill(pid, signal.SIGKILL)
                file.unlink()

    def _is_alone(self) -> bool:
        """Return whether a signal came while no worker exists: torchrun waits for other machines, before the first
        attempt or the next."""
        return bool(self._signals) and not self._signalled and time.monotonic() > self._signalled_at + ALONE_S

    def _attempt(self) -> int:
        return max((int(file.name.split(".")[0]) for file in self.folder.glob("*.pid")), default=0)

    def report(self, attempt: int, failures: dict[int, Any]) -> int:
        """Log why the first rank failed, and a line for each other one. Return its exit code; 0 if none failed."""
        stopped = {stop.exit_code(number) for number in self._signals}
        records = [read_record(file, RankFailure) for file in self.folder.glob(f"{attempt}.*.json")]
        ends = [_reported(record, stopped) for record in records if record is not None]
        reported = {end.rank for end in ends}
        silent = {rank: failure for rank, failure in failures.items() if rank not in reported}
        ends += [_silent(rank, failure, stopped, self._logs_of(attempt, failure)) for rank, failure in silent.items()]
        if not ends:
            return 0
        cause, *others = sorted(ends)
        self.has_logs_to_read = cause.kind == SILENT and self._logs_of(attempt, failures[cause.rank]) is not None
        if cause.kind in (STOPPED, STOPPED_ALONE):
            logger.warning(cause.full)
            return cause.code
        # torchrun does not report a failure from which it recovers: a rank that was killed is missing here.
        logger.error(cause.full if failures or cause.kind != LOST_PEER else f"rank {cause.rank}: {cause.line}")
        for end in others:
            # All ranks find a wrong configuration, except those that torchrun ends before.
            is_late = cause.code == CONFIGURATION and end.kind in (STOPPED_ALONE, ENDED_BY_US)
            if end.line != cause.line and not is_late:
                logger.error(f"rank {end.rank}: {end.line}")
        return cause.code

    def _logs_of(self, attempt: int, failure: Any) -> Path | None:
        """Return the folder with what a rank printed, if that is kept and it printed anything."""
        logs = self.folder.glob(f"logs/*/attempt_{attempt}/{failure.local_rank}/std*.log")
        return next((log.parent for log in logs if log.stat().st_size), None)


# Kinds of ends, from the likeliest cause of the others on. STOPPED: by a signal that the launcher got, too; ALONE: by
# one that it did not get, somebody's, or torchrun's after another rank failed.
STOPPED, OWN_REASON, SILENT, STOPPED_ALONE, LOST_PEER, ENDED_BY_US = range(6)


class End(NamedTuple):
    """The end of a rank: in short, and as the cause of all."""

    kind: int
    time: float
    rank: int
    code: int
    line: str
    full: str


def _reported(record: RankFailure, stopped: set[int]) -> End:
    kind = LOST_PEER if record["lost_peer"] else OWN_REASON
    if record["code"] > 128:
        kind = STOPPED if record["code"] in stopped else STOPPED_ALONE
    name, _, text = record["message"].partition(": ")
    line = (text if record["code"] != FAULT else f"{name}: {text}").partition("\n")[0]
    full = text if record["code"] != FAULT else f"rank {record['rank']} failed:\n{record['traceback']}"
    return End(kind, record["time"], record["rank"], record["code"], line, full)


def _silent(rank: int, failure: Any, stopped: set[int], logs: Path | None) -> End:
    """Return the end of a rank that left no record: it was killed, or ended before it was set up."""
    if failure.exitcode in stopped:
        text = stop.message(failure.exitcode - 128)
        return End(STOPPED, failure.timestamp, rank, failure.exitcode, text, text)
    if failure.exitcode < 0:
        line = f"was ended by {signal.Signals(-failure.exitcode).name}"
        code = 128 - failure.exitcode
    else:
        line = f"ended with exit code {failure.exitcode}"
        code = failure.exitcode
    kind = ENDED_BY_US if failure.exitcode == -signal.SIGTERM else SILENT
    where = f"; its output is in {logs}" if logs else ""
    return End(kind, failure.timestamp, rank, code, line, f"rank {rank} {line}{where}")


def _is_child(pid: int) -> bool:
    """Return whether a process id is still that of a child of this process; only on Linux."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


def _num_ranks(groups: int = 1) -> int:
    """Return the number of processes to start here for each replica group: NGPU, else its share of the GPUs, else 2."""
    if (given := ranks_asked_for()) is not None:
        return given
    import torch

    return torch.cuda.device_count() // groups or 2


def _shown_ranks(num_ranks: int) -> str:
    """Return the ranks whose output is shown, in torchrun's form: LOG_RANK, else 0."""
    given = os.environ.get("LOG_RANK", "0")
    ranks = [word.strip() for word in given.split(",")]
    if not all(word.isdecimal() and len(word) < 100 and int(word) < num_ranks for word in ranks):
        legal = f"ranks of 0 to {num_ranks - 1}, separated by commas"
        raise UserError(f"LOG_RANK = {brief(given)}: must be {legal}; not set: 0")
    return ",".join(ranks)


if __name__ == "__main__":
    sys.exit(main())
