"""A run's folder belongs to one run, and goes on with the model, tokenizer and data that it began with."""

import json
import os
import re
import socket
from pathlib import Path

from runs import TINY, train

from torchtitan_graph.config import dump_toml, load
from torchtitan_graph.run.lock import Lock


def test_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    code, output = train("--job.dump_folder", str(tmp_path))
    assert code == 2, output
    assert f"a run holds it, process {os.getpid()} on {socket.gethostname()}" in output
    assert "Traceback" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"], "something was written"
    lock.release()


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
