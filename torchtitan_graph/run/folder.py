"""A run's folder, locked by one run at a time: saved configuration, status and failures."""

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torchtitan_graph import stop
from torchtitan_graph.checkpoint.folder import CHECKPOINTS, CONFIG, checkpoint_folder, list_steps
from torchtitan_graph.checkpoint.remote import Remote, using
from torchtitan_graph.config import JobConfig, dump_toml, run_folder
from torchtitan_graph.config.job import replica_folder
from torchtitan_graph.device import device_type, peak_memory_gib
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import files_group, on_rank_0
from torchtitan_graph.patience import refuse_unreadable, refuse_unwritable, retry_io
from torchtitan_graph.run.copies import Copying
from torchtitan_graph.run.drift import check_drift
from torchtitan_graph.run.failure import release_reserve, reserve
from torchtitan_graph.run.hang import TRACES
from torchtitan_graph.run.lock import Lock
from torchtitan_graph.run.status import (
    FAILED,
    FINISHED,
    HEARTBEAT_S,
    STARTUP,
    WAITING,
    Status,
    activity_of,
    read_status,
)
from torchtitan_graph.small_files import BadFile, read_small, write_text

HEART_ENDS_S = 10.0  # a heartbeat that is under way, where the file server answers


class RunFolder:
    """The lock on the run's folder, with heartbeat and status; every rank constructs one, rank 0's does the work.

    Raises UserError if another run holds the folder, or the run in it has another model, tokenizer or data.
    """

    def __init__(self, config: JobConfig) -> None:
        self.path = run_folder(config)
        self.status: Status | None = None
        self.planned = ""  # the forecast of rank 0's peak memory, in words, for the line at the end
        self._lock: Lock | None = None  # rank 0's
        self._copying: Copying | None = None  # of a run with checkpoint.remote_folder
        on_rank_0(lambda: retry_io(lambda: self._open(config)), files_group())

    def _open(self, config: JobConfig) -> None:
        with refuse_unwritable(f"job.dump_folder = {config.job.dump_folder!r}", self.path):
            self._lock = lock = Lock(self.path)
            self._ended = threading.Event()
            self._heart = threading.Thread(target=self._beat, args=(lock,), name="heartbeat", daemon=True)
            self._heart.start()
            try:
                reserve(self.path)
                compared = self._compare(config, self.path / CONFIG)
                self._copying = self._begin_copying(config, is_new=compared is None)
                self.status = Status(self.path, config.training.steps, self.check_lock)
            except BaseException:
                self._stop_heart()
                release_reserve(self.path)
                lock.release()
                if self._copying is not None:
                    self._copying.release()
                raise

    def _stop_heart(self) -> None:
        self._ended.set()
        self._heart.join(HEART_ENDS_S)

    def _compare(self, config: JobConfig, file: Path) -> bytes | None:
        """Compare the configuration with those that the run saved, in its folder and at its remote address; return the
        first one's content."""
        table, compared = config.checkpoint, None
        places = {self.path, Path(config.job.dump_folder)}  # of groups: each one's, or one for all
        if file.exists() and any(any(place.glob(f"{CHECKPOINTS}/step-*")) for place in places):
            try:
                compared = read_small(file)
            except BadFile as error:
                logger.warning(f"this run's configuration can't be compared with that before: {error}")
            else:
                check_drift(file, config)
        if table.enable and table.remote_folder:
            _compare_remote(table.remote_folder, config, compared)
        return compared

    def _begin_copying(self, config: JobConfig, is_new: bool) -> Copying | None:
        table = config.checkpoint
        if not table.enable or not table.remote_folder or table.load_only:
            return None
        with using("remote_folder", table.remote_folder):
            return Copying(table.remote_folder, self.path, bool(list_steps(checkpoint_folder(config))), is_new)

    def save_config(self, config: JobConfig) -> None:
        """Save the configuration in the folder and at the remote address, once the run is set up; all ranks together.

        A failed start leaves the earlier run's file, which describes its checkpoints.
        """
        on_rank_0(lambda: retry_io(lambda: self._write_config(config, self.path / CONFIG)), files_group())

    def _write_config(self, config: JobConfig, file: Path) -> None:
        self.check_lock()
        with refuse_unwritable(f"job.dump_folder = {config.job.dump_folder!r}", self.path):
            write_text(file, dump_toml(config))
        table = config.checkpoint
        if table.enable and table.remote_folder and not table.load_only:
            with using("remote_folder", table.remote_folder):
                Remote(table.remote_folder).put(file.parent, [file.name])

    def _beat(self, lock: Lock) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                if not lock.beat():
                    lock.check()  # raises why
                if self.status is not None:
                    self.status.write()
            except FolderLost as error:
                logger.error(f"{error}; this run ends after its step")
                return
            except OSError as error:  # a full disk, a file server that is away: training continues for a while
                logger.warning(f"no heartbeat in {self.path}: {error}")

    def has_lost(self) -> bool:
        """Return whether rank 0 knows that the folder is lost, see Note [The lock of a folder]; no file is read."""
        return self._lock is not None and self._lock.why_lost() != ""

    def check_lock(self) -> None:
        """Raise FolderLost on rank 0, which looks at the lock, if the folder is lost: before every write to it."""
        if self._lock is not None:
            self._lock.check()

    def check_copying(self) -> None:
        """Raise FolderLost on rank 0, which looks at checkpoint.remote_folder, if another run writes there."""
        if self._copying is not None:
            self._copying.check()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time in the context as `activity`, one of `status.TIMES`."""
        with self.status.during(activity) if self.status else nullcontext():
            yield

    def resume(self, step: int, num_steps: int) -> None:
        """Record the step after which training resumes, and the number of the run's steps."""
        if self.status:
            self.status.resume(step, num_steps)

    def wait_for_replicas(self, config: JobConfig, num_steps: int) -> None:
        """Wait for the job's other replica groups, unless one of them trains already: a job begins with all of them, or
        after fault_tolerance.join_timeout_seconds. All ranks call together."""
        table = config.fault_tolerance
        others = [replica_folder(config, number) for number in range(table.replicas) if number != table.replica]
        most_s = float(table.join_timeout_seconds)
        on_rank_0(lambda: retry_io(lambda: self._wait_for_replicas(others, most_s, num_steps)), files_group())

    def _wait_for_replicas(self, others: Sequence[Path], most_s: float, steps: int) -> None:
        assert self.status is not None, "rank 0 has it"
        begin = warned = time.monotonic()
        with self.status.during(WAITING):
            self.status.write()  # the others look for it
            while not stop.received() and not self.has_lost() and (now := time.monotonic()) < begin + most_s:
                doing = [activity_of(path, self.path) for path in others]
                if all(each == WAITING for each in doing) or {*doing} - {None, STARTUP, WAITING}:
                    break
                if any(_has_finished(other, steps) for other in others):
                    break
                if now > warned + 10:
                    warned = now
                    missing = [path.name for path, each in zip(others, doing, strict=True) if each is None]
                    logger.info(f"waiting for {', '.join(missing) or 'others that start'}, at most {most_s:.0f} s")
                time.sleep(0.2)
        self.status.write()

    def done(self, step: int, loss: float | None, replicas: dict[str, Any] | None = None) -> None:
        """Record a finished step, its loss, and the state of the replica groups, where there are any."""
        if self.status:
            self.status.done(step, loss, replicas)

    def lose(self, seconds: float) -> None:
        """Count the last `seconds` as lost, because a step is repeated."""
        if self.status:
            self.status.lose(seconds)

    def close(self, state: str, reason: str = "") -> None:
        """Write the last status, log where time and memory went, and release the folder; an error is a warning."""
        if self.status is None or self._lock is None:
            return
        self._stop_heart()
        try:
            if self._heart.is_alive():
                raise TimeoutError("the last heartbeat has not ended")
            self._lock.check()
            release_reserve(self.path)
            self.status.write(state, reason)
            with suppress(OSError):  # traces of a hung step are in it, or it is not there
                (self.path / TRACES).rmdir()
        except (OSError, FolderLost) as error:
            logger.warning(f"that this run is {state} is not written to {self.path}: {error}")
        if self.status.has_steps:
            of = "reserved by the allocator" if device_type() == "cuda" else "of the whole process"
            peak = f"peak memory of rank 0: {self.planned}measured {peak_memory_gib():.3f} GiB {of}"
            (logger.warning if state == FAILED else logger.info)(f"{self.status.goodput()}; {peak}")
        self.status = None
        if self._copying is not None:
            self._copying.release()
        if self._heart.is_alive():
            return
        try:
            self._lock.release()
        except OSError as error:
            logger.warning(f"{self._lock.path} is not deleted: {error}")


def check_place(dump_folder: str) -> Path:
    """Return the path of a run's folder, which need not exist yet; raise UserError if it can't be a folder."""
    path, option = Path(dump_folder), f"job.dump_folder = {dump_folder!r}"
    with refuse_unreadable(option):
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise UserError(f"{option}: {nearest} is a file; name a folder, which is made if it is not there")
    return path


def _compare_remote(address: str, config: JobConfig, compared: bytes | None) -> None:
    """Check the configuration for drift from the one at a remote address with checkpoints, unless that is equal to
    `compared`, which was checked before."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, CONFIG)
        with using("remote_folder", address):
            remote = Remote(address, is_new=compared is None)
            if CONFIG in remote.sizes() and remote.list_steps():
                remote.get([CONFIG], saved.parent)
        if saved.exists() and read_small(saved) != compared:
            check_drift(saved, config, place=f"{remote.address}/{CONFIG}")


def _has_finished(other: Path, steps: int) -> bool:
    """Return whether another replica group has done all steps of this run."""
    status = read_status(other)
    return status is not None and status["state"] == FINISHED and status["step"] >= steps
