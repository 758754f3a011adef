"""Agreement of ranks on success or failure: an error on one of them is raised on all, so that none waits for another.

Each function is called by all ranks of a group together. A group serves one thread at a time.
"""

import datetime
import functools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan_graph.patience import Patience
from torchtitan_graph.transient import is_transient

T = TypeVar("T")

# How long one rank may read or write files while the others wait for it: storage is slower than any collective.
FILES_TIMEOUT = datetime.timedelta(minutes=30)
# How long one rank may count the rows of its part of a corpus: hours, where that is large. A rank that dies ends the
# wait at once, as its connections close.
_COUNTING_TIMEOUT = datetime.timedelta(days=7)


class RanksFailed(RuntimeError):
    """Error that names the ranks that failed, with their errors. `transient`: whether each of them is, and so this."""

    def __init__(self, failures: str, transient: bool = False) -> None:
        super().__init__(failures)
        self.transient = transient


def files_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks apart from those of training, for work on files; None without a process group.

    The first call makes it, all ranks together; later ones return the same.
    """
    return _gloo_group(dist.group.WORLD, FILES_TIMEOUT) if dist.is_initialized() else None


def counting_group() -> dist.ProcessGroup | None:
    """Return a group like `files_group`, whose ranks wait for each other as long as it takes to count a corpus."""
    return _gloo_group(dist.group.WORLD, _COUNTING_TIMEOUT) if dist.is_initialized() else None


@functools.cache
def _gloo_group(world: dist.ProcessGroup, timeout: datetime.timedelta) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timeout)


class LateMax:
    """The greatest of the numbers that the ranks give in one call of `exchange`, known in the next, so that no host
    waits for its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def exchange(self, mine: int) -> int:
        """Give this rank's number, at least 0; return the greatest of all ranks' in the call before, 0 in the first
        call. All ranks call together."""
        before = self._wait()
        most = torch.full((), mine, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self._here = most.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        if most.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return before

    def _wait(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()
        return 0 if self._here is None else int(self._here)


def on_rank_0(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on rank 0 and return its result, or raise its error, on every rank of `group` (default: all)."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = _picklable(error)
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on every rank, and return this rank's result.

    Raises:
        RanksFailed: on every rank, if it raised on any.
    """
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    failures = _gather((describe(error), is_transient(error)) if error else None, group)
    if by_rank := {rank: failure for rank, failure in enumerate(failures) if failure}:
        described = describe_ranks({rank: text for rank, (text, _) in by_rank.items()})
        raise RanksFailed(described, all(transient for _, transient in by_rank.values())) from error
    return result


def gather_from_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `function` on every rank, and return all results, in rank order, on all ranks; raises like `on_all_ranks`."""
    return _gather(on_all_ranks(function, group), group)


def retry_together(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `function` on every rank again while it raises transient errors, for as long as `retry_io` does.

    Where it raises, it raises on all ranks, errors of which all or none are transient. Rank 0's clock decides.
    """
    patience = Patience()
    while True:
        try:
            return function()
        except Exception as error:
            if not is_transient(error):
                raise
            failure = error  # outlives its clause: no rank waits for another while it handles an error
        if not on_rank_0(partial(patience.wait, failure), group):
            raise failure


def describe(error: BaseException) -> str:
    """Return an error's type and text in one line; of `RanksFailed` the text, which names each rank's type."""
    return str(error) if isinstance(error, RanksFailed) else f"{type(error).__name__}: {error}"


def describe_ranks(failures: dict[int, str]) -> str:
    """Return the failed ranks with their errors, at most four of them."""
    shown = [f"rank {rank}: {failure}" for rank, failure in list(failures.items())[:4]]
    more = [f"and {len(failures) - 4} ranks more"] if len(failures) > 4 else []
    return "; ".join(shown + more)


def _gather(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    if not dist.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _picklable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks, where it is as transient as it is here without its cause."""
    try:
        pickle.loads(pickle.dumps(error))
        sent = error
    except Exception:
        sent = RuntimeError(describe(error))
    sent.__dict__["transient"] = is_transient(error)
    return sent
