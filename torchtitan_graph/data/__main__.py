"""Show what a model will see of a job's training data: rows, with what is learned in colour, and counts.

python -m torchtitan_graph.data my.toml --rows 3            # in the terminal
python -m torchtitan_graph.data my.toml --html rows.html    # as a page
python -m torchtitan_graph.data my.toml --bench --ranks 8   # how fast a node of eight ranks can read them

Further options are those of training, such as --training.seq_len 512.
"""

import html
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from torchtitan_graph.command import check_result, command, make_parser, run_command, write_result
from torchtitan_graph.config import check_data, job
from torchtitan_graph.config.load import load, read_beside
from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.data.bench import bench
from torchtitan_graph.data.counts import in_words
from torchtitan_graph.data.lengths import epochs_in_words
from torchtitan_graph.data.loader import DataLoader, training_loader
from torchtitan_graph.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

_LEARNED, _GIVEN, _PLAIN = "\033[32m", "\033[2m", "\033[0m"
_STYLE = (
    "body{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}"
    "pre{white-space:pre-wrap;word-break:break-word;border-left:3px solid #8884;padding:.5em 1em;color:#777}"
    "mark{background:#3a33;color:#070}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}mark{color:#8f8}}"
)


class Document(NamedTuple):
    """A document, or a part of it, in a row: its token ids, and whether each is learned."""

    ids: list[int]
    is_target: list[bool]


def documents_of(tokens_L: torch.Tensor, labels_L: torch.Tensor, documents_L: torch.Tensor) -> list[Document]:
    """Return the documents in a row, without its padding."""
    found = []
    for number in range(int(documents_L.max()) + 1):
        places = (documents_L == number).nonzero().flatten()
        learned = [False, *(labels_L[places[:-1]] != IGNORE_INDEX).tolist()]
        found.append(Document(tokens_L[places].tolist(), learned))
    return found


def runs_of(document: Document, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a document's tokens, as long as all of one are learned, or none."""
    begin = 0
    for place in range(1, len(document.ids) + 1):
        if place == len(document.ids) or document.is_target[place] != document.is_target[begin]:
            yield tokenizer.decode_all(document.ids[begin:place]), document.is_target[begin]
            begin = place


def read_rows(data: DataLoader, most: int) -> tuple[list[list[Document]], int]:
    """Return the documents of the rows, up to `most`, and the tokens that the rows have room for."""
    rows: list[list[Document]] = []
    room = 0
    while len(rows) < most and not data.has_ended:
        batch = next(data)
        rows.append(documents_of(batch.tokens_BL[0], batch.labels_BL[0], batch.documents_BL[0]))
        room += batch.tokens_BL.shape[1]
    return rows, room


def summary(rows: list[list[Document]], room: int, data: DataLoader, training: job.Training) -> list[str]:
    """Return the counts of rows, a line each."""
    is_all, rows_per_step = len(rows) == data.num_rows, training.global_batch_size
    on_one_rank = ""
    if rows_per_step == -1:
        rows_per_step, on_one_rank = training.local_batch_size, " (on one rank: set training.global_batch_size)"
    first, left_out = f"rows: {len(rows):,}; there are more, see --most", in_words(data.counts)
    if is_all:
        first, *left_out = epochs_in_words(
            data.lengths, training.epochs or 1, training.seq_len, rows_per_step, not training.dynamic_seq_len
        )
        first += on_one_rank
    if not rows:  # as asked
        return [first, *left_out]
    lengths = [len(document.ids) for row in rows for document in row]
    targets = sum(sum(document.is_target) for row in rows for document in row)
    tokens = sum(lengths)
    tenths = ", ".join(f"{q} % {np.percentile(lengths, q):,.0f}" for q in (10, 50, 90, 99, 100))
    lines = [
        first,
        f"documents in them: {len(lengths):,}; tokens: {tokens:,}; learned: {targets:,} ({targets / tokens:.1%})",
        f"tokens of a document, by percentile: {tenths}",
        f"rows are full to {tokens / room:.1%}",
    ]
    return [*lines, *left_out]


def page(rows: list[list[Document]], lines: list[str], tokenizer: Tokenizer) -> str:
    """Return rows and their counts as one page, without anything from elsewhere."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Training data</title><style>{_STYLE}</style><h1>Rows</h1>"]
    parts += [f"<p>What is learned is <mark>marked</mark>.<ul>{''.join(f'<li>{html.escape(x)}' for x in lines)}</ul>"]
    for number, row in enumerate(rows, 1):
        parts.append(f"<h2>Row {number}</h2>")
        for document in row:
            runs = (
                f"<mark>{html.escape(text)}</mark>" if learned else html.escape(text)
                for text, learned in runs_of(document, tokenizer)
            )
            parts.append(f"<pre>{''.join(runs)}</pre>")
    return "\n".join(parts)


def show(rows: list[list[Document]], tokenizer: Tokenizer, in_colour: bool) -> Iterator[str]:
    """Yield rows as text, what is learned in colour, or without colour between brackets."""
    begin, given, end = (_LEARNED, _GIVEN, _PLAIN) if in_colour else ("[[", "", "]]")
    for number, row in enumerate(rows, 1):
        for place, document in enumerate(row, 1):
            tokens, learned = len(document.ids), sum(document.is_target)
            yield f"--- row {number}, document {place}: {tokens:,} tokens, {learned:,} learned"
            runs = runs_of(document, tokenizer)
            yield "".join(
                f"{begin}{text}{end}" if learned else f"{given}{text}{_PLAIN * in_colour}" for text, learned in runs
            )


@command
def main(argv: Sequence[str]) -> int:
    usage = "%(prog)s [CONFIG] [--rows N] [--most N] [--html FILE] [--bench [SECONDS]] [--table.key value ...]"
    parser = make_parser(__doc__, prog="python -m torchtitan_graph.data", usage=usage)
    parser.add_argument("--rows", type=int, default=3, help="rows to show")
    parser.add_argument("--most", type=int, default=4096, help="rows to count, at most")
    parser.add_argument("--html", type=Path, help="page to write, in place of the terminal")
    parser.add_argument(
        "--bench", type=float, nargs="?", const=10.0, metavar="SECONDS", help="show how fast rows are read; 10 s"
    )
    parser.add_argument("--ranks", type=int, default=1, help="with --bench: the ranks of a node, each a process")
    words = list(argv)
    file = ["--job.config_file", words.pop(0)] if words and not words[0].startswith("-") else []
    options, others = read_beside(parser, words)
    if options.html is not None:
        check_result("--html", options.html)
    config = load([*file, *others])
    check_data(config)
    if options.bench is not None:
        if options.bench <= 0 or options.ranks < 1:
            raise UserError("--bench needs seconds above 0, and --ranks at least 1")
        print("\n".join(bench(config, options.ranks, options.bench)))
        return 0
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    most = max(options.most, options.rows)
    epochs = 0 if config.training.sources else config.training.epochs or 1  # sources repeat without end
    data = training_loader(
        config, tokenizer, local_batch_size=1, dp_rank=0, dp_degree=1, epochs=epochs,
        most_rows=most + 1,  # one more, to know whether there are more
    )  # fmt: skip
    data.refuse_empty()
    rows, room = read_rows(data, most)
    lines = summary(rows, room, data, config.training)
    if options.html:
        write_result("--html", options.html, page(rows[: options.rows], lines, tokenizer))
        logger.info(f"wrote {options.html}")
    else:
        in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print("\n".join([*show(rows[: options.rows], tokenizer, in_colour), *lines]))
    return 0


if __name__ == "__main__":
    run_command(main)
