"""How many rows a corpus gives in a number of epochs, counted before training by packing it."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.data.counts import Counts, in_words
from torchtitan_graph.data.mixture import Mixture
from torchtitan_graph.data.packing import Cursor, Lane
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import counting_group, gather_from_ranks, on_rank_0
from torchtitan_graph.patience import retry_io

# Note [Lengths]
# Each lane ends with a row that is full only in part, and lanes differ in length. So that steps are full to the end,
# rows are taken from the lanes that still have some (see `LaneOrder`), for which the number of rows of each must be
# known. It is found only by packing a lane: each is packed once to be counted. The numbers are saved with the position,
# and a resumed run counts nothing. A corpus of few rows gets fewer lanes, so that their last rows weigh little; of how
# many, the first 64 rows of its first lane decide.
#
# Where a run takes `most` rows and no more, lanes are counted as far as these rows reach, so that a large corpus, or a
# stream, is not read to its end. The order of those rows is the same however far the lanes are counted.
ROWS_PER_LANE = 64
_LOG_EVERY_S = 20.0


class Length(NamedTuple):
    """What a lane gives: rows, the tokens in them without padding, and the targets; whether it gives no more; and the
    documents that did not become rows as they are."""

    rows: int = 0
    tokens: int = 0
    targets: int = 0
    has_ended: bool = False
    counts: Counts = Counts()

    def to_list(self) -> list[int]:
        """Return the numbers alone, as they are saved."""
        return [self.rows, self.tokens, self.targets, int(self.has_ended), *self.counts]

    @classmethod
    def from_list(cls, numbers: Sequence[int]) -> "Length":
        """Return the length that `to_list` gave."""
        rows, tokens, targets, has_ended, *counts = numbers
        return cls(rows, tokens, targets, bool(has_ended), Counts(*counts))


OpenLane = Callable[[int, Cursor], Lane]


def reach(lengths: Sequence[Length], most: float) -> bool:
    """Return whether lanes were counted to their ends, or as far as `most` rows."""
    return all(each.has_ended for each in lengths) or sum(each.rows for each in lengths) >= most


def count_lengths(
    mixture: Mixture, open_lane: OpenLane, most: float, *, may_merge: bool, ranks: tuple[int, int] | None
) -> list[Length]:
    """Return the length of each lane, counted as far as `most` rows of all; of a corpus of few rows fewer lanes.

    Args:
        may_merge: whether the number of the mixture's lanes may become smaller.
        ranks: this rank and the number of ranks that call together and count a part of the lanes each; None: alone.
    """
    if may_merge:
        find = partial(retry_io, partial(_fitting_lanes, open_lane, mixture.num_lanes))
        mixture.set_lanes(on_rank_0(find, counting_group()) if ranks else find())
    limit = math.inf if most == math.inf else -(-int(most) // mixture.num_lanes)
    while not reach(lengths := _count(open_lane, mixture.num_lanes, limit, ranks), most):
        limit *= 2
    return lengths


def epochs_in_words(
    lengths: Sequence[Length], epochs: int, seq_len: int, rows_per_step: int, is_fixed: bool
) -> list[str]:
    """Return what epochs hold: a text of their rows, and one for each kind of documents that did not become rows.

    is_fixed: whether each row has `seq_len` tokens.
    """
    rows, tokens, targets = (sum(numbers) for numbers in list(zip(*lengths, strict=True))[:3])
    steps = math.ceil(rows / rows_per_step)
    what = "one epoch" if epochs == 1 else f"{epochs} epochs"
    if not all(each.has_ended for each in lengths):
        what = f"the first rows of {what}"
    room = steps * rows_per_step * seq_len
    padding = f"{1 - tokens / max(room, 1):.1%} padding".replace("%", " %") if is_fixed else f"{tokens:,} tokens"
    up_to, last = "" if is_fixed else "up to ", rows % rows_per_step
    short = f" (the last has {last})" if last else ""
    text = (
        f"{what}: {rows:,} rows of {up_to}{seq_len:,} tokens in {steps:,} steps of {rows_per_step}{short}, {padding},"
        f" {targets:,} targets"
    )
    return [text, *in_words(sum((each.counts for each in lengths), Counts()))]


def _fitting_lanes(open_lane: OpenLane, num_lanes: int) -> int:
    """Return the number of lanes, at most `num_lanes`, that have about ROWS_PER_LANE rows each, or more.

    Lane 0 decides, by its first rows alone: how far the lanes are counted makes no difference, see Note [Lengths].
    """
    rows = _length(open_lane(0, Cursor()), ROWS_PER_LANE).rows * num_lanes
    number = num_lanes
    while number > 1 and rows < number * ROWS_PER_LANE:
        number //= 2
    return number


def _count(open_lane: OpenLane, num_lanes: int, limit: float, ranks: tuple[int, int] | None) -> list[Length]:
    rank, num_ranks = ranks or (0, 1)
    own = partial(_count_own, open_lane, range(rank, num_lanes, num_ranks), limit)
    counted: dict[int, Length] = {}
    for found in gather_from_ranks(own, counting_group()) if ranks else [own()]:
        if isinstance(found, UserError):
            raise found
        counted |= found
    return [counted[lane] for lane in range(num_lanes)]


def _count_own(open_lane: OpenLane, lanes: range, limit: float) -> dict[int, Length] | UserError:
    """Return the length of each of some lanes; or an error of the data, which all ranks raise as it is."""
    try:
        return retry_io(partial(_count_each, open_lane, lanes, limit))
    except UserError as error:
        return error


def _count_each(open_lane: OpenLane, lanes: range, limit: float) -> dict[int, Length]:
    counted: dict[int, Length] = {}
    logged = time.monotonic()
    for number in lanes:
        counted[number] = _length(open_lane(number, Cursor()), limit)
        if time.monotonic() > logged + _LOG_EVERY_S:
            logged = time.monotonic()
            rows = sum(each.rows for each in counted.values())
            logger.info(f"counting rows: {len(counted)} of {len(lanes)} parts of the corpus, {rows:,} rows")
    return counted


def _length(lane: Lane, limit: float) -> Length:
    rows = tokens = targets = 0
    counts = Counts()
    while rows < limit:
        pieces = lane.next_pieces()
        counts += lane.counts
        if not pieces:
            return Length(rows, tokens, targets, True, counts)
        rows += 1
        for ids, labels in pieces:
            tokens += len(ids)
            targets += int((labels != IGNORE_INDEX).sum())
    return Length(rows, tokens, targets, False, counts)
