"""A run whose disk is full, and stays so, ends in order, and isn't started again."""

import functools
import json
from pathlib import Path

import pytest
from runs import train

from disks import fill, small_disk
from torchtitan_graph.launch.requeue import begin_attempt, end_attempt

JOB = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}


def fill_in_step_3(disk: Path, with_files: bool) -> None:
    from torchtitan_graph.trainer import Trainer

    step = Trainer.train_step

    def fill_and_step(self: Trainer, metrics: object) -> bool:
        if self.step == 2:
            fill(disk, with_files)
        return step(self, metrics)  # type: ignore[arg-type]

    Trainer.train_step = fill_and_step  # type: ignore[method-assign]


@pytest.mark.parametrize("with_files", [False, True], ids=["no room", "no inodes"])
def test_a_disk_that_stays_full_ends_the_run_in_order(
    with_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "4m", inodes=100) as disk:
        run = disk / "run"
        assert begin_attempt(run, "7", 0, ["n1"], []).again
        options = ["--job.dump_folder", str(run), "--compile.mode", "eager"]
        code, output = train(*options, patch=functools.partial(fill_in_step_3, disk, with_files), **JOB)
        assert code == 4 and "Traceback" not in output, output
        assert ("takes no more files" if with_files else "is full") in output
        assert not (run / "run.lock").exists() and not (run / "run.reserve").exists()
        status = json.loads((run / "status.json").read_text())
        assert (status["state"], status["step"]) == ("failed", 4)
        (failure,) = (run / "failures").iterdir()
        assert json.loads(failure.read_text())["code"] == 4
        for name, value in JOB.items():
            monkeypatch.setenv(name, value)
        assert end_attempt(run, "7", 0, []) == (False, "it would fail in the same way again", [])
        fill(disk, with_files)  # what the end has given back
        assert not begin_attempt(run, "7", 1, ["n1"], []).again
        code, output = train(*options, **JOB)
        assert code == 2 and "Traceback" not in output and "can't be written" in output, output
        assert not (run / "run.lock").exists()
