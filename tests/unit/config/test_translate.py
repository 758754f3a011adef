"""The translator reports on old files, and the file it writes means the same without a notice."""

from pathlib import Path

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.config.job import OPTIONS, get
from torchtitan_graph.config.support import RENAMED
from torchtitan_graph.translate import main

OLD_FILES = Path(__file__).parent / "old_files"
RUNNING = sorted(path.name for path in OLD_FILES.glob("*.toml") if path.name != "refused.toml")


def test_it_lists_what_is_kept_changed_ignored_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(OLD_FILES / "early_release.toml")]) == 0
    text = capsys.readouterr().out
    assert "\n  training.seq_len = 512\n" in text.split("changed:")[0]
    assert "\n  training.batch_size = 4: is now called training.local_batch_size\n" in text
    assert "\n  parallelism.enable_compiled_autograd = False: backward" in text.split("ignored, ")[1]
    assert text.endswith("0 refused\n")


def test_refused_settings_exit_with_1_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(OLD_FILES / "refused.toml"), "--out", str(tmp_path / "new.toml")]) == 1
    captured = capsys.readouterr()
    assert "7 refused:" in captured.out and "model.converters = ['float8']" in captured.out
    assert "is not written" in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RUNNING)
def test_the_translated_file_trains_the_same_without_notices(name: str, tmp_path: Path) -> None:
    new = tmp_path / "new.toml"
    assert main([str(OLD_FILES / name), "--out", str(new)]) == 0
    old_config, new_config = (load(["--job.config_file", str(path)]) for path in (OLD_FILES / name, new))
    assert new_config.notices == []
    ignored = {notice.split(": ")[1].split(" = ")[0] for notice in old_config.notices if ": ignored: " in notice}
    ignored = {RENAMED.get(key, key) for key in ignored}
    for key in OPTIONS.keys() - ignored - {"job.config_file"}:
        assert get(new_config, key) == get(old_config, key), key


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing.toml")]) == 1
    assert "can't be read" in capsys.readouterr().out
