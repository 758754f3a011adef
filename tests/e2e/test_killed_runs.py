"""Runs that are killed as they write their files, many times, end with every bit."""

from pathlib import Path

import pytest

from attacks.kills import attack


@pytest.mark.slow
def test_killed_runs_go_on_and_keep_every_bit(tmp_path: Path) -> None:
    counts = attack(kills=30, seed=4, folder=tmp_path)
    assert sum(count for kind, count in counts.items() if "none" not in kind) == 30
    assert len(counts) > 8, counts
