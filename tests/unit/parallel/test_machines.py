"""Which ranks share a machine: as an option says, as launched, or by a device's figures; and what is refused."""

from pathlib import Path

import pytest

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import check, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.plan.ranks import build, configuration
from torchtitan_graph.rates import RATES

MACHINES = "--parallelism.expert_exchange by_machine --parallelism.expert_parallel_degree 4"
JOB = f"--model.name deepseek_v3 --training.seq_len 64 {MACHINES}"


def ranks_of_ep(words: str = "") -> int:
    """Return how many of four ranks that share experts are in a machine."""
    return Blueprint(load([*JOB.split(), *words.split()]), 4).dims.ep_near


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def test_the_option_counts_before_the_launcher_and_the_device_where_nothing_is_launched() -> None:
    assert ranks_of_ep() == 2
    assert ranks_of_ep("--parallelism.ranks_per_machine 1") == 1
    assert ranks_of_ep("--comm.mode fake_backend") == 4, "all of a CPU's ranks"


def test_a_launcher_that_does_not_say_it_is_told_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(UserError, match=r"does not say how many .*LOCAL_WORLD_SIZE.*set parallelism.ranks_per_machine"):
        ranks_of_ep()


@pytest.mark.parametrize("near", [3, 8])
def test_machines_that_the_processes_do_not_fill_are_refused_with_all_else_that_is_wrong(near: int) -> None:
    words = f"--parallelism.ranks_per_machine {near} --parallelism.expert_exchange by_machine --model.name qwen3"
    config = load(
        [
            *words.split(),
            "--parallelism.expert_parallel_degree",
            "2",
            "--parallelism.expert_tensor_parallel_degree",
            "3",
        ]
    )
    with pytest.raises(UserError, match=f"3 problems(?s:.*)ranks_per_machine = {near}: 4 .*set it to 1, 2 or 4"):
        check(config, 4)


def test_ranks_that_fill_no_machine_are_refused_with_what_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="3 ranks share .*change parallelism.ranks_per_machine, which can be 1, 2, 4, or"
    ):
        ranks_of_ep("--parallelism.ranks_per_machine 3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(
        UserError, match="3 ranks share a machine.*: change parallelism.expert_parallel_degree, or leave"
    ):
        ranks_of_ep()


def test_graphs_made_for_other_machines_are_made_again_with_theirs_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"with this run's options and --parallelism.ranks_per_machine 2 in both"):
        ranks_of_ep(f"--compile.precompiled {tmp_path}")


@pytest.mark.slow
def test_tokens_in_float8_go_to_packed_experts_too() -> None:
    """Packed weights have bytes in place of a row's numbers: tokens are as wide as w2's rows are many."""
    words = f"--model.name qwen3 --model.flavor debugmodel_moe --training.seq_len 64 {MACHINES} --model.lora.rank 4"
    words += " --model.lora.base nf4 --model.lora.targets *.experts.* --parallelism.exchange_dtype float8"
    assert build(configuration(words.split(), 4), 4, RATES["H100"]).ranks


def test_sums_of_an_exchange_are_refused_without_experts() -> None:
    with pytest.raises(UserError, match="parallelism.exchange_sums = 'by_machine': llama3 .*set it to exact"):
        Blueprint(load(["--model.name", "llama3", "--parallelism.exchange_sums", "by_machine"]), 1)
