"""The order in which rows are taken from lanes."""

import bisect
import math
from collections.abc import Sequence


class LaneOrder:
    """Lanes that give rows in turn: round k has row k of each lane that has more than k rows, in the lanes' order.

    num_rows    of all lanes; math.inf for lanes without end
    """

    def __init__(self, lengths: Sequence[float]) -> None:
        """Take the number of rows of each lane, math.inf for one without end."""
        self._lengths = lengths
        self.num_rows = sum(lengths)
        # Rounds in which the same lanes have a row: the first row of these rounds, the first round, and the lanes.
        self._first_rows: list[int] = []
        self._first_rounds: list[int] = []
        self._lanes: list[list[int]] = []
        row = first_round = 0
        for length in sorted({*lengths} - {0}):
            lanes = [lane for lane, rows in enumerate(lengths) if rows > first_round]
            self._first_rows.append(row)
            self._first_rounds.append(first_round)
            self._lanes.append(lanes)
            if length < math.inf:
                row += len(lanes) * (int(length) - first_round)
                first_round = int(length)

    def place(self, row: int) -> tuple[int, int] | None:
        """Return the lane of a row, and the row's number in it; None after the last row."""
        if row >= self.num_rows:
            return None
        first_round, rounds, slot, lanes = self._find(row)
        return lanes[slot], first_round + rounds

    def given(self, row: int) -> list[int]:
        """Return the number of rows that each lane gave before a row."""
        if row >= self.num_rows:
            return [int(length) for length in self._lengths]
        first_round, rounds, slot, lanes = self._find(row)
        given = [int(min(length, first_round)) for length in self._lengths]
        for place, lane in enumerate(lanes):
            given[lane] += rounds + (place < slot)
        return given

    def _find(self, row: int) -> tuple[int, int, int, list[int]]:
        stage = bisect.bisect_right(self._first_rows, row) - 1
        lanes = self._lanes[stage]
        rounds, slot = divmod(row - self._first_rows[stage], len(lanes))
        return self._first_rounds[stage], rounds, slot, lanes
