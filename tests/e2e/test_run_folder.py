"""A run's folder belongs to one run, and goes on with the model, tokenizer and data that it began with."""

import json
import os
import re
import socket
import time
from pathlib import Path

import patched_train
import pytest
from runs import EAGER, TINY, records, saved_steps, start, train

from disks import disk_that_hangs
from torchtitan_graph.config import dump_toml, load
from torchtitan_graph.run.lock import Lock


def test_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    run = start("--job.dump_folder", str(tmp_path))
    while any(process.is_alive() for process in run.processes):
        assert lock.beat()
        time.sleep(0.1)
    code, output = run.finish()
    assert code == 2, output
    assert f"a run holds it, process {os.getpid()} on {socket.gethostname()}" in output
    assert "Traceback" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"], "something was written"
    lock.release()


@pytest.mark.parametrize(("how", "ranks"), [("taken", 2), ("stopped", 1), ("hung", 1)])
def test_a_run_that_has_lost_its_folder_ends_after_its_step_and_writes_nothing_there(
    how: str, ranks: int, tmp_path: Path
) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--checkpoint.interval", "2", *EAGER]
    code, output = train(*options, ranks=ranks, patch=patched_train.lose_folder_in_step_3, LOSE=how)
    assert code == 7, output
    assert "this run has lost its folder" in output and "Traceback" not in output
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
    assert saved_steps(tmp_path) == [2] and not (tmp_path / "failures").exists()
    if how != "stopped":  # then nobody has taken it
        assert (tmp_path / "run.lock").read_text() == '{"host": "other"}'
        assert (tmp_path / "status.json").read_text() == '{"state": "the other one"}'


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_whose_disk_hangs_ends_and_saves_nothing_once_it_answers(mode: str, tmp_path: Path) -> None:
    with disk_that_hangs(tmp_path / "disk") as (disk, hang):
        folder = disk / "run"
        options = ["--job.dump_folder", str(folder), "--checkpoint.async_mode", mode, "--training.steps", "100000"]
        run = start(*options, "--model.name", "my_models.slow", *EAGER, patch=patched_train.short_life, SLOW_S="0.02")
        run.wait_for(folder / "checkpoint" / "step-2")
        hang(True)
        time.sleep(4)
        (process,) = run.processes
        assert process.is_alive(), "it waits for its disk"
        saved = set(saved_steps(folder))
        hang(False)
        code, output = run.finish()
        assert code == 7, output
        assert "this run has lost its folder" in output or "is lost" in output, output
        assert len(set(saved_steps(folder)) - saved) <= 1, "a rename that the system had begun"
        assert json.loads((folder / "status.json").read_text())["state"] == "running"


def test_resuming_refuses_another_model_and_names_what_changed(tmp_path: Path) -> None:
    """The checkpoint is an empty folder: what is refused is refused before anything is read from it."""
    (tmp_path / "checkpoint" / "step-1").mkdir(parents=True)
    saved = tmp_path / "config.toml"
    saved.write_text(dump_toml(load(["--job.config_file", TINY, "--job.dump_folder", str(tmp_path)])))
    before = saved.read_text()
    # Also by a run that would save nothing: its configuration would take the place of the checkpoints'.
    options = [
        "--checkpoint.no-enable",
        "--model.name",
        "my_models.experts",
        "--debug.seed",
        "1",
        "--optimizer.lr",
        "1e-3",
    ]
    code, output = train("--job.dump_folder", str(tmp_path), *options, "--job.allow_changed", "debug.seed")
    assert code == 2, output
    assert "changed since the run was started: optimizer.lr = 0.001, was 0.01" in output
    assert re.search(r'^  model.name = "my_models.experts", was "my_models.tiny"$', output, re.MULTILINE), output
    assert not re.search(r"^  (debug.seed|optimizer.lr)", output, re.MULTILINE), output
    assert saved.read_text() == before
    assert json.loads(next((tmp_path / "failures").iterdir()).read_text())["code"] == 2
    assert not (tmp_path / "run.lock").exists()
