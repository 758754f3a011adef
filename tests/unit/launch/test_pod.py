"""What a pod adds to the launcher's options, and how it ends."""

from pathlib import Path

import pytest

from torchtitan_graph.errors import UserError
from torchtitan_graph.launch import pod
from torchtitan_graph.run.failure import CONFIGURATION
from torchtitan_graph.run.status import FINISHED, RUNNING, STOPPED, Status

ENVIRONMENT = {"JOB_COMPLETION_INDEX": "1", "JOBSET_RESTART_ATTEMPT": "2", "POD_IP": "10.0.0.1"}


def test_the_first_pod_alone_hosts_the_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    words = pod.of_this_pod(tmp_path)
    assert any("is_host=false" in word for word in words) and str(tmp_path / "logs" / "2" / "node-1") in words
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert "is_host=true,read_timeout=1800,join_timeout=1800" in pod.of_this_pod(tmp_path)


@pytest.mark.parametrize("missing", ENVIRONMENT)
def test_elsewhere_than_in_a_pod_it_is_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(UserError, match=f"{missing} is not set: this command runs in a pod"):
        pod.of_this_pod(tmp_path)
    monkeypatch.setattr(pod.stop, "install", lambda: False)
    assert pod.main(["--", "--job.dump_folder", str(tmp_path)]) == CONFIGURATION
    assert f"{missing} is not set" in capsys.readouterr().err


def test_a_stopped_run_is_to_be_started_again_and_no_other(tmp_path: Path) -> None:
    assert pod.exit_code(0, tmp_path) == 0  # no status
    status = Status(tmp_path, total_steps=10)
    for state, code, expected in (
        (FINISHED, 0, 0),
        (RUNNING, 0, 0),
        (STOPPED, 0, 143),
        (STOPPED, 3, 3),
        (STOPPED, 130, 130),
    ):
        status.write(state, "stopped by SIGTERM")
        assert pod.exit_code(code, tmp_path) == expected
