"""The best checkpoint: which it is, that it is kept, and that its record is right after a kill at any moment."""

import json
from pathlib import Path

import pytest
from test_checkpoint_kill import checkpointer_of, with_kill_at

from dying import run_in_a_child
from torchtitan_graph.checkpoint import SAVE_POINTS, Best, best_checkpoint, best_of, find_best, is_used_up
from torchtitan_graph.checkpoint.folder import find_problem, list_steps
from torchtitan_graph.errors import UserError


def test_the_best_is_the_lowest_finite_value_and_the_first_of_equal_ones() -> None:
    best, found = None, []
    for step, value in enumerate([float("nan"), 3.0, 3.0, 2.0, float("nan"), 2.5], 1):
        best = find_best(best, "validation_loss", step, value)
        found.append(best and (best.step, best.since))
    assert found == [None, (2, 0), (2, 1), (4, 0), (4, 1), (4, 2)]


def test_patience_is_used_up_by_as_many_validations_and_0_by_none() -> None:
    assert [is_used_up(2, since) for since in range(4)] == [False, False, True, True]
    assert not is_used_up(0, 0) and not is_used_up(0, 9)


def test_a_best_of_another_metric_is_forgotten() -> None:
    state = {"best": Best("validation_loss/a", 4, 0.1, 2)._asdict()}
    assert best_of(state, "validation_loss/a") == Best("validation_loss/a", 4, 0.1, 2)
    assert best_of(state, "validation_loss/b") is None
    assert best_of({}, "validation_loss/b") is None


def save(folder: Path, step: int, best: int, keep_best: bool = True) -> None:
    run = checkpointer_of(folder, float(step))
    run.config.keep_best = keep_best
    best_state = Best("validation_loss", best, 0.5, step - best)._asdict()
    run.save(step, {"step": step, "tokens_seen": 0, "data": {"rows": 0, "lanes": []}, "rng": "", "best": best_state})


def test_the_best_is_never_deleted(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, best=2 if step > 1 else 1)
    assert list(list_steps(tmp_path)) == [2, 4, 5]  # keep_latest_k is 2
    assert best_checkpoint(tmp_path).name == "step-2"
    save(tmp_path, 6, best=6)
    assert list(list_steps(tmp_path)) == [5, 6]
    assert best_checkpoint(tmp_path).name == "step-6"


def test_without_the_option_nothing_is_named_or_kept(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step, best=1, keep_best=False)
    assert list(list_steps(tmp_path)) == [3, 4]
    with pytest.raises(UserError, match=r"best\.json: there is no such file; a run with checkpoint\.keep_best"):
        best_checkpoint(tmp_path)
    save(tmp_path, 5, best=1)  # set now, when the best is no longer there
    with pytest.raises(UserError, match="there is no such file"):
        best_checkpoint(tmp_path)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_its_record_names_a_whole_checkpoint_after_a_kill(point: str, after: bool, tmp_path: Path) -> None:
    save(tmp_path, 1, best=1)
    save(tmp_path, 2, best=1)

    def killed() -> None:
        with_kill_at(point, after)
        save(tmp_path, 3, best=3)

    run_in_a_child(killed)
    found = best_checkpoint(tmp_path)
    assert found.name in ("step-1", "step-3") and find_problem(found) is None
    again = checkpointer_of(tmp_path, -1.0)
    again.config.keep_best = True
    state = again.load()  # the resumed run corrects it
    assert state is not None
    assert best_checkpoint(tmp_path).name == f"step-{state['best']['step']}"


def test_a_record_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(json.dumps({"metric": "validation_loss", "step": 7, "value": 1.0}))
    with pytest.raises(UserError, match="names step-7, which is not there"):
        best_checkpoint(tmp_path)
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        best_checkpoint(tmp_path)
