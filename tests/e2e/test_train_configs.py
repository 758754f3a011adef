"""Every file of train_configs is right, at the number of ranks it was written for."""

from pathlib import Path

import pytest
from runs import REPOSITORY, Command

from torchtitan_graph.config import check, dump_toml, load
from torchtitan_graph.config.job import OPTIONS, get
from torchtitan_graph.models.spec import build_model

FILES = sorted((REPOSITORY / "train_configs").glob("*.toml"))
RANKS = {
    "llama3_debug": 2,
    "llama3_1b": 8,
    "llama3_3b": 8,
    "llama3_8b": 8,
    "llama3_70b": 128,
    "llama3_405b": 512,
}
TOKENIZER = str(REPOSITORY / "tests" / "assets" / "tokenizer")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_is_accepted_without_a_notice(file: Path) -> None:
    config = load(["--job.config_file", str(file)])
    assert check(config, RANKS[file.stem]) == []
    build_model(config.model.name, config.model.flavor, config.model.attn, 2048)
    assert dump_toml(config).count(str(file)) >= 10


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "llama3_debug"], ids=lambda file: file.stem)
def test_file_says_only_what_differs_from_the_defaults(file: Path) -> None:
    config = load(["--job.config_file", str(file)])
    assert [
        key for key in config.sources if file.name in config.sources[key] and get(config, key) == OPTIONS[key].default
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_1b", "llama3_8b"])
def test_dry_run(name: str, tmp_path: Path) -> None:
    code, output = Command(
        str(REPOSITORY / "run_train.sh"),
        *["--model.hf_assets_path", TOKENIZER],
        cwd=tmp_path,
        COMM_MODE="fake_backend",
        NGPU=str(RANKS[name]),
        CONFIG_FILE=f"{name}.toml",
    ).finish()
    assert code == 0, output
    assert f"dry run of {RANKS[name]} ranks done" in output
