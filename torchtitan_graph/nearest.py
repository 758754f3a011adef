"""The known name that a mistyped one means. No hint is better than a false one: only slips of typing are found here,
and what other trainers call an option is a table in support.py."""

import re
from collections.abc import Iterable

# Keys that say nothing without their table: a key of another table is not meant.
GENERIC = frozenset(
    ["enable", "enabled", "freq", "interval", "load", "mode", "name", "options", "save", "step", "steps", "type"]
)


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message about an unknown name: the nearest known one, or `otherwise` if none is near."""
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else otherwise


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that is `name` but for slips of typing, or None; of several equally near, one as long as
    `name`, or the first.

    Slips are letters left out, added, changed or swapped, two in eight letters; other separators or letters' case; and,
    of a key `table.name`, a table that is missing or another one.
    """
    names = list(names)
    if same_letters := [other for other in names if _letters(other) == _letters(name)]:
        return same_letters[0]
    if name in GENERIC:
        return None
    table, _, key = name.rpartition(".")
    found = []
    for place, other in enumerate(names):
        other_table, _, other_key = other.rpartition(".")
        of_key, of_table = _slips(key, other_key), _slips(table, other_table)
        if of_key is not None and (of_table is not None or other_key not in GENERIC):
            longer = abs(len(other) - len(name))  # `stepz` is `steps` rather than `step`
            found.append((of_table is None, of_key + (of_table or 0), longer, place, other))
    return min(found)[-1] if found else None


def _letters(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower())


def _slips(word: str, other: str) -> int | None:
    """Return the number of slips between two names, or None if one is no misspelling of the other.

    Each part of a name is compared with its counterpart, so that `val_freq` is not `log_freq`.
    """
    if word == other:
        return 0
    if abs(len(word) - len(other)) > 2 * (1 + other.count("_")):  # before anything is compared at length
        return None
    parts, other_parts = re.split("[-_.]", word.lower()), re.split("[-_.]", other.lower())
    if len(parts) == len(other_parts):
        counts = [_edits(*pair) for pair in zip(parts, other_parts, strict=True)]
        if all(
            count <= _allowed(*pair) for count, pair in zip(counts, zip(parts, other_parts, strict=True), strict=True)
        ):
            return sum(counts)
    word, other = _letters(word), _letters(other)  # slips in short parts, or of separators
    edits = _edits(word, other)
    return edits if edits <= _allowed(word, other) else None


def _allowed(part: str, other: str) -> int:
    """Return how many edits may be slips: none in three letters, of the first one, or that leave out a digit."""
    if part[:1] != other[:1] or len(re.findall(r"\d", part)) != len(re.findall(r"\d", other)):
        return 0
    return min(max(len(part), len(other)), 8) // 4


def _edits(word: str, other: str) -> int:
    """Return the number of letters left out, added or changed, and of neighbours swapped: the optimal string alignment
    distance. Words whose lengths differ by more than 2 are not compared: the result is that difference."""
    if abs(len(word) - len(other)) > 2:
        return abs(len(word) - len(other))
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, start=1):
        before, last, row = row, before, [i]
        for j, its in enumerate(other, start=1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != its))
            if i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == its:
                edits = min(edits, last[j - 2] + 1)
            row.append(edits)
    return row[-1]
