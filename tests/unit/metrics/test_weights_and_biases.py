"""What goes to Weights & Biases, seen by a stand-in for its package. tests/e2e has the real one, without a network."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtitan_graph.config import JobConfig, job
from torchtitan_graph.errors import UserError
from torchtitan_graph.metrics import Metrics, check_wandb

STAND_IN = """
import json, pathlib

class Run:
    def __init__(self, file):
        self.file = file
    def tell(self, what, /, *args, **kwargs):
        with self.file.open("a") as file:
            file.write(json.dumps([what, args, kwargs]) + chr(10))
    def define_metric(self, *args, **kwargs):
        self.tell("define_metric", *args, **kwargs)
    def log(self, values):
        self.tell("log", values)
    def finish(self):
        self.tell("finish")

def init(**kwargs):
    run = Run(pathlib.Path(kwargs["dir"]) / "told.jsonl")
    run.tell("init", **kwargs)
    return run
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "packages"
    package.mkdir()
    (package / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(package)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def run(folder: Path, start_step: int = 0, rank: int = 0) -> list[Any]:
    """Take a step and validate; give all that the stand-in was told."""
    config = JobConfig(metrics=job.Metrics(log_freq=1, enable_wandb=True))
    with Metrics(config, folder, rank=rank, total_steps=9, start_step=start_step) as logs:
        logs.start_step()
        logs.end_step(start_step + 1, loss=1.5, grad_norm=0.25, lr=1e-3, tokens_seen=100, data_loading_s=0.5)
        logs.log_validation(start_step + 1, {"validation_loss": 3.0})
    told = folder / "told.jsonl"
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


@pytest.mark.usefixtures("stand_in")
def test_every_number_and_option_is_sent(tmp_path: Path) -> None:
    (_, _, options), axis, (_, (step,), _), (_, (validation,), _), finish = run(tmp_path)
    assert options["config"]["metrics.log_freq"] == 1
    assert axis == ["define_metric", ["*"], {"step_metric": "step"}]
    assert (step["step"], step["train/loss"], step["train/lr"]) == (1, 1.5, 1e-3)
    assert validation == {"step": 1, "validation/loss": 3.0}
    assert finish[0] == "finish"


@pytest.mark.usefixtures("stand_in")
def test_nothing_leaves_the_machine_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "a")[0][2]["mode"] == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    options = run(tmp_path / "b")[0][2]
    assert options["mode"] == "online"
    assert "secret" not in json.dumps(options)


@pytest.mark.usefixtures("stand_in")
def test_a_resumed_run_goes_on_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, start_step=1)
    told = run(tmp_path)
    first, resumed, new = [options["id"] for name, _, options in told if name == "init"]
    assert first == resumed != new


@pytest.mark.usefixtures("stand_in")
def test_an_id_that_can_not_be_read_begins_a_new_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "wandb_run_id"
    for number, content in enumerate((b"", b"a/b", b"\xff", b"x" * 1000, None)):
        kept.unlink(missing_ok=True)
        os.mkfifo(kept) if content is None else kept.write_bytes(content)
        run(tmp_path, start_step=1)
        assert re.fullmatch("[0-9a-f]{32}", kept.read_text())
        assert caplog.text.count("a new run begins at Weights & Biases") == number + 1
    (tmp_path / "other" / "wandb_run_id").mkdir(parents=True)
    with pytest.raises(UserError, match=r"metrics.enable_wandb = true: .*wandb_run_id can't be written"):
        run(tmp_path / "other")


@pytest.mark.usefixtures("stand_in")
def test_other_ranks_send_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, rank=1) == []


def test_a_package_that_is_not_there_is_told_before_work_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"metrics.enable_wandb = true: the package wandb is not installed; pip"):
        check_wandb(True)
    check_wandb(False)
