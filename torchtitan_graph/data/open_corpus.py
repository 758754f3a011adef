"""Find a corpus by the names that a job gives."""

from pathlib import Path

from torchtitan_graph.data.corpus import Corpus, ShuffledCorpus
from torchtitan_graph.data.sources import open_path, open_stdlib
from torchtitan_graph.log import logger


def open_corpus(dataset: str, dataset_path: str | None, split: str, seed: int, text_column: str = "text") -> Corpus:
    """Open a split of the corpus at `dataset_path`, or else of the one that `dataset` names.

    Raises ValueError if there is no such corpus, it can't be read, or the split has no documents.
    """
    if dataset_path:
        path = Path(dataset_path).expanduser()
        if not path.exists():
            raise ValueError(f"training.dataset_path = {dataset_path!r}: no such file or folder.")
        return ShuffledCorpus(open_path(path, text_column), split, seed)
    if dataset == "c4_test":
        logger.info("dataset c4_test: the embedded corpus (the standard library's sources, `stdlib`) stands for it.")
        dataset = "stdlib"
    if dataset == "stdlib":
        return ShuffledCorpus(open_stdlib(), split, seed)
    raise ValueError(dataset)
