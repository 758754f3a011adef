"""One process at a time holds a folder's lock, and no dead one does."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disks import fill, small_disk
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import logger
from torchtitan_graph.run import lock as lock_module
from torchtitan_graph.run.lock import FolderHeld, Lock, is_held_by_another

STALE_S = 0.5
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
RACE = """
import sys, time
from pathlib import Path
from torchtitan_graph.run import lock
lock.LOOK_EVERY_S = 0.05
try:
    held = lock.Lock(Path(sys.argv[1]), *map(float, sys.argv[2:]))
    print("held", flush=True)
    while held.beat():
        time.sleep(0.02)
    print("lost", flush=True)
except lock.FolderHeld:
    print("refused", flush=True)
"""
HOLD = "import sys; from pathlib import Path; from torchtitan_graph.run.lock import Lock; Lock(Path(sys.argv[1]))"


def can_unshare() -> bool:
    return (
        shutil.which("unshare") is not None and not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
    )


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(lock_module, "SEEN_WITHIN_S", 0.2)
    monkeypatch.setattr(lock_module, "QUIET_S", 1.0)


@contextmanager
def beating(path: Path, ahead_s: float = 0) -> Iterator[None]:
    """Touch a lock every few milliseconds, by a clock that is ahead."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.01):
            now = time.time() + ahead_s
            os.utime(path, (now, now))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_released_lock_is_free(tmp_path: Path) -> None:
    Lock(tmp_path).release()
    assert not list(tmp_path.iterdir())
    Lock(tmp_path)


def test_held_lock_is_refused_and_kept(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    content = lock.path.read_text()
    with beating(lock.path), pytest.raises(UserError, match=f"a run holds it, process {os.getpid()} on .*; stop that"):
        Lock(tmp_path)
    assert lock.path.read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], check=True)
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] != os.getpid()
    Lock(tmp_path)
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_process_that_ended_but_was_not_waited_for_is_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)])
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
    Lock(tmp_path)
    process.wait()


