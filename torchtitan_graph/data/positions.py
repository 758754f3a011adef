"""Positions in the data as checkpoints hold them: of all ranks as one, or refused as those of other data."""

import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.lengths import Length
from torchtitan_graph.errors import UserError

_WHOLE_BEFORE = ", longer conversations: "  # in the row length of positions by earlier releases
_OR_AGAIN = (
    "or begin a new run, or resume the model at the beginning of the data: checkpoint.load_step with"
    " checkpoint.exclude_from_loading = ['dataloader']."
)
# What a corpus's digest says of a chat template, as `Renderer.digest` writes it.
_OF_TEMPLATE = re.compile(r"(\[\('.*\)\]) (None|\d{4}-\d\d-\d\d) (\[.*\]) (\[[\d, ]*\])", re.DOTALL)
_TEMPLATE_PARTS = (
    "the chat template",
    "training.chat_date",
    "training.chat_template_kwargs",
    "the tokens that end a turn",
)
_SHOWN = 80  # characters of what differs, in a message


def refuse_other(state: dict[str, Any], identity: Mapping[str, Any], has_conversations: bool) -> None:
    """Raise UserError if a position is of other data than a run's, or by a release that ordered rows otherwise.

    identity: what makes the rows of this run, by the keys of positions.
    """
    if _WHOLE_BEFORE in str(state.get("seq_len")) or has_conversations and "counted" not in state:
        raise UserError(
            "checkpoint: its data position was saved by an earlier release, which put conversations into rows in"
            f" another order. Rows can't be continued from there: end the run with that release, {_OR_AGAIN}"
        )
    for key, here in identity.items():
        if state.get(key) != here:
            if parts := _changed_parts(str(state.get(key)), str(here)):
                raise UserError(
                    f"checkpoint: {' and '.join(parts)} changed since its data position was saved. Rows can't be"
                    f" continued from there: use what the saved run used, {_OR_AGAIN}"
                )
            theirs, ours = differing(repr(state.get(key)), repr(here))
            earlier = " (or by a release that took the rows of epochs in another order)" * (key == "epochs")
            raise UserError(
                f"checkpoint: its data position was saved with {key} = {theirs}{earlier}, this run has {ours}."
                f" Rows can't be continued from there: use what the saved run used, {_OR_AGAIN}"
            )


def _changed_parts(saved: str, here: str) -> list[str]:
    """Return in words which parts of a chat template differ between two corpora; none if something else does."""
    theirs, ours = (_OF_TEMPLATE.search(text) for text in (saved, here))
    if not theirs or not ours:
        return []
    rest = [found.string[: found.start()] + found.string[found.end() :] for found in (theirs, ours)]
    if rest[0] != rest[1]:
        return []
    return [word for word, a, b in zip(_TEMPLATE_PARTS, theirs.groups(), ours.groups(), strict=True) if a != b]


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
    own = {"lanes", "counts", "resumes"}
    rest = [{key: value for key, value in state.items() if key not in own} for state in states]
    same = all(each == rest[0] for each in rest)
    assert same, "ranks at different steps, or runs"
    by_lane = list(zip(*(state["lanes"] for state in states), strict=True))
    lanes = [max(cursors) for cursors in by_lane]
    furthest = [max(range(len(states)), key=cursors.__getitem__) for cursors in by_lane]
    counted = functools.reduce(
        Counts.__add__, [Counts(*state["counts"]) for state in states], Counts(*first["counted"])
    )
    # Where a stream can be begun again is known to a rank that has read it.
    resumes = [
        resume
        for number, state in enumerate(states)
        for resume in state.get("resumes", ())
        if furthest[resume[0]] == number
    ]
    return {**rest[0], "lanes": lanes, "counted": list(counted), **({"resumes": sorted(resumes)} if resumes else {})}


def rows_of_epochs(position: dict[str, Any] | None) -> float:
    """Return the number of rows of all epochs by a saved position, math.inf if it doesn't hold it."""
    lengths = [Length.from_list(each) for each in (position or {}).get("lengths", ())]
    is_known = lengths and all(each.has_ended for each in lengths)
    return sum(each.rows for each in lengths) if is_known else math.inf
