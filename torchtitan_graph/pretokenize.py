"""Tokenise a corpus once, into shards that runs map into memory:

python -m torchtitan_graph.pretokenize --dataset_path web.jsonl --hf_assets_path DIR --out web_tokens
"""

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.config.load import add_option
from torchtitan_graph.data.bad_rows import Skipped
from torchtitan_graph.data.corpus import ShuffledCorpus, document_key
from torchtitan_graph.data.document import Contexts, Document, Tokens
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.remote_file import in_order
from torchtitan_graph.data.shards import write_shards
from torchtitan_graph.data.sources import Source
from torchtitan_graph.data.special_tokens import warn_of_special_tokens
from torchtitan_graph.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.transient import in_words, is_transient

Encoded = tuple[int, np.ndarray | Tokens | Contexts]  # a document's key and its token ids
_SECONDS_BETWEEN_LINES = 10
_TOGETHER = 64  # documents that a worker process is given at a time
# The options of [training] by which rows are read as documents.
READ_BY = (
    "format", "columns", "loss_on", "split_turns", "unclear_turns", "chat_template", "chat_template_kwargs",
    "chat_date", "on_bad_row",
)  # fmt: skip


class Encode:
    """A function from a document's number in a source to its key and ids; it can be pickled."""

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer

    def __call__(self, index: int) -> Encoded:
        return document_key(self.source.identity(index)), _ids(self.source[index], self.tokenizer, self.source.is_whole)


def _identity(document: Document) -> str:
    """Return what decides the split of a stream's document: all of them are in one anyway."""
    return document if isinstance(document, str) else str(document)


def _ids(document: Document, tokenizer: Tokenizer, is_whole: bool) -> np.ndarray | Tokens | Contexts:
    if isinstance(document, str):
        return np.array(tokenizer.encode(document), np.uint32)
    if isinstance(document, (Tokens, Contexts)):
        return document
    if isinstance(document, Skipped):
        return Tokens(np.empty(0, np.int64), np.empty(0, bool)) if is_whole else np.empty(0, np.uint32)
    raise UserError("the corpus is token ids already; name the one that they were made from")


_encode: Encode  # of a worker process


def _set_encode(encode: Encode) -> None:
    global _encode
    _encode = encode


def _encode_there(numbers: range) -> list[Encoded]:
    return [*map(_encode, numbers)]


def encode_all(encode: Encode, numbers: range, num_workers: int) -> Iterator[Encoded]:
    """Yield the documents in their order, tokenised here or by worker processes; raise UserError if one of them
    dies."""
    if num_workers == 0:
        yield from map(encode, numbers)
        return
    parts = [numbers[first : first + _TOGETHER] for first in range(0, len(numbers), _TOGETHER)]
    # Not forked: the tokenizer has threads.
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(num_workers, spawn, _set_encode, (encode,)) as pool:
            for encoded in in_order((pool.submit(_encode_there, part) for part in parts), 4 * num_workers):
                yield from encoded
    except BrokenProcessPool as error:
        raise UserError(
            f"--num_workers {num_workers}: one of these processes died; where it says nothing above, this machine may"
            " have been out of memory: set fewer. The same command goes on behind the shards that are whole"
        ) from error


def pretokenize(options: argparse.Namespace) -> None:
    """Write the shards, and log the progress.

    Raises UserError for an invalid corpus, tokenizer or folder.
    """
    tokenizer = load_tokenizer(options.hf_assets_path, options.special_tokens)
    cache = NodeCache(options.cache_folder, 1e9 * options.cache_gb)
    reading = RowFormat(tokenizer, cache=cache, **{name: getattr(options, name) for name in READ_BY})
    corpus = open_corpus(options.dataset, options.dataset_path, options.split, 0, reading)
    if not options.special_tokens:
        warn_of_special_tokens(corpus, tokenizer, options.dataset_path or options.dataset)
    limit = options.num_documents
    documents: Callable[[int], Iterable[Encoded]]
    if isinstance(corpus, ShuffledCorpus):
        source, total = corpus.source, min(len(corpus.source), limit or len(corpus.source))
        encode = Encode(source, tokenizer)
        documents = lambda start: encode_all(encode, range(start, total), options.num_workers)  # noqa: E731
        digest = source.digest if total == len(source) else f"{source.digest}, the first {total}"
        # All its documents are written, and each is for training or validation by its key; but a dataset with splits of
        # its own was opened as one of them.
        splits = ["train", "validation"] if corpus.split != "all" else [options.split]
    else:  # a stream, which has only the split's documents
        stream, total, splits = corpus, limit, [options.split]
        found = (document for lane in range(stream.num_lanes) for _, document in stream.documents(lane, 0, 0))
        whole = stream.is_whole(0)
        encoded = ((document_key(_identity(document)), _ids(document, tokenizer, whole)) for document in found)
        documents = lambda start: itertools.islice(encoded, start, limit)  # noqa: E731
        digest = corpus.digest + (f", the first {limit}" if limit else "")
    if options.special_tokens:
        digest += ", special tokens read from text"  # other rows than the text's
    began = said = time.monotonic()
    before = num_documents = num_tokens = 0
    writing = write_shards(
        options.out,
        documents,
        source_digest=digest,
        splits=splits,
        tokenizer=tokenizer,
        is_whole=corpus.is_whole(0),
        tokens_per_shard=options.tokens_per_shard,
    )
    for number, (num_documents, num_tokens) in enumerate(writing):
        if number == 0:
            before = num_tokens
            if num_documents:
                logger.info("going on behind the %d documents of whole shards", num_documents)
        elif time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            speed = (num_tokens - before) / (said - began)
            of = f" of {total:,}" if total else ""
            logger.info(f"{num_documents:,}{of} documents, {num_tokens:,} tokens, {speed:,.0f} tokens/s")
    logger.info(f"{options.out}: {num_documents:,} documents, {num_tokens:,} tokens")


@command
def main(argv: Sequence[str]) -> int:
    """Write the shards. Return the exit code: 0 done, 2 something to change."""
    parser = make_parser(__doc__)
    parser.add_argument("--dataset", default="stdlib", help="corpus, as training.dataset")
    parser.add_argument("--dataset_path", help="as training.dataset_path")
    parser.add_argument("--split", default="train", choices=("train", "validation"), help="where it has its own splits")
    for name in (*READ_BY, "cache_folder", "cache_gb"):
        add_option(parser, f"training.{name}")
    parser.add_argument("--hf_assets_path", help="tokenizer, as model.hf_assets_path; not set: bytes are the tokens")
    parser.add_argument(
        "--special_tokens", action="store_true", help="read special tokens where text spells them out; else it is text"
    )
    parser.add_argument("--num_documents", type=int, metavar="N", help="stop after N documents")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that tokenise; streams use none")
    parser.add_argument("--tokens_per_shard", type=int, default=2**26, metavar="N", help="end a shard after N tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; OUT.part while it is in the making")
    options = parser.parse_args(argv)
    for name, least in (("tokens_per_shard", 1), ("num_documents", 1), ("num_workers", 0)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.format == "preference":
        parser.error(
            "--format preference: shards of token ids hold no pairs of answers; runs read such rows as they are"
        )
    if options.special_tokens and not options.hf_assets_path:
        parser.error("--special_tokens: bytes have none in text; name a tokenizer by --hf_assets_path")
    try:
        pretokenize(options)
    except OSError as error:
        if is_transient(error):
            raise
        raise UserError(in_words(error)) from error
    return 0


if __name__ == "__main__":
    run_command(main)
