"""What became of the documents that did not become rows as they are: counted by kind, and in words."""

from typing import NamedTuple

from torchtitan_graph.data.bad_rows import KINDS

_NO_TARGET = (
    "nothing in them is learned (they have no turn of the assistant, or each has weight 0, is masked or is unclear)"
)


class Counts(NamedTuple):
    """Documents that did not become rows as they are: cut at a row's length, dropped for it, or without a target;
    conversations in several contexts, and how many these are; bad rows that are left out, of each of the KINDS; and
    documents whose targets are all beyond a row's length. New ones come last: positions are saved as lists of them."""

    cut: int = 0
    dropped: int = 0
    without_target: int = 0
    split: int = 0
    contexts: int = 0
    not_utf8: int = 0
    not_json: int = 0
    wrong_fields: int = 0
    no_value: int = 0
    wrong_message: int = 0
    not_text: int = 0
    no_answer: int = 0
    no_preference: int = 0
    refused: int = 0
    beyond: int = 0

    def __add__(self, other: tuple[int, ...]) -> "Counts":  # type: ignore[override]
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def in_words(counts: Counts) -> list[str]:
    """Return what became of such documents, a line for each kind that there is."""
    whats = {
        "cut at training.seq_len": counts.cut,
        "dropped, as longer than it": counts.dropped,
        "left out, as what is learned begins after training.seq_len tokens": counts.beyond,
        f"left out, as {_NO_TARGET}": counts.without_target,
    }
    lines = [f"conversations {what}: {number:,}" for what, number in whats.items() if number]
    if counts.split:
        lines.append(
            f"conversations split: {counts.split:,}, into {counts.contexts:,} contexts, by training.split_turns"
        )
    bad = {what: getattr(counts, kind) for kind, what in KINDS.items()}
    return lines + [f"bad rows left out, {what}: {number:,}" for what, number in bad.items() if number]
