"""One process at a time holds a folder's lock, and no dead one does."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_graph.errors import UserError
from torchtitan_graph.run import lock as lock_module
from torchtitan_graph.run.lock import STALE_AFTER_S, FolderHeld, Lock, is_held_by_another

HOLD = "import sys; from pathlib import Path; from torchtitan_graph.run.lock import Lock; Lock(Path(sys.argv[1]))"


def test_released_lock_is_free(tmp_path: Path) -> None:
    Lock(tmp_path).release()
    assert not list(tmp_path.iterdir())
    Lock(tmp_path)


def test_held_lock_is_refused_and_kept(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    content = lock.path.read_text()
    with pytest.raises(UserError, match=f"a run holds it, process {os.getpid()} on "):
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


def test_other_host_holds_it_while_its_heart_beats(tmp_path: Path) -> None:
    path = held_elsewhere(tmp_path)
    with pytest.raises(UserError, match="on elsewhere"):
        Lock(tmp_path)
    old = time.time() - STALE_AFTER_S - 5
    os.utime(path, (old, old))
    Lock(tmp_path)


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
        with pytest.raises(UserError, match=said):
            Lock(tmp_path)
        path.unlink()
    path = held_elsewhere(tmp_path, job_id="18", attempt=[0, 0])
    with pytest.raises(UserError, match="job 18"):
        Lock(tmp_path)
    path.unlink()
    held_elsewhere(tmp_path, job_id=job_id, attempt=[0, 3])
    Lock(tmp_path)


def test_heart_notices_that_the_lock_is_gone(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    assert lock.beat()
    held_elsewhere_content = json.dumps(lock.me | {"pid": 1})
    lock.path.write_text(held_elsewhere_content)
    assert not lock.beat()
    lock.release()
    assert lock.path.read_text() == held_elsewhere_content, "another's lock was released"


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], check=True)
    stay = "import time\ntry:\n    {}\n    print('held', flush=True)\nexcept ValueError: print('refused', flush=True)"
    script = f"{stay.format(HOLD.replace('; ', chr(10) + '    '))}\nsys.stdin.read()"
    racers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=-1, stdout=-1, text=True)
        for _ in range(6)
    ]
    said = [racer.stdout.readline().strip() for racer in racers]  # type: ignore[union-attr]
    for racer in racers:
        racer.communicate()
    assert sorted(said) == ["held"] + ["refused"] * 5


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
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    path = tmp_path / "run.lock"
    path.write_bytes(content)
    with pytest.raises(FolderHeld, match="its holder is unknown") as refused:
        Lock(tmp_path)
    assert said in str(refused.value) and f"at once if you delete {path}" in str(refused.value)
    assert "None" not in str(refused.value) and path.read_bytes() == content
    assert not is_held_by_another(tmp_path, "8")
    os.utime(path, (0, 0))
    Lock(tmp_path).release()


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


def test_a_lock_that_is_released_while_another_looks_at_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, look = Lock(tmp_path), lock_module.read_small

    def too_late(path: Path) -> bytes:
        monkeypatch.setattr(lock_module, "read_small", look)
        first.release()
        return look(path)

    monkeypatch.setattr(lock_module, "read_small", too_late)
    Lock(tmp_path)


def test_a_file_system_without_links_has_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    lock = Lock(tmp_path)
    with pytest.raises(FolderHeld, match="a run holds it"):
        Lock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())


def test_what_killed_processes_left_beside_the_lock_goes(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = socket.gethostname()
    left = [tmp_path / f"run.lock.{name}" for name in (f"{host}.{gone.pid}", f"{host}.1", "elsewhere.77", f"{host}.x")]
    for path in left:
        path.touch()
    os.mkfifo(tmp_path / f"run.lock.{host}.{os.getpid()}")  # of a process that had this one's number
    (tmp_path / f"run.lock.{host}.4194303").mkdir()
    Lock(tmp_path)
    assert [path.exists() for path in left] == [False, True, True, True]
