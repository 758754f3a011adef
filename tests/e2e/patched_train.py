"""Train with one thing changed: python patched_train.py PATCH [--table.key value ...]

Each patch is a function without arguments, to be called before `main`; what it needs to know is in the environment.
"""

import ctypes
import errno
import functools
import hashlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist

from torchtitan_graph import device, patience, stop, train, trainer
from torchtitan_graph.checkpoint import save
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.data.feed import Feed
from torchtitan_graph.data.loader import DataLoader
from torchtitan_graph.generate.decoding import Decoding
from torchtitan_graph.models.hf.files import NewFolder
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.run import folder, lock


def have_a_kibibyte_of_memory() -> None:
    """Make the machine a small one."""
    device.memory_total_gib = lambda: 2.0**-20


def have_a_little_memory() -> None:
    """Make the machine one that holds the tiny model's step with little kept, and not with all."""
    device.memory_total_gib = lambda: float(os.environ["MEMORY_GIB"])


def have_no_patience() -> None:
    """Retry no error of storage."""
    patience.WAIT_S = 0.0
    find_s3()


def find_s3() -> None:
    """Point fsspec, already imported, at the server of `s3.Store.env`, and shorten the pauses between retries."""
    fsspec.config.set_conf_env(fsspec.config.conf)
    patience.FIRST_S, patience.EVERY_S = 0.05, 0.2


def have_little_memory_left() -> None:
    """From the second step on, let this process have 72 MiB more than it has."""
    # Memory given back leaves the process, tensors' at once: what the allocator kept would let a second step fit.
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)
    train_step = trainer.Trainer.train_step

    def step(self: trainer.Trainer, metrics: Any) -> bool:
        if self.step == 1:
            ctypes.CDLL(None).malloc_trim(0)
            num_pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = num_pages * resource.getpagesize() + 72 * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        return train_step(self, metrics)

    trainer.Trainer.train_step = step


def ask_for_a_pebibyte_in_setup() -> None:
    """Ask for more memory than there is when two parameters are there."""
    empty, calls = Storage.empty, itertools.count()

    def empty_or_too_much(self: Storage, device: torch.device) -> torch.Tensor:
        return empty(self, device) if next(calls) < 2 else torch.empty(2**50)

    Storage.empty = empty_or_too_much  # type: ignore[method-assign]


def forbid_process_group() -> None:
    """Fail if a process group is started."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process group was started")

    dist.init_process_group = refuse


def kill_in_save() -> None:
    """Kill this process before or after a named function of a save: KILL = "before commit"."""
    when, point = os.environ["KILL"].split()
    function = getattr(save, point)

    def run_and_die(*args: Any) -> None:
        if when == "after":
            function(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(save, point, run_and_die)


def kill_after() -> None:
    """Kill this process KILL_AFTER seconds after its first step begins, whatever it is doing then."""
    train_steps = trainer.Trainer.train

    def train_and_die(self: trainer.Trainer, *args: Any) -> None:
        clock = threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL))
        clock.daemon = True
        clock.start()
        train_steps(self, *args)

    trainer.Trainer.train = train_and_die  # type: ignore[method-assign]


def no_room_on_rank_1() -> None:
    """Let rank 1 write no file of more than 30 KB (its log is smaller) from its third step on, as a full disk would."""
    train_step = trainer.Trainer.train_step

    def step_without_room(self: trainer.Trainer, *args: Any) -> bool:
        if self.step == 2 and self.rank == 1:
            self.checkpointer.wait()  # of the second step, which is to be whole
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return train_step(self, *args)

    trainer.Trainer.train_step = step_without_room  # type: ignore[method-assign]


def lose_storage() -> None:
    """Let the file server of the dump folder be away for ever, and wait for it no longer."""

    def write(*_: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    patience.WAIT_S = 0.0
    lock.Lock._create = write  # type: ignore[assignment]


def short_life() -> None:
    """Let the lock of the run's folder expire after 4 s."""
    folder.HEARTBEAT_S = 0.05
    folder.Lock = functools.partial(lock.Lock, stale_after_s=4.0)  # type: ignore[assignment, misc]


def lose_folder_in_step_3() -> None:
    """In the third step, LOSE=taken lets another run take the folder's lock; LOSE=stopped stops this process for longer
    than the lock's life; and LOSE=hung lets the heartbeat wait for ever for its file server."""
    folder.HEARTBEAT_S = 0.05

    def lose(of: trainer.Trainer) -> None:
        if of.step != 2 or of.rank:
            return
        of.checkpointer.wait()
        how, path = os.environ["LOSE"], of.blueprint.dump_folder
        if how != "taken":
            of.run._lock._stale_after_s = 0.8  # type: ignore[union-attr]
        if how == "stopped":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if how == "hung":
            os.utime = lambda *_: time.sleep(1000)  # type: ignore[assignment]
            time.sleep(1)
        (path / "run.lock").write_text('{"host": "other"}')
        (path / "status.json").write_text('{"state": "the other one"}')
        time.sleep(0.2)

    once_data_is_taken(lose)


