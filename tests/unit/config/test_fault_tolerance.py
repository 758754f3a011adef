"""What replica groups can't do is refused by name, before anything starts."""

import pytest

from torchtitan_graph.config import check, load, run_folder
from torchtitan_graph.config.fault_tolerance import check_member
from torchtitan_graph.errors import UserError

MEMBER = "--fault_tolerance.enable --fault_tolerance.replica 1 --fault_tolerance.lighthouse http://127.0.0.1:29510"


def problems(arguments: str, world_size: int = 2) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(load([*MEMBER.split(), *arguments.split()]), world_size)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--fault_tolerance.min_replicas 3", "min_replicas = 3: there are 2 (fault_tolerance.replicas)"),
        ("--fault_tolerance.replica 2", "replica = 2: must be from 0 to 1"),
        ("--fault_tolerance.lighthouse http://a:99999", "its port must be from 1 to 65535"),
        ("--moe.load_balance_loss 0.1", "load_balance_over = 'batch': batch: not with fault_tolerance.enable"),
        (
            "--model.converters float8 --quantize.linear.float8.recipe_name tensorwise_delayed",
            "recipe_name = 'tensorwise_delayed': not with fault_tolerance.enable",
        ),
        ("--optimizer.name my.Adam", "a class of your own makes its state in its first step"),
        ("--training.enable_cpu_offload", "gradients are summed where they are"),
        ("--training.skip_leaps 10 --training.roll_back_after 2 --checkpoint.enable", "set it to 0"),
        ("--checkpoint.enable --checkpoint.remote_folder memory://run", "name a folder that they share"),
        ("--parallelism.pipeline_parallel_schedule_csv a.csv", "take pipeline_parallel_schedule"),
        (
            "--training.local_batch_size 2 --training.global_batch_size 4",
            "has 1 microbatches of 4 rows, and each of fault_tolerance.replicas 2 needs one: at least 8",
        ),
    ],
)
def test_what_is_refused(arguments: str, message: str) -> None:
    assert any(message in line for line in problems(arguments)), problems(arguments)


def test_each_refusal_is_about_replica_groups() -> None:
    """The same options are legal without them."""
    check(load(["--moe.load_balance_loss", "0.1", "--optimizer.name", "my.Adam"]), 2)


def test_a_group_and_its_lighthouse_are_named_together() -> None:
    for given, missing in (("replica 0", "lighthouse"), ("lighthouse auto", "replica")):
        with pytest.raises(UserError, match=f"fault_tolerance.{missing}"):
            check(load(f"--fault_tolerance.enable --fault_tolerance.{given}".split()), 2)
    check(load(["--fault_tolerance.enable"]), 2)  # of all groups on this machine
    check(
        load(["--fault_tolerance.enable", "--fault_tolerance.replica", "0", "--fault_tolerance.lighthouse", "auto"]), 2
    )


def test_an_address_is_one() -> None:
    for wrong in ("host:29510", "https://host:1", "http://host", "Auto"):
        with pytest.raises(UserError, match="auto or http://HOST:PORT"):
            load(["--fault_tolerance.lighthouse", wrong])


def test_a_rank_has_to_know_its_group() -> None:
    with pytest.raises(UserError, match="start the run by python -m torchtitan_graph.launch"):
        check_member(load(["--fault_tolerance.enable"]))
    check_member(load(MEMBER.split()))
    check_member(load([]))


def test_options_without_effect_are_told_but_those_that_a_script_sets() -> None:
    notices = check(load(["--fault_tolerance.min_replicas", "2"]), 2)
    assert any("min_replicas = 2: there are no replica groups" in line for line in notices)
    assert check(load(["--fault_tolerance.replica", "1", "--fault_tolerance.lighthouse", "auto"]), 2) == []


def test_each_group_has_a_folder_of_its_own() -> None:
    assert str(run_folder(load([*MEMBER.split(), "--job.dump_folder", "a"]))) == "a/replica_1"
    assert str(run_folder(load(["--job.dump_folder", "a", "--fault_tolerance.replica", "1"]))) == "a"
