"""A signal to one rank stops all after the step, with a checkpoint; the run goes on to the bits it would have had."""

import json
import signal
import sys
from pathlib import Path

import patched_train
import pytest
from runs import EAGER, REPOSITORY, TINY, Command, Result, numbers, records, saved, saved_steps, train


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_run_that_a_signal_stopped_goes_on_bitwise(mode: str, reference: tuple[Path, Result], tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--compile.mode", mode]
    code, output = train(
        *options, "--checkpoint.last_save_model_only", ranks=2, patch=patched_train.signal_in_step_3, SIGNAL="SIGUSR1"
    )
    assert code == 0, output
    assert list(numbers(tmp_path)) == [1, 2, 3]
    assert saved_steps(tmp_path) == [2, 3]
    assert not json.loads((tmp_path / "checkpoint" / "step-3" / "train_state.json").read_text())["model_only"]
    stopped = status(tmp_path)
    assert (stopped["state"], stopped["reason"], stopped["step"]) == ("stopped", "SIGUSR1", 3)

    code, output = train(*options, ranks=2)
    assert code == 0, output
    assert "resuming after step 3" in output
    assert numbers(tmp_path) == numbers(reference[0])
    assert saved(tmp_path, 5) == saved(reference[0], 5)
    finished = status(tmp_path)
    assert (finished["state"], finished["step"], finished["restarts"]) == ("finished", 5, 1)
    assert all(finished["seconds"][name] > 0 for name in ("useful", "startup", "checkpoint", "idle"))
    assert finished["loss"] == records(tmp_path)[-1]["loss"]
    assert "goodput" in output
    assert not (tmp_path / "run.lock").exists()


def validations(folder: Path) -> dict[int, float]:
    return {record["step"]: record["validation_loss"] for record in records(folder) if "validation_loss" in record}


LONG_VALIDATION = ["--validation.enable", "--validation.freq", "3", "--validation.steps", "20", *EAGER]


@pytest.mark.parametrize(
    ("steps", "ranks"), [(4, 1), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow)]
)
def test_signal_in_validation_ends_that_at_once_and_the_resumed_run_does_it(
    steps: int, ranks: int, tmp_path: Path
) -> None:
    whole, stopped, seen = tmp_path / "whole", tmp_path / "stopped", tmp_path / "seen"
    options = [*LONG_VALIDATION, "--training.steps", str(steps), "--checkpoint.last_save_model_only"]
    assert train("--job.dump_folder", str(whole), *options, ranks=ranks).code == 0
    options += ["--job.dump_folder", str(stopped)]
    code, output = train(*options, ranks=ranks, patch=patched_train.signal_in_validation, SEEN=str(seen))
    assert code == 0 and "stopped by SIGTERM after step 3" in output, output
    assert len(seen.read_text()) < 6 * ranks and not validations(stopped)
    assert status(stopped)["state"] == "stopped" and saved_steps(stopped)[-1] == 3

    code, output = train(*options, ranks=ranks)
    assert code == 0, output
    assert validations(stopped) == validations(whole) and len(validations(whole)) == (1 if steps == 3 else 2)
    assert numbers(stopped) == numbers(whole) and saved(stopped, steps) == saved(whole, steps)
    assert status(stopped)["state"] == "finished"


def test_signal_in_samples_ends_those_at_once(tmp_path: Path) -> None:
    seen, run = tmp_path / "seen", tmp_path / "run"
    options = ["--job.dump_folder", str(run), "--samples.prompts", "import os,def f(", "--samples.freq", "2", *EAGER]
    code, output = train(*options, "--samples.length", "40", patch=patched_train.signal_in_validation, SEEN=str(seen))
    assert code == 0 and "stopped by SIGTERM after step 2" in output, output
    assert len(seen.read_text()) < 6 and not any("samples" in record for record in records(run))
    assert saved_steps(run) == [2]


def test_second_ctrl_c_ends_at_once_and_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    options = {"patch": patched_train.signal_in_step_3, "SIGNAL": "SIGINT", "SIGNAL_AGAIN_AFTER": "1.5"}
    code, output = train("--job.dump_folder", str(tmp_path), *EAGER, **options)
    assert code == 130 and "stopped by Ctrl-C at once" in output and "Traceback" not in output, output
    assert saved_steps(tmp_path) == [2]
    assert status(tmp_path)["state"] == "stopped"
    code, output = train(
        "--job.dump_folder",
        str(tmp_path),
        "--training.steps",
        "3",
        *EAGER,
        patch=patched_train.signal_in_step_3,
        SIGNAL="SIGTERM",
    )
    assert code == 0, output
    assert "resuming after step 2" in output
    assert status(tmp_path)["state"] == "finished", "a signal in the last step stops nothing"


def test_signal_while_torch_is_imported_ends_the_process_at_once(tmp_path: Path) -> None:
    """A fresh interpreter signals itself as soon as torch begins to be imported."""
    script = """
import os, runpy, signal, sys
class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGUSR1)
sys.meta_path.insert(0, Signal())
runpy.run_module("torchtitan_graph.train", run_name="__main__")
"""
    options = ["--job.config_file", TINY, "--job.dump_folder", str(tmp_path)]
    code, output = Command(sys.executable, "-c", script, *options).finish()
    assert code == 128 + signal.SIGUSR1, output
    assert output.startswith("stopped by SIGUSR1 before the first step") and output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_signal_in_set_up_ends_the_run_in_order(tmp_path: Path) -> None:
    validates = ["--validation.enable"]  # its first microbatch is looked at before the steps are built
    code, output = train(
        "--job.dump_folder", str(tmp_path), *validates, patch=patched_train.signal_in_setup, SIGNAL="SIGTERM"
    )
    assert code == 128 + signal.SIGTERM, output
    assert output.count("stopped by SIGTERM before the first step") == 1 and "Traceback" not in output
    assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("stopped", "SIGTERM")
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.slow
def test_launcher_passes_a_signal_on_and_ends_as_its_workers_do(tmp_path: Path) -> None:
    options = ["--job.dump_folder", "./run", "--model.name", "my_models.slow", "--training.steps", "100"]
    command = Command(
        *[str(REPOSITORY / "run_train.sh"), *options, "--checkpoint.interval", "100"],
        cwd=tmp_path,
        NGPU="2",
        CONFIG_FILE=TINY,
        SLOW_S="0.1",
    )
    command.wait_for(tmp_path / "run" / "metrics.jsonl")
    command.process.send_signal(signal.SIGINT)
    code, output = command.finish()
    assert code == 0, output
    assert "stopped by Ctrl-C after step" in output and "Traceback" not in output
    assert len(saved_steps(tmp_path / "run")) == 1 and status(tmp_path / "run")["state"] == "stopped"
