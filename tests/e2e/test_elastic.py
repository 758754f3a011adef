"""A lost or hanging worker: torchrun starts all of them again, and the run ends with the bits it would have had."""

import json
import sys
from pathlib import Path

import pytest
from runs import REPOSITORY, TINY, Command, Result, numbers, saved, torchrun, train

# As run_train.sh and multinode_trainer.slurm set it; torchrun reads its own options from PET_*.
RESTART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_MAX_RESTARTS": "1", "PET_MONITOR_INTERVAL": "0.1"}


def assert_recovered(folder: Path, result: Result, reference: Path) -> None:
    assert result.code == 0, result.output
    assert "resuming after step 2" in result.output
    assert numbers(folder) == numbers(reference)
    assert saved(folder, 5) == saved(reference, 5)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["restarts"]) == ("finished", 1)
    assert status["seconds"]["lost"] > 0, "the third step was done twice"


@pytest.mark.slow
def test_killed_worker(reference: tuple[Path, Result], tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path)]
    result = torchrun(2, *options, patch="lose_rank_1_in_step_4", LOSE="kill", **RESTART).finish()
    assert_recovered(tmp_path, result, reference[0])
    assert not (tmp_path / "comm_traces").exists() or not list((tmp_path / "comm_traces").iterdir())


@pytest.mark.slow
def test_hanging_worker(reference: tuple[Path, Result], tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--comm.train_timeout_seconds", "8"]
    result = torchrun(
        *[2, *options], patch="lose_rank_1_in_step_4", LOSE="hang", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2", **RESTART
    ).finish()
    assert_recovered(tmp_path, result, reference[0])
    stacks = {rank: (tmp_path / "comm_traces" / f"rank_{rank}_stacks.txt") for rank in (0, 1)}
    assert f"the stacks of the ranks are in {tmp_path / 'comm_traces'}" in result.output
    assert "in lose\n" in stacks[1].read_text(), "rank 1 hangs in its own code"
    assert "in lose\n" not in stacks[0].read_text() and "in train_step\n" in stacks[0].read_text()


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_not_tried_again_and_the_exit_code_stays(tmp_path: Path) -> None:
    agent = ["--nproc-per-node", "2", "--rdzv-id", "mine", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    agent += ["--rdzv-conf", "store_type=file", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    options = ["--job.config_file", TINY, "--job.dump_folder", str(tmp_path), "--model.name", "my_models.infinite"]
    words = [sys.executable, "-m", "torchtitan_graph.launch", *agent, "--", *options]
    code, output = Command(*words, **RESTART).finish()
    assert code == 3, output
    assert output.count("not tried again: NonFiniteError: step 1: the loss is not finite on ranks [1]") == 1, output


EP2 = ["--parallelism.expert_parallel_degree", "2"]
PP2 = ["--parallelism.pipeline_parallel_degree", "2"]


@pytest.mark.parametrize(
    ("layout", "other"),
    [pytest.param(EP2, PP2, id="EP-2-then-PP-2"), pytest.param(PP2, EP2, id="PP-2-then-EP-2", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_rank_killed_amid_a_step_is_told_once_and_the_run_goes_on_in_another_layout(
    layout: list[str], other: list[str], tmp_path: Path
) -> None:
    options = ["--model.name", "my_models.killed", "--job.dump_folder", str(tmp_path)]
    killed = {"NGPU": "2", "CONFIG_FILE": TINY, "KILL_AFTER": str(tmp_path / "checkpoint" / "step-2")}
    code, output = Command(str(REPOSITORY / "run_train.sh"), *options, *layout, **killed).finish()
    assert code == 137, output
    assert list(numbers(tmp_path)) == [1, 2]
    assert output.count("ERROR   rank 1 was ended by SIGKILL") == output.count("ERROR ") - 1 == 1, output
    assert "Traceback" not in output
    code, output = train(*options, *other, ranks=2)
    assert code == 0 and "resuming after step 2" in output, output
    assert list(numbers(tmp_path)) == [1, 2, 3, 4, 5]