def export_slowly_and_fail() -> None:
    """Let rank 0 take longer over the first file than a collective of training may, and find no room for it."""

    def write_tensors(*_: Any) -> None:
        time.sleep(8)
        raise OSError(28, "No space left on device")

    NewFolder.write_tensors = write_tensors  # type: ignore[method-assign]


def once_data_is_taken(act: Callable[[trainer.Trainer], None]) -> None:
    """Call `act` in each step, between its data and its graph."""
    train_step, take = trainer.Trainer.train_step, Feed.next

    def step(self: trainer.Trainer, metrics: Any) -> bool:
        def take_and_act(feed: Feed) -> Any:
            taken = take(feed)
            stop.begin_steps()  # which is what the step does then
            act(self)
            return taken

        Feed.next = take_and_act  # type: ignore[method-assign]
        try:
            return train_step(self, metrics)
        finally:
            Feed.next = take  # type: ignore[method-assign]

    trainer.Trainer.train_step = step  # type: ignore[method-assign]


def pause_in_step_4() -> None:
    """Stop rank 1 for ever in the fourth step, with its data taken: rank 0 then waits for it amid forward.

    It makes the file PAUSED when it stops.
    """

    def maybe_pause(of: trainer.Trainer) -> None:
        if of.step == 3 and of.rank == 1:
            Path(os.environ["PAUSED"]).touch()
            time.sleep(1000)

    once_data_is_taken(maybe_pause)


def signal_in_setup() -> None:
    """Send SIGNAL when the run has its folder and its data, before it builds its steps."""
    build = trainer.Trainer._build_steps

    def send_and_build(self: trainer.Trainer) -> Any:
        os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])
        return build(self)

    trainer.Trainer._build_steps = send_and_build  # type: ignore[method-assign]


def signal_in_step_3() -> None:
    """Send SIGNAL to the last rank alone, in the midst of its third step; twice, SIGNAL_AGAIN_AFTER seconds apart."""
    number = signal.Signals[os.environ["SIGNAL"]]

    def send_and_go_on(of: trainer.Trainer) -> None:
        if of.step == 2 and of.rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)
            if again := os.environ.get("SIGNAL_AGAIN_AFTER"):
                time.sleep(float(again))
                os.kill(os.getpid(), number)

    once_data_is_taken(send_and_go_on)


def signal_in_validation() -> None:
    """Send SIGTERM to the last rank alone before the second microbatch of a validation, or the second token of samples;
    append a line to the file SEEN for each that is begun."""
    evaluate, next_logits = trainer.Trainer._validation_feed, Decoding.next_logits

    def see(is_begun: bool) -> None:
        with open(os.environ["SEEN"], "a") as seen:
            print(file=seen)
        if is_begun and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def feed_and_send(self: trainer.Trainer, *args: Any) -> Feed:
        feed = evaluate(self, *args)
        take, calls = feed.next, itertools.count()

        def take_and_send() -> Any:
            if self.step:  # not at start, where its data is checked
                see(next(calls) == 1)
            return take()

        feed.next = take_and_send  # type: ignore[method-assign]
        return feed

    tokens = itertools.count()

    def choose_and_send(self: Decoding) -> torch.Tensor:
        see(next(tokens) == 1)
        return next_logits(self)

    trainer.Trainer._validation_feed = feed_and_send  # type: ignore[method-assign]
    Decoding.next_logits = choose_and_send  # type: ignore[method-assign]


def lose_rank_1_in_a_forward() -> None:
    """Kill rank 1 in the midst of its second step's forward, where its layers gather parameters from all ranks."""
    if os.environ["RANK"] != "1":
        return

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def lose(of: trainer.Trainer) -> None:
        if of.step == 1:
            next(x for name, x in of.model.named_modules() if "layers.0." in name).register_forward_pre_hook(die)

    once_data_is_taken(lose)


def lose_rank_1_in_step_4() -> None:
    """In torchrun's first attempt, kill rank 1 in its fourth step, or with LOSE=hang let it sleep there."""
    if os.environ["RANK"] != "1" or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return

    def lose(of: trainer.Trainer) -> None:
        if of.step == 3:
            if os.environ["LOSE"] == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)

    once_data_is_taken(lose)


def record_rows() -> None:
    """Append the hash of every row that this rank takes to the file ROWS.RANK."""
    take = DataLoader.__next__

    def take_and_record(self: DataLoader) -> Batch:
        batch = take(self)
        with open(f"{os.environ['ROWS']}.{os.environ['RANK']}", "a") as file:
            for row in range(len(batch.tokens_BL)):
                content = b"".join(part[row].numpy().tobytes() for part in batch)
                print(hashlib.sha256(content).hexdigest(), file=file)
        return batch

    DataLoader.__next__ = take_and_record  # type: ignore[method-assign]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(train.main(sys.argv[2:]))
