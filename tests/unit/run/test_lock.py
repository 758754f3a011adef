"""One process at a time holds a folder's lock, and no dead one does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_graph.errors import UserError
from torchtitan_graph.run.lock import STALE_AFTER_S, Lock

HOLD = "import sys; from pathlib import Path; from torchtitan_graph.run.lock import Lock; Lock(Path(sys.argv[1]))"


def test_released_lock_is_free(tmp_path: Path) -> None:
    Lock(tmp_path).release()
    assert not list(tmp_path.iterdir())
    Lock(tmp_path)


def test_held_lock_is_refused_and_kept(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    content = lock.path.read_text()
    with pytest.raises(UserError, match=f"a run is going on in it, process {os.getpid()} on "):
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


def test_later_attempt_of_the_same_job_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for attempt in ([1, 0], [2, 0]):
        path = held_elsewhere(tmp_path, attempt=attempt)
        with pytest.raises(UserError, match="job 17"):
            Lock(tmp_path)
        path.unlink()
    path = held_elsewhere(tmp_path, job_id="18", attempt=[0, 0])
    with pytest.raises(UserError, match="job 18"):
        Lock(tmp_path)
    path.unlink()
    held_elsewhere(tmp_path, attempt=[0, 3])
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
