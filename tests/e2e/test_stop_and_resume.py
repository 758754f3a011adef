"""A run that was stopped, in any way, and resumed, is the run that never stopped."""

import functools
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import patched_train
import pytest
from runs import Result, numbers, saved, saved_steps, start, train

from torchtitan_graph.checkpoint import SAVE_POINTS

IN_GRAPH = ["--compile.optimizer_in_graph"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a mode to the folder of a run that was killed in its fourth step, and last saved after its
    second."""
    options = {"graph": IN_GRAPH, "eager": []}
    return functools.cache(lambda mode: kill_in_step_4(tmp_path_factory.mktemp(mode), mode, *options[mode]))


def kill_in_step_4(folder: Path, mode: str, *options: str) -> Path:
    options = ("--job.dump_folder", str(folder), "--compile.mode", mode, *options)
    run = start(*options, ranks=2, patch=patched_train.pause_in_step_4, PAUSED=str(folder / "paused"))
    run.wait_for(folder / "paused")
    run.kill()
    assert run.finish().code == -signal.SIGKILL
    assert list(numbers(folder)) == [1, 2, 3]
    assert saved_steps(folder) == [2]
    return folder


@pytest.mark.parametrize(
    ("first", "then"),
    [("graph", "eager"), *(pytest.param(first, "graph", marks=pytest.mark.slow) for first in ("graph", "eager"))],
    ids=lambda mode: mode,
)
def test_killed_in_mid_step(
    first: str, then: str, killed: Callable[[str], Path], reference: tuple[Path, Result], tmp_path: Path
) -> None:
    """The optimizer's step is in the graph of the run that is killed, and not in that which goes on; or the reverse."""
    folder = tmp_path / "run"
    shutil.copytree(killed(first), folder)
    own = IN_GRAPH if (first, then) == ("eager", "graph") else []
    code, output = train("--job.dump_folder", str(folder), "--compile.mode", then, *own, ranks=2)
    assert code == 0, output
    assert "resuming after step 2" in output
    assert numbers(folder) == numbers(reference[0])
    assert saved(folder, 5) == saved(reference[0], 5)


def test_eager_and_graph_log_the_same_numbers(killed: Callable[[str], Path], reference: tuple[Path, Result]) -> None:
    eager = numbers(killed("eager"))
    assert len(eager) == 3
    assert eager == {step: values for step, values in numbers(reference[0]).items() if step <= 3}


@pytest.mark.slow
def test_experts_and_their_correction_biases_go_on_where_they_were(tmp_path: Path) -> None:
    options = ["--model.name", "my_models.experts", "--lr_scheduler.total_steps", "5", "--moe.load_balance_loss", "0.1"]
    runs = {"whole": [[]], "stopped": [["--training.steps", "2"], []], "eager": [["--compile.mode", "eager"]]}
    for name, parts in runs.items():
        for part in parts:
            code, output = train("--job.dump_folder", str(tmp_path / name), *options, *part)
            assert code == 0, output
            assert ("resuming after step 2" in output) == (name == "stopped" and not part)
    for name in ("stopped", "eager"):
        assert numbers(tmp_path / name) == numbers(tmp_path / "whole")
        assert saved(tmp_path / name, 5) == saved(tmp_path / "whole", 5)
    biases = saved(tmp_path / "whole", 5)["model.layers.1.moe.router.bias_E"]
    assert biases != saved(tmp_path / "whole", 2)["model.layers.1.moe.router.bias_E"]


def test_comparison_sees_another_seed(reference: tuple[Path, Result], tmp_path: Path) -> None:
    """Negative control: the numbers above tell one run from another."""
    code, output = train("--job.dump_folder", str(tmp_path), "--debug.seed", "1")
    assert code == 0, output
    mine, others = numbers(tmp_path), numbers(reference[0])
    assert all(abs(mine[step][0] - others[step][0]) > 1e-4 for step in mine)
    assert saved(tmp_path, 5)["model.norm.weight"] != saved(reference[0], 5)["model.norm.weight"]


@pytest.mark.slow
def test_killed_at_every_point_of_a_save(tmp_path: Path) -> None:
    """Each point alone is in unit/checkpoint/test_checkpoint_kill.py. Here one run is started again and again, and
    killed each time at the next named point of its first save."""
    points = [f"{when} {point}" for point in SAVE_POINTS for when in ("before", "after")]
    complete = points.index("after write_manifest")
    steps = len(points) - complete + 1
    options = ["--training.steps", str(steps), "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"]
    options += ["--compile.mode", "eager"]  # starts in no time, and saves the same bits
    folder, done = tmp_path / "killed", 0
    for number, point in enumerate(points):
        code, output = train("--job.dump_folder", str(folder), *options, patch=patched_train.kill_in_save, KILL=point)
        assert code == -signal.SIGKILL, f"{point}:\n{output}"
        assert (f"resuming after step {done}" in output) == (done > 0), f"{point}:\n{output}"
        done += number >= complete
    code, output = train("--job.dump_folder", str(folder), *options)
    assert code == 0 and f"resuming after step {done}" in output, output
    assert done == steps - 1

    never_stopped = tmp_path / "never_stopped"
    code, output = train("--job.dump_folder", str(never_stopped), *options)
    assert code == 0, output
    assert numbers(folder) == numbers(never_stopped)
    assert saved_steps(folder) == saved_steps(never_stopped)
    assert saved(folder, steps) == saved(never_stopped, steps)


FLOAT32 = ["--training.mixed_precision_param", "float32", "--training.steps", "4"]


@pytest.mark.slow
def test_resumed_on_another_number_of_ranks_and_workers(tmp_path: Path) -> None:
    one, two, one_then_two, two_then_one = (tmp_path / name for name in ("1", "2", "1 then 2", "2 then 1"))
    run_recorded(1, one, "--training.dataloader.num_workers", "2")
    run_recorded(2, two)
    rows = recorded_rows(one, 1)
    assert recorded_rows(two, 2) == rows
    assert len(set(rows)) == len(rows) == 4 * 8

    for first, folder in ((one, one_then_two), (two, two_then_one)):
        shutil.copytree(first, folder, ignore=lambda *_: ["step-4"])
        for file in folder.glob("rows.*"):
            file.unlink()
    run_recorded(2, one_then_two, "--training.dataloader.num_workers", "1")
    run_recorded(1, two_then_one)
    assert recorded_rows(one_then_two, 2) == recorded_rows(two_then_one, 1) == rows[2 * 8 :]
    for folder in (two, one_then_two, two_then_one):
        for step, (loss, grad_norm, lr, tokens_seen) in numbers(folder).items():
            assert (loss, grad_norm) == pytest.approx(numbers(one)[step][:2], rel=1e-5), f"{folder.name}: step {step}"
            assert (lr, tokens_seen) == numbers(one)[step][2:]


def run_recorded(num_ranks: int, folder: Path, *options: str) -> None:
    options = ("--job.dump_folder", str(folder), *FLOAT32, *options)
    folder.mkdir(exist_ok=True)
    code, output = train(*options, ranks=num_ranks, patch=patched_train.record_rows, ROWS=f"{folder}/rows")
    assert code == 0, output


def recorded_rows(folder: Path, num_ranks: int, batch_size: int = 2) -> list[str]:
    """Put the rows that the ranks took in their global order: microbatch by microbatch, rank by rank."""
    of_rank = [(folder / f"rows.{rank}").read_text().split() for rank in range(num_ranks)]
    return [
        row
        for start in range(0, len(of_rank[0]), batch_size)
        for rows in of_rank
        for row in rows[start : start + batch_size]
    ]
