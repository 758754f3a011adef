"""What goes to MLflow, with the real package and a database in the run's folder."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_graph.errors import UserError
from torchtitan_graph.metrics import check_mlflow
from torchtitan_graph.metrics.mlflow import PACKAGES

# In a process of its own, where MLflow's libraries may warn: a run, its resumption with another option, and one that
# fails; then what a client reads.
PROGRAM = """
import json, sys, threading
from pathlib import Path
from torchtitan_graph.config import JobConfig, job
from torchtitan_graph.metrics import Metrics

folder = Path(sys.argv[1])

def run(start_step, steps):
    config = JobConfig(metrics=job.Metrics(log_freq=1, enable_mlflow=True), training=job.Training(steps=steps))
    with Metrics(config, folder, rank=0, total_steps=steps, start_step=start_step) as logs:
        logs.start_step()
        logs.end_step(start_step + 1, loss=1.5, grad_norm=0.25, lr=1e-3, tokens_seen=100, data_loading_s=0.5)
        logs.log_validation(start_step + 1, {"validation_loss": 3.0})
        if steps == 30:
            raise RuntimeError

run(0, 10)
run(1, 20)
(folder / "mlflow_run_id").write_text("gone")
try:
    run(1, 30)
except RuntimeError:
    pass
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow/mlflow.db")
experiment = client.get_experiment_by_name("torchtitan_graph")
runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
print(json.dumps([
    {
        "status": run.info.status,
        "params": run.data.params,
        "changed": run.data.tags.get("training.steps"),
        "losses": [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")],
        "validation": run.data.metrics["validation/loss"],
    }
    for run in runs
]))
print([thread.name for thread in threading.enumerate()], "telemetry" in sys.modules)
"""


@pytest.mark.slow  # seconds to import MLflow, and to make a database
def test_a_resumed_run_continues_and_nothing_leaves_the_machine(tmp_path: Path) -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")  # not importorskip: an import here would warn, an error
    (tmp_path / "elsewhere").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found, threads = done.stdout.splitlines()[-2:]
    first, new = json.loads(found)
    assert first["status"] == "FINISHED" and new["status"] == "FAILED"
    assert first["losses"] == [[1, 1.5], [2, 1.5]] and first["validation"] == 3.0
    assert first["params"]["training.steps"] == "10" and first["changed"] == "20"  # the resumed run asked for more
    assert first["params"]["model.name"] == "llama3" and len(first["params"]) > 100
    assert new["params"]["training.steps"] == "30" and new["changed"] is None
    assert threads.startswith("['MainThread']")  # none of telemetry's
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "MLflow has no run gone; a new run begins there" in done.stderr + done.stdout


def test_packages_that_are_not_there_are_told_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mlflow(False, tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"metrics.enable_mlflow = true: not installed: mlflow.*; pip install mlflow"):
        check_mlflow(True, tmp_path)


def test_a_folder_that_no_address_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"job.dump_folder = .*run#1': the address"):
        check_mlflow(True, tmp_path / "run#1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_mlflow(True, tmp_path / "run#1")
