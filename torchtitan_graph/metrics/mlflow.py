"""MLflow: TensorBoard's numbers in a database in the run's folder, or at a server."""

import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan_graph.config.dump import in_toml
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.metrics.run_id import keep_id, read_id
from torchtitan_graph.patience import refuse_unwritable

KEPT = "mlflow_run_id"
PACKAGES = ("mlflow", "sqlalchemy", "alembic")
AT_ONCE = 100  # parameters that one request may hold
# Not a byte to MLflow's makers, and no long wait of all ranks for a server that is gone.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def check_mlflow(enabled: bool, folder: Path) -> None:
    """Raise UserError if `metrics.enable_mlflow` is on and its packages are missing, or can't write to the folder."""
    if not enabled:
        return
    at = os.environ.get("MLFLOW_TRACKING_URI")
    if missing := [name for name in PACKAGES[: 1 if at else None] if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"metrics.enable_mlflow = true: not installed: {', '.join(missing)};"
            " pip install mlflow-skinny alembic sqlalchemy, or use metrics.enable_tensorboard = true, which shows the"
            " same"
        )
    if at is None and re.search("[?#%]", str(folder.absolute())):
        raise UserError(
            f"metrics.enable_mlflow = true: job.dump_folder = {str(folder)!r}: the address of MLflow's database can't"
            " hold ?, # or %; name another folder"
        )


class MLflow:
    """A run at MLflow, which continues when training is resumed.

    MLFLOW_TRACKING_URI names the place, a server or a database; without it nothing leaves the machine.
    MLFLOW_EXPERIMENT_NAME names the experiment.

    Args:
        folder: of the database, and of the file with the run's id; its name is the run's.
        settings: every option of the run: the parameters at MLflow, which keeps the first value of each. An option that
            is another when the run is resumed is a tag too.
    """

    def __init__(self, folder: Path, start_step: int, settings: Mapping[str, Any]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        database = folder.absolute() / "mlflow" / "mlflow.db"
        at = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
        with refuse_unwritable(f"metrics.enable_mlflow = true: {folder / KEPT}", folder), _as_os_error():
            if "MLFLOW_TRACKING_URI" not in os.environ:
                database.parent.mkdir(parents=True, exist_ok=True)
                logger.info(f"MLflow: kept in {database}; `mlflow ui --backend-store-uri {at}` shows it")
            self._client = MlflowClient(tracking_uri=at)
            before = self._continue(read_id(folder / KEPT, "MLflow") if start_step else None)
            if before is None:
                run = self._client.create_run(self._experiment(database.parent), run_name=folder.absolute().name)
                self._run_id = run.info.run_id
                keep_id(folder / KEPT, self._run_id)
            texts = {
                key: value if isinstance(value, str) and value else in_toml(value) for key, value in settings.items()
            }
            new = [Param(key, text) for key, text in texts.items() if key not in (before or {})]
            changed = [RunTag(key, text) for key, text in texts.items() if (before or texts).get(key, text) != text]
            for first in range(0, len(new), AT_ONCE):
                self._client.log_batch(self._run_id, params=new[first : first + AT_ONCE])
            for first in range(0, len(changed), AT_ONCE):
                self._client.log_batch(self._run_id, tags=changed[first : first + AT_ONCE])

    def _continue(self, run_id: str | None) -> dict[str, str] | None:
        """Mark a run as running again, and return its parameters; None where MLflow knows none of that id."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            before: dict[str, str] = self._client.get_run(run_id).data.params
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning(f"MLflow has no run {run_id}; a new run begins there")
            return None
        self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        return before

    def _experiment(self, artifacts: Path) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchtitan_graph")
        if found := self._client.get_experiment_by_name(name):
            return str(found.experiment_id)
        place = None if "MLFLOW_TRACKING_URI" in os.environ else (artifacts / "artifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=place))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each tag."""
        now = int(time.time() * 1000)
        points = [self._metric(re.sub(r"[^\w/. -]", "_", tag), float(x), now, step) for tag, x in values.items()]
        with _as_os_error():
            self._client.log_batch(self._run_id, metrics=points)

    def texts(self, step: int, values: Mapping[str, str]) -> None:
        """Write a text file for each tag and step among the run's artifacts."""
        with _as_os_error():
            for tag, text in values.items():
                self._client.log_text(self._run_id, text, f"{tag}/step-{step}.txt")

    def close(self, failed: bool = False) -> None:
        with _as_os_error():
            self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise errors of MLflow, its database and its server as OSError, as other dashboards do."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise OSError(f"MLflow: {error}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] != "sqlalchemy":
            raise
        raise OSError(f"MLflow's database: {error}") from error
