"""What is written to a run's folder, and when."""

from pathlib import Path

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.errors import UserError
from torchtitan_graph.run.folder import RunFolder, check_place
from torchtitan_graph.run.status import FAILED


def test_the_configuration_is_saved_once_the_run_is_set_up(tmp_path: Path) -> None:
    """A start that fails in between leaves that of the run before it."""
    saved = tmp_path / "config.toml"
    saved.write_text("[training]\nsteps = 7\n")
    config = load(["--job.dump_folder", str(tmp_path), "--training.steps", "9"])
    run = RunFolder(config)
    assert "steps = 7" in saved.read_text()
    run.save_config(config)
    assert "steps = 9" in saved.read_text()
    run.close(FAILED)


def test_a_dump_folder_that_can_be_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (
        ("file", "file is a file; name a folder"),
        ("file/run", "file is a file"),
        ("x" * 300, "too long"),
    ):
        with pytest.raises(UserError, match=rf"job.dump_folder = '.*{words}"):
            check_place(str(tmp_path / name))
    assert check_place(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
