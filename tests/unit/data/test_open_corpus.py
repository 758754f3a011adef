"""What a job validates on: what it names, else what it trains on, of which some documents are held out."""

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.data.open_corpus import validation_corpus

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