def held_elsewhere(folder: Path, **changes: object) -> Path:
    """Write the lock of a process on another host."""
    lock = Lock(folder)
    lock.path.write_text(json.dumps(lock.me | {"host": "elsewhere", **changes}))
    return lock.path


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600], ids=["clock behind", "same clock", "clock ahead"])
def test_other_host_holds_it_while_its_heart_beats(ahead_s: int, tmp_path: Path) -> None:
    """The file's times are of a clock that is an hour away."""
    path = held_elsewhere(tmp_path)
    with beating(path, ahead_s), pytest.raises(FolderHeld, match="on elsewhere"):
        Lock(tmp_path, STALE_S)
    Lock(tmp_path, STALE_S)  # it has stopped


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("boot a, pid:[1]", "boot a, pid:[2]"),
        ("boot a, pid:[1]", "boot b, pid:[1]"),
        ("", ""),
        ("boot a, pid:[1]", None),
    ],
    ids=["namespace", "boot", "unknown", "an earlier release's"],
)
def test_a_process_id_that_may_mean_another_process_tells_nothing(
    here: str, there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of no process here, and may live elsewhere."""
    monkeypatch.setattr(lock_module, "processes", lambda: here)
    lock = Lock(tmp_path)
    content = {**lock.me, "pid": 4_194_303, "processes": there}
    lock.path.write_text(
        json.dumps({key: value for key, value in content.items() if value is not None or "job" in key})
    )
    with beating(lock.path), pytest.raises(FolderHeld):
        Lock(tmp_path)


@pytest.mark.skipif(not can_unshare(), reason="needs to make namespaces")
def test_of_two_containers_on_a_host_one_gets_it(tmp_path: Path) -> None:
    """Both have the same process ids and the same host's name; neither sees the other's process."""
    command = [*UNSHARE, sys.executable, "-c", RACE, str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=-1, text=True) as first,
        subprocess.Popen(command, stdout=-1, text=True) as second,
    ):
        said = [each.stdout.readline().strip() for each in (first, second)]  # type: ignore[union-attr]
        for each in (first, second):
            each.kill()
    assert sorted(said) == ["held", "refused"]


def test_a_process_that_was_stopped_for_longer_than_the_lock_s_life_has_lost_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), "0.5"], stdout=-1, text=True) as paused:
        assert paused.stdout.readline() == "held\n"  # type: ignore[union-attr]
        paused.send_signal(signal.SIGSTOP)
        Lock(tmp_path, 0.5).check()
        paused.send_signal(signal.SIGCONT)
        assert paused.stdout.readline() == "lost\n"  # type: ignore[union-attr]


def test_a_lock_that_was_not_renewed_in_time_is_lost_for_ever(tmp_path: Path) -> None:
    lock = Lock(tmp_path, 1.0)
    assert lock.beat()
    lock.check()
    time.sleep(0.8)  # three quarters of that: others take it over after all of it
    with pytest.raises(FolderLost, match=r"run.lock, the lock of this run's folder, is lost: its heartbeat"):
        lock.check()
    assert not lock.beat()
    lock.release()
    assert lock.path.exists(), "it may be another's at any moment"


def test_a_heartbeat_that_takes_too_long_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that did not answer for a while does then what it was asked."""
    lock, touch = Lock(tmp_path, 0.2), os.utime
    monkeypatch.setattr(os, "utime", lambda path: (time.sleep(0.2), touch(path)))
    assert not lock.beat() and lock.why_lost()


def test_a_watcher_that_is_told_to_end_gives_up(tmp_path: Path) -> None:
    held_elsewhere(tmp_path)
    with pytest.raises(FolderHeld):
        Lock(tmp_path, wait=lambda seconds: True)


@pytest.mark.parametrize(
    ("job", "job_id", "said"),
    [
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, "17", "job 17"),
        ({"TORCHELASTIC_RUN_ID": "first", "JOBSET_RESTART_ATTEMPT": "1"}, "torchrun first", "job torchrun first"),
    ],
    ids=["SLURM", "Kubernetes"],
)
def test_later_attempt_of_the_same_job_takes_over(
    job: dict[str, str], job_id: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    for attempt in ([1, 0], [2, 0]):
        path = held_elsewhere(tmp_path, attempt=attempt)
        with beating(path), pytest.raises(UserError, match=said):
            Lock(tmp_path)
        path.unlink()
    path = held_elsewhere(tmp_path, job_id="18", attempt=[0, 0])
    with beating(path), pytest.raises(UserError, match="job 18"):
        Lock(tmp_path)
    path.unlink()
    held_elsewhere(tmp_path, job_id=job_id, attempt=[0, 3])
    Lock(tmp_path)


def test_heart_notices_that_the_lock_is_gone(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    assert lock.beat()
    held_elsewhere_content = json.dumps(lock.me | {"pid": 1})
    lock.path.write_text(held_elsewhere_content)
    assert not lock.why_lost(), "it has not looked"
    assert not lock.beat() and "another run has taken it" in lock.why_lost()
    lock.release()
    assert lock.path.read_text() == held_elsewhere_content, "another's lock was released"


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], check=True)
    racers = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], stdout=-1, text=True) for _ in range(6)]
    try:
        assert sorted(racer.stdout.readline().strip() for racer in racers) == ["held"] + ["refused"] * 5  # type: ignore[union-attr]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'{"host": "a", "pid": ', "is not JSON"),
        (NESTED, "deep"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"host": "a", "pid": "x", "job_id": null, "attempt": [0, 0]}', "pid: Expected `int`, got `str`"),
        (b'{"host": "a", "pid": -1, "job_id": null, "attempt": [0, 0]}', "pid"),
        (b'{"host": "a", "pid": 1' + b"0" * 30 + b', "job_id": null, "attempt": [0, 0]}', "pid"),
        (b'{"host": "a", "pid": 1, "job_id": "7"}', "attempt"),
        (b'{"host": "a", "pid": 1, "job_id": "7", "attempt": [0]}', "attempt"),
    ],
    ids=["empty", "torn", "deep", "no object", "a word for a number", "negative", "huge", "a key less", "short"],
)
def test_a_lock_that_does_not_say_who_holds_it_is_told_as_such(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger.name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    path = tmp_path / "run.lock"
    path.write_bytes(content)
    with beating(path), pytest.raises(FolderHeld, match="its holder is unknown") as refused:
        Lock(tmp_path)
    assert said in str(refused.value) and "go on at once" not in caplog.text
    assert "None" not in str(refused.value) and path.read_bytes() == content
    assert not is_held_by_another(tmp_path, "8")
    Lock(tmp_path, 0.1).release()
    assert f"If nothing runs there, delete {path} to go on at once" in caplog.text


def test_what_is_no_file_in_the_place_of_a_lock_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(FolderHeld, match=r"run.lock: is not a regular file, but a FIFO; .* delete it"):
        Lock(tmp_path)
    (tmp_path / "run.lock").unlink()
    (tmp_path / "run.lock").symlink_to("nothing")
    with pytest.raises(FolderHeld, match=r"run.lock is a link to nothing; .* delete it"):
        Lock(tmp_path)
    (tmp_path / "run.lock").unlink()
    (tmp_path / "run.lock").touch()
    os.truncate(tmp_path / "run.lock", 2**40)
    with pytest.raises(FolderHeld, match=r"run.lock: has 1,099,511,627,776 bytes"):
        Lock(tmp_path)


def test_a_lock_that_is_replaced_by_something_else_is_not_ours_any_more(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.path.unlink()
    os.mkfifo(lock.path)
    assert not lock.beat()
    lock.release()
    assert lock.path.is_fifo()


def test_a_lock_that_is_released_while_another_looks_at_it_is_free(tmp_path: Path) -> None:
    first = Lock(tmp_path)
    Lock(tmp_path, wait=lambda seconds: first.release())


def test_another_with_the_same_host_and_process_id_is_told_apart(tmp_path: Path) -> None:
    first = Lock(tmp_path)
    first.path.unlink()
    second = Lock(tmp_path)
    with pytest.raises(FolderLost, match="another run has taken it"):
        first.check()
    first.release()
    second.check()


def test_a_file_system_without_links_has_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    lock = Lock(tmp_path)
    with beating(lock.path), pytest.raises(FolderHeld, match="a run holds it"):
        Lock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_link_whose_answer_was_lost_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server has made it, and the client asked again."""
    link = os.link

    def link_and_ask_again(old: Path, new: Path) -> None:
        link(old, new)
        link(old, new)

    monkeypatch.setattr(os, "link", link_and_ask_again)
    Lock(tmp_path, wait=lambda seconds: True).check()


@pytest.mark.parametrize("name", ["link", "unlink"])
def test_a_lock_is_taken_and_released_though_answers_are_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server has done it, and the client reports an error."""
    done = getattr(os, name)

    def lose(*paths: Path, **others: object) -> None:
        done(*paths, **others)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, lose)
    lock = Lock(tmp_path, wait=lambda seconds: pytest.fail("it waits for itself"))
    assert lock.beat()
    lock.check()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_empty_lock(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            Lock(disk)
        assert not (disk / "run.lock").exists()


def test_what_killed_processes_left_beside_the_lock_goes(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = Lock(tmp_path)._here  # with the name of this host and namespace
    names = (f"{here}{gone.pid}.a", f"{here}1.a", f"{here}x", f"run.lock.elsewhere.{gone.pid}")
    old, *left = [tmp_path / name for name in ("run.lock.old", *names)]
    for path in (old, *left):
        path.touch()
    os.utime(old, (0, 0))
    (tmp_path / f"{here}{gone.pid}.b").mkdir()
    (tmp_path / "run.lock").unlink()
    Lock(tmp_path)
    assert [path.exists() for path in (old, *left)] == [False, False, True, True, True]


def test_a_run_of_another_job_holds_a_folder_while_its_heart_beats(tmp_path: Path) -> None:
    path = held_elsewhere(tmp_path, job_id="7")
    with beating(path):
        assert is_held_by_another(tmp_path, "8") and not is_held_by_another(tmp_path, "7")
    assert not is_held_by_another(tmp_path, "8")
