"""What torch's flight recorder is told before the process group exists."""

import os
from pathlib import Path

import pytest

from torchtitan_graph.config import job
from torchtitan_graph.run.hang import set_up_flight_recorder

NEW = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
OLD = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NEW, *OLD, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is taken back at the end
        monkeypatch.delenv(name)


def test_the_recorder_is_told_by_the_names_that_are_not_deprecated(tmp_path: Path) -> None:
    set_up_flight_recorder(job.Comm(trace_buf_size=77), tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "77"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(tmp_path))
    assert not [name for name in OLD if name in os.environ]


@pytest.mark.parametrize("name", [NEW[0], OLD[0]])
def test_what_somebody_has_set_stays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "5")
    set_up_flight_recorder(job.Comm(trace_buf_size=77), tmp_path)
    assert [os.environ[n] for n in (NEW[0], OLD[0]) if n in os.environ] == ["5"]
