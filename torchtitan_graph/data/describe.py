"""A corpus in words: one line of the log, so that what is read can be seen to be what was meant."""

import hashlib
import os
from typing import Any

from torchtitan_graph.data.corpus import Corpus, ShuffledCorpus
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.row_forms import Conversation, Form, Turn
from torchtitan_graph.data.shards import Shards
from torchtitan_graph.data.sources import Chain
from torchtitan_graph.data.texts import TextFiles, TextPieces
from torchtitan_graph.log import logger

EMBEDDED = "stdlib, the embedded corpus: this Python's own sources"
_SPLITS = {"train": "those for training", "validation": "those held out for validation"}


def log_corpus(what: str, corpus: Corpus, dataset: str, path: str | None, split: str, reading: RowFormat) -> None:
    """Log on rank 0 what a corpus is: place, files, documents, format, columns, chat template, split."""
    if os.environ.get("RANK", "0") == "0":
        logger.info(f"{what}: {describe(corpus, dataset, path, split, reading)}")


def describe(corpus: Corpus, dataset: str, path: str | None, split: str, reading: RowFormat) -> str:
    """Return a line on a corpus that `open_corpus` has opened with these arguments."""
    is_embedded = not path and dataset in ("stdlib", "c4_test")
    parts = _parts(corpus.source) if isinstance(corpus, ShuffledCorpus) else [corpus]
    words = [path or (EMBEDDED if is_embedded else dataset)]
    if isinstance(corpus, ShuffledCorpus):
        if path or is_embedded:
            files = sum(len(part) if isinstance(part, TextFiles) else 1 for part in parts)
            words.append("token shards" if isinstance(parts[0], Shards) else _count(files, "file"))
        words.append(_documents(corpus))
    else:
        words.append(f"streamed, {_SPLITS.get(split, 'all of it')}")
    forms = [form for form in map(_form, parts) if form]
    words += ["plain text"] * any(isinstance(part, TextFiles | TextPieces) for part in parts)
    words += dict.fromkeys(map(_form_in_words, forms))
    if any(isinstance(form, Conversation | Turn) for form in forms):
        digest = hashlib.sha256(reading.template.digest.encode()).hexdigest()[:8]
        words.append(f"template {reading.chat_template or 'of the tokenizer'} ({digest})")
    return "; ".join(words)


def _documents(corpus: ShuffledCorpus) -> str:
    """Return how many documents a split has, of how many."""
    number, total = corpus.num_documents(), _count(len(corpus.source), "document")
    if number == len(corpus.source):
        return f"{total}, all of them"
    about = "" if corpus.is_exact else "about "
    rest = "the others are held out for validation" if corpus.split == "train" else "those held out for validation"
    return f"{about}{number:,} of {total}, {rest}"


def _parts(source: Any) -> list[Any]:
    return [part for each in source.sources for part in _parts(each)] if isinstance(source, Chain) else [source]


def _form(part: Any) -> Any:
    """Return how a source's rows are read; None for one without rows."""
    return getattr(part, "form", None)


def _form_in_words(form: Form) -> str:
    maybe = f", and {' and '.join(form.optional)} where a row has them" if form.optional else ""
    kind = "conversation" if isinstance(form, Turn) else type(form).__name__.lower()
    return f"{kind} of the columns {', '.join(form.columns)}{maybe}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
