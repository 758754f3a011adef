"""What a restarted attempt makes of the failures of the one before it."""

from pathlib import Path

import pytest

from torchtitan_graph.errors import UserError
from torchtitan_graph.run.failure import FAULT, NON_FINITE, NotTriedAgain, refuse_to_repeat, write_failure


def test_what_would_fail_in_the_same_way_is_not_tried_again_and_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    write_failure(tmp_path, ValueError("step 4"), NON_FINITE)
    refuse_to_repeat(tmp_path)  # the first attempt may
    for attempt in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with pytest.raises(UserError) as refused:
            refuse_to_repeat(tmp_path)
        assert isinstance(refused.value, NotTriedAgain) and refused.value.code == NON_FINITE
        assert str(refused.value) == "not tried again: ValueError: step 4"
        write_failure(tmp_path, refused.value, refused.value.code)


def test_a_fault_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    write_failure(tmp_path, RuntimeError("no"), FAULT)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    refuse_to_repeat(tmp_path)
