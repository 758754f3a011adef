"""What torch's flight recorder is told before the process group exists, and where the stacks of a hang go."""

import os
import threading
from pathlib import Path

import pytest

from disks import set_read_only, small_disk
from torchtitan_graph.config import job
from torchtitan_graph.errors import FolderLost
from torchtitan_graph.run.hang import STDERR, HangWatch, set_up_flight_recorder

NEW = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
OLD = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NEW, *OLD, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is taken back at the end
        monkeypatch.delenv(name)


def test_the_recorder_is_told_by_the_names_that_are_not_deprecated(tmp_path: Path) -> None:
    set_up_flight_recorder(tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "20000"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(tmp_path))
    assert not [name for name in OLD if name in os.environ]


@pytest.mark.parametrize("name", [NEW[0], OLD[0]])
def test_what_somebody_has_set_stays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "5")
    set_up_flight_recorder(tmp_path)
    assert [os.environ[n] for n in (NEW[0], OLD[0]) if n in os.environ] == ["5"]


def test_ranks_with_no_step_left_do_not_take_the_folder_from_each_other(tmp_path: Path) -> None:
    failed = []

    def rank(number: int) -> None:
        for _ in range(100):
            with HangWatch(job.Comm(), tmp_path, number) as watch:
                failed.extend([number] * (watch._file == STDERR))

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert not failed
    assert not list((tmp_path / "comm_traces").iterdir())
    (tmp_path / "comm_traces").rmdir()
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_lost_its_folder_leaves_the_file_there(tmp_path: Path) -> None:
    """It may be another run's by now, and its storage may not answer."""
    with pytest.raises(FolderLost), HangWatch(job.Comm(), tmp_path, 0):
        raise FolderLost("lost")
    assert [path.name for path in (tmp_path / "comm_traces").iterdir()] == ["rank_0_stacks.txt"]


def test_the_stacks_go_to_stderr_where_no_file_can_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "comm_traces").mkdir()
    os.mkfifo(tmp_path / "comm_traces" / "rank_0_stacks.txt")
    with HangWatch(job.Comm(), tmp_path, 0) as hang, hang.watch(first=True):
        assert "go to stderr" in caplog.text
    with small_disk(tmp_path / "disk", "64k") as disk:
        set_read_only(disk)
        set_up_flight_recorder(disk)
        with HangWatch(job.Comm(), disk, 0):
            assert "Read-only file system" in caplog.text
