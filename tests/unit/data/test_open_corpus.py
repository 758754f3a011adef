"""What a job validates on: what it names, else what it trains on, of which some documents are held out."""

from pathlib import Path

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.data.open_corpus import open_corpus, validation_corpus

MIXTURE = ["--training.sources", "[{dataset_path='a'}, {dataset='stdlib'}]"]


@pytest.mark.parametrize(
    ("options", "dataset", "path", "split"),
    [
        ([], "stdlib", None, "validation"),
        (["--training.dataset_path", "a"], "stdlib", "a", "validation"),
        (["--training.dataset", "c4"], "c4", None, "validation"),
        (["--validation.dataset", "c4_validation"], "c4_validation", None, "validation"),
        (["--training.dataset_path", "a", "--validation.dataset_path", "b"], "", "b", "all"),
        (["--training.dataset_path", "a", "--validation.dataset_path", "./x/../a/"], "", "./x/../a/", "validation"),
        ([*MIXTURE, "--validation.dataset_path", "a"], "", "a", "validation"),
    ],
)
def test_one_corpus(options: list[str], dataset: str, path: str | None, split: str) -> None:
    found = validation_corpus(load(options))
    assert found == {"dataset": dataset, "dataset_path": path, "sources": found["sources"], "split": split}
    assert not found["sources"]


def test_a_mixture() -> None:
    config = load(MIXTURE)
    found = validation_corpus(config)
    assert (found["sources"], found["split"]) == (config.training.sources, "validation")


def test_paths_in_a_file_are_relative_to_the_folder_that_the_command_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("config", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.jsonl").write_text(f'{{"text": "{folder}"}}')
    (tmp_path / "config" / "mine.toml").write_text('[training]\ndataset_path = "text.jsonl"')
    monkeypatch.chdir(tmp_path / "here")
    path = load(["--job.config_file", str(tmp_path / "config" / "mine.toml")]).training.dataset_path
    assert list(open_corpus("", path, "all", 0).documents(0, 0, 0)) == [(0, "here")]


def test_links_to_folders_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    for name in ("corpus/a", "elsewhere/inner"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "a" / "up").symlink_to("..")
    corpus = open_corpus("", str(tmp_path / "corpus"), "all", 0)
    assert [corpus.source[i] for i in range(len(corpus.source))] == ["corpus/a", "elsewhere/inner"]
