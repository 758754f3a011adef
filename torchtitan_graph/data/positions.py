"""Positions in the data as checkpoints hold them: of all ranks as one, and how two differ."""

import functools
import math
import os
import re
from typing import Any

from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.lengths import Length

_SHOWN = 80  # characters of what differs, in a message


def differing(saved: str, here: str) -> tuple[str, str]:
    """Return the part of two texts where they begin to differ, for a message, with hashes abbreviated.

    A corpus is the hash of its documents, then how rows are read, which may hold a whole chat template.
    """
    saved, here = (re.sub("[0-9a-f]{64}", lambda digits: digits[0][:8], text) for text in (saved, here))
    same = len(os.path.commonprefix([saved, here]))
    begin = max(0, same - _SHOWN // 3) if same > _SHOWN // 2 else 0
    return _cut(saved, begin), _cut(here, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + _SHOWN
    head = text[: _SHOWN // 4] + "..." if begin else ""
    return head + text[begin:end] + "..." * (end < len(text))


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the parts of all data-parallel ranks into one position, equal for any number of ranks."""
    first = states[0]
    own = ("lanes", "counts")
    same = all({**state, **{key: first[key] for key in own}} == first for state in states)
    assert same, "ranks at different steps, or runs"
    lanes = [max(cursors) for cursors in zip(*(state["lanes"] for state in states), strict=True)]
    counted = functools.reduce(
        Counts.__add__, [Counts(*state["counts"]) for state in states], Counts(*first["counted"])
    )
    merged = {**first, "lanes": lanes, "counted": list(counted)}
    del merged["counts"]
    return merged


def rows_of_epochs(position: dict[str, Any] | None) -> float:
    """Return the number of rows of all epochs by a saved position, math.inf if it doesn't hold it."""
    lengths = [Length.from_list(each) for each in (position or {}).get("lengths", ())]
    is_known = lengths and all(each.has_ended for each in lengths)
    return sum(each.rows for each in lengths) if is_known else math.inf
