"""Write a checkpoint: while training waits, or in a thread while it continues."""

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_graph.checkpoint.best import write_best
from torchtitan_graph.checkpoint.folder import (
    CONFIG,
    TMP,
    checksum,
    commit,
    find_problem,
    prepare,
    prune,
    write_manifest,
    write_train_state,
)
from torchtitan_graph.checkpoint.remote import Copies
from torchtitan_graph.checkpoint.tensors import save_tensors
from torchtitan_graph.config import job
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import (
    RanksFailed,
    describe,
    gather_from_ranks,
    on_all_ranks,
    on_rank_0,
    retry_together,
)
from torchtitan_graph.parallel.chunk import Chunk, chunk_of
from torchtitan_graph.patience import find_full_disk, retry_io
from torchtitan_graph.small_files import write_text
from torchtitan_graph.transient import is_lost_peer

# The functions that a save calls, in this order. A kill before, in or after any of them loses no complete checkpoint.
SAVE_POINTS = ("prepare", "save_tensors", "write_train_state", "write_manifest", "commit", "write_best", "prune")


class SaveError(RuntimeError):
    """A checkpoint could not be saved; earlier ones are unchanged."""


class Saver:
    """Writes checkpoints, one after the other. All ranks call each method together, except `has_failed`.

    With `checkpoint.async_mode` other than "disabled", a thread writes a copy in the host's memory, through the process
    group `group`, which nothing else uses meanwhile. Its error is raised by the next `save` or `wait`, on all ranks or
    on none, as a save fails. `run_config` is written next to the tensors. `unfinished` is the suffix of a folder that
    is being written. `check` is called by rank 0 before each change to the folder of checkpoints, and raises FolderLost
    where that is another run's; `check_copying` before each change at checkpoint.remote_folder.
    """

    def __init__(
        self, config: job.Checkpoint, group: dist.ProcessGroup | None, run_config: str = "", unfinished: str = TMP
    ) -> None:
        self.config, self.unfinished = config, unfinished
        self.run_config = run_config
        self.group = group
        self.check: Callable[[], None] = lambda: None
        self.check_copying: Callable[[], None] = lambda: None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._thread = ThreadPoolExecutor(1, "save", _set_gpu()) if config.async_mode != "disabled" else None
        self._buffers: dict[str, torch.Tensor] = {}
        self._running: Future[None] | None = None
        self._copies = None if config.remote_folder is None else Copies(config, group)

    def save(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor | Chunk],
        train_state: dict[str, Any],
        last: bool = False,
    ) -> None:
        """Write the current `tensors`, and rank 0's `train_state`; return when that is done, or training may continue.

        Where checkpoint.remote_folder is set, it is copied there; that may fail, unless it is the `last` one. Raises
        SaveError if this save, or the previous one, failed.
        """
        self.wait()
        begin = time.perf_counter()
        chunks = {name: chunk_of(tensor) for name, tensor in tensors.items()}
        if self._thread is None:
            self._write(path, chunks, train_state, begin, last)
            return
        with _as_save_error(path):
            copies = on_all_ranks(lambda: self._copy(chunks), self.group)
        logger.info(f"saving {path}: training waited {time.perf_counter() - begin:.2f} s for the copy")
        self._running = self._thread.submit(self._write, path, copies, train_state, begin, last)

    def copy(self, path: Path) -> None:
        """Upload a checkpoint that an earlier start of the run ended with, and could not upload."""
        if self._copies is not None and on_rank_0(lambda: find_problem(path) is None, self.group):
            self._upload(path, self._copies, last=True)

    def wait(self) -> None:
        """Wait for the running save; raise SaveError if it failed."""
        if self._running is not None:
            if not self._running.done():
                logger.info("waiting for the last checkpoint to be written")
            running, self._running = self._running, None
            running.result()

    def has_failed(self) -> bool:
        """Return whether `wait` would raise at once."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def _copy(self, chunks: dict[str, Chunk]) -> dict[str, Chunk]:
        """Copy the tensors that the next step overwrites; "async_with_pinned_mem" reuses the buffers."""
        keep = self.config.async_mode == "async_with_pinned_mem"
        copies = {}
        for name, chunk in chunks.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.dtype != chunk.local.dtype:
                pin = keep and chunk.local.is_cuda
                buffer = torch.empty(chunk.local.shape, dtype=chunk.local.dtype, pin_memory=pin)
            if keep:
                self._buffers[name] = buffer
            buffer.copy_(chunk.local, non_blocking=True)
            copies[name] = chunk._replace(local=buffer)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies into pinned memory are asynchronous
        return copies

    def _write(
        self, path: Path, chunks: dict[str, Chunk], train_state: dict[str, Any], begin: float, last: bool
    ) -> None:
        """Write a checkpoint, and copy it to its address."""
        retry_together(functools.partial(self._write_whole, path, chunks, train_state), self.group)
        logger.info(f"saved checkpoint {path} in {time.perf_counter() - begin:.1f} s")
        if self._copies is not None:
            self._upload(path, self._copies, last)

    def _write_whole(self, path: Path, chunks: dict[str, Chunk], train_state: dict[str, Any]) -> None:
        """Write a checkpoint. See Note [Atomic save]: it can be begun again after an error at any place."""
        tmp, group = path.with_suffix(self.unfinished), self.group
        with self._removed_if_unfinished(tmp), _as_save_error(path):
            self._on_rank_0(lambda: prepare(tmp))
            save_tensors(tmp, chunks, group)
            sums = gather_from_ranks(lambda: _sums_of_this_rank(tmp), group)
            self._on_rank_0(lambda: write_train_state(tmp, train_state))
            if self.run_config:
                self._on_rank_0(lambda: write_text(tmp / CONFIG, self.run_config))
            self._on_rank_0(lambda: write_manifest(tmp, {name: crc for part in sums for name, crc in part.items()}))
            self._on_rank_0(lambda: commit(tmp))
            keep_best = self.config.keep_best
            self._on_rank_0(lambda: write_best(path.parent, train_state["train_state"] if keep_best else {}))
            self._on_rank_0(lambda: prune(path, self.config.keep_latest_k, self.config.keep_every, keep_best))

    def _on_rank_0(self, change: Callable[[], None]) -> None:
        """Let rank 0 change the folder of checkpoints, if it is still this run's."""

        def check_and_change() -> None:
            self.check()
            change()

        on_rank_0(check_and_change, self.group)

    @contextmanager
    def _removed_if_unfinished(self, tmp: Path) -> Iterator[None]:
        """Delete the partial folder of a failed save: where the disk is full, a restart needs the space.

        Raises FolderLost if the folder is another run's, which may be writing in a folder of that name.
        """
        try:
            yield
        except FolderLost:
            raise
        except BaseException as error:
            if isinstance(error, SaveError):  # all ranks raise it together
                with suppress(OSError):
                    on_rank_0(self.check, self.group)
            if self.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            raise

    def _upload(self, path: Path, copies: Copies, last: bool) -> None:
        """Upload a checkpoint to checkpoint.remote_folder. A failure is logged; that of the last one is raised."""
        on_rank_0(self.check, self.group)
        try:
            on_rank_0(functools.partial(retry_io, self.check_copying), self.group)
            copies.update(path)
        except Exception as error:
            if isinstance(error, FolderLost) or is_lost_peer(error):
                raise
            failed = f"{path} is whole, but could not be copied to {self.config.remote_folder} ({describe(error)})"
            if last:
                raise SaveError(f"{failed}; once it can be, start the run again, which copies it") from error
            if self.rank == 0:
                logger.error(f"{failed}; the next save tries again")


def _set_gpu() -> Callable[[], None] | None:
    """Return a thread's initializer that sets this process' GPU: a new thread would use the first one."""
    if not torch.cuda.is_available():
        return None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


def _sums_of_this_rank(tmp: Path) -> dict[str, str]:
    """Return the checksums of the files that this rank wrote, while the system still has them in memory."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {path.name: checksum(path) for path in tmp.glob(f"__{rank}_*.distcp")}


@contextmanager
def _as_save_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RanksFailed, UserError) as error:  # any other is a bug, and keeps its traceback
        why = find_full_disk(path.parent, describe(error)) or describe(error)
        raise SaveError(
            f"{path} could not be saved ({why}); the checkpoints that were there are as they were. Make room on that "
            "disk or name another job.dump_folder, and start the run again: it resumes from the newest of them"
        ) from error
