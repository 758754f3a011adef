"""What the launcher of all replica groups says at the end."""

from pathlib import Path

from torchtitan_graph.config import load
from torchtitan_graph.launch.replicas import find_unsaved
from torchtitan_graph.run.status import FINISHED, Status


def test_a_run_whose_last_step_nobody_saved_is_no_success(tmp_path: Path) -> None:
    words = ["--job.dump_folder", str(tmp_path), "--fault_tolerance.enable", "--checkpoint.enable"]
    config = load(words)
    for number in range(2):
        folder = tmp_path / f"replica_{number}"
        folder.mkdir()
        status = Status(folder, total_steps=7)
        status.done(7, 1.0)
        status.write(FINISHED)
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    problem = find_unsaved(config)
    assert problem is not None and "step 7 is done, and the newest checkpoint is of step 5" in problem
    assert find_unsaved(load([*words, "--checkpoint.no-enable"])) is None
    (tmp_path / "checkpoint" / "step-7").mkdir()
    assert find_unsaved(config) is None
