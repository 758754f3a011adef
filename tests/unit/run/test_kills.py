"""A kill at any change to a file of a run's folder is nothing that the next start stumbles over."""

import json
from pathlib import Path

import pytest

from dying import die_at, run_in_a_child
from torchtitan_graph.config import load
from torchtitan_graph.metrics import jsonl
from torchtitan_graph.run.failure import FAULT, read_failures, write_failure
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.status import FAILED, FINISHED, read_status

STEPS = 3
LEFT = {"config.toml", "config.toml.tmp", "failures", "metrics.jsonl", "metrics_dropped.jsonl", "status.json"}


def run_once(folder: Path) -> None:
    """Write what a run does, beside its checkpoints, that goes on after step 1 and fails after step 3."""
    config = load(["--job.dump_folder", str(folder)])
    run = RunFolder(config)
    jsonl.begin(folder / "metrics.jsonl", 1)
    run.save_config(config)
    run.resume(1, 10)
    for step in range(2, STEPS + 1):
        jsonl.append(folder / "metrics.jsonl", {"step": step, "loss": 1 / 3})
        run.done(step, 1 / 3)
        run.status.write()  # type: ignore[union-attr]  # a heartbeat
        run._lock.beat()
    write_failure(folder, RuntimeError("no"), FAULT)
    run.close(FAILED)


def begin_as_killed(folder: Path, number: int, torn: bool, log: Path) -> int:
    def work() -> None:
        die_at(number, folder, torn, log)
        run_once(folder)

    return run_in_a_child(work)


@pytest.mark.parametrize(
    ("torn", "every"),
    [
        pytest.param(True, 9, id="some"),
        pytest.param(False, 1, marks=pytest.mark.slow, id="between"),
        pytest.param(True, 1, marks=pytest.mark.slow, id="torn"),
    ],
)
def test_the_next_start_goes_on_after_a_kill_at_a_change(torn: bool, every: int, tmp_path: Path) -> None:
    killed = []
    for number in range(1, 200, every):
        folder, log = tmp_path / f"run-{number}", tmp_path / "log"
        folder.mkdir()
        for step in range(1, STEPS + 1):
            jsonl.append(folder / "metrics.jsonl", {"step": step, "loss": 1 / 3})
        log.unlink(missing_ok=True)
        if begin_as_killed(folder, number, torn, log) == 0:
            break
        killed.append(log.read_text().splitlines()[-1])
        run = RunFolder(load(["--job.dump_folder", str(folder)]))  # nobody holds it, nothing is in the way
        jsonl.begin(folder / "metrics.jsonl", 1)
        lines = (folder / "metrics.jsonl").read_text()
        assert lines.endswith("\n") and [json.loads(line)["step"] for line in lines.splitlines()] == [1]
        assert read_status(folder)
        assert len(read_failures(folder)) == len(list((folder / "failures").glob("*.json"))), "one is damaged"
        run.close(FINISHED)
        assert {path.name for path in folder.iterdir()} <= LEFT
    assert number > 30
    wanted = ("link run.lock", "remove run.lock", "utime run.lock", "open failures", "rename status.json", "truncate")
    for change in wanted if every == 1 else ():
        assert any(change in each for each in killed), (change, killed)
