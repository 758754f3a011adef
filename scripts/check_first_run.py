"""Check that a finished run learned from the context: python scripts/check_first_run.py DUMP_FOLDER

Exits 1 unless the last validation loss is below the unigram entropy of the validation split.
"""

import sys
from pathlib import Path
from typing import TypedDict

from torchtitan_graph.config import load
from torchtitan_graph.data import load_tokenizer
from torchtitan_graph.data.entropy import unigram_entropy
from torchtitan_graph.data.open_corpus import validation_corpus
from torchtitan_graph.errors import UserError
from torchtitan_graph.metrics.jsonl import read_records
from torchtitan_graph.small_files import check_type


class Step(TypedDict):
    """The key of every line of metrics.jsonl."""

    step: int


class Record(Step, total=False):
    """A key of some lines."""

    validation_loss: float


def main(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    try:
        records = [
            check_type(record, Record, f"{metrics}, line {number}")
            for number, record in enumerate(read_records(metrics), 1)
        ]
    except OSError as error:
        raise UserError(f"{metrics}: can't be read ({error.strerror}); name the folder of a run") from error
    validated = [(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record]
    if not validated:
        print(f"{metrics} has no validation loss", file=sys.stderr)
        return 1
    step, loss = validated[-1]
    config = load(["--job.config_file", str(folder / "config.toml")])
    corpus = validation_corpus(config)
    if corpus.pop("sources"):
        print(f"{folder} is validated on a mixture, which has no entropy of its own", file=sys.stderr)
        return 1
    entropy = unigram_entropy(
        **corpus, tokenizer=load_tokenizer(config.model.hf_assets_path), seq_len=config.validation.seq_len
    )
    learned = loss < entropy  # also false for nan
    relation = "below" if learned else "NOT below"
    print(f"validation loss {loss:.4f} at step {step}: {relation} the split's unigram entropy, {entropy:.4f} nats")
    return 0 if learned else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/check_first_run.py DUMP_FOLDER")
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
