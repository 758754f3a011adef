"""What options name in a run's folder is not what something else is written to."""

import pytest

from torchtitan_graph.config import check, load
from torchtitan_graph.errors import UserError

OWN = ["run.lock", "run.lock.host.1", "run.reserve", "status.json", "requeue.json", "metrics.jsonl"]
OWN += [
    "metrics_rank3.jsonl",
    "metrics_dropped.jsonl",
    "failures/x",
    "graphs",
    "wandb",
    "wandb_run_id",
    "status.json.tmp",
]
FOLDERS = ["checkpoint.folder", "metrics.save_tb_folder", "profiling.save_traces_folder"]
FOLDERS += ["profiling.save_memory_snapshot_folder", "comm.save_traces_folder"]


@pytest.mark.parametrize("option", ["job.save_config_file", *FOLDERS])
@pytest.mark.parametrize("name", [*OWN, "./run.lock"])
def test_a_name_of_the_run_s_own_is_refused(option: str, name: str) -> None:
    with pytest.raises(UserError, match=f"{option} = '{name}': .* is what the run itself writes; use another name"):
        check(load([f"--{option}", name]), 1)


@pytest.mark.parametrize("option", ["job.save_config_file", *FOLDERS])
@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../b"])
def test_what_leads_out_of_the_folder_is_refused(option: str, name: str) -> None:
    with pytest.raises(UserError, match=f"{option} = '{name}': must be a path below dump_folder"):
        load([f"--{option}", name])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("--job.save_config_file tb", "'tb'.* is the same"),
        (
            "--job.save_config_file checkpoint/step-3/config.toml",
            "save_config_file .*: checkpoint.folder = 'checkpoint'",
        ),
        ("--job.save_config_file a --checkpoint.folder a/b", "job.save_config_file = 'a' is a file"),
        ("--checkpoint.folder comm_traces", "checkpoint.folder = 'comm_traces' is the same"),
        ("--checkpoint.folder x --profiling.save_traces_folder ./x/", "checkpoint.folder = 'x' is the same"),
        ("--checkpoint.folder= --metrics.save_tb_folder step-3", "of which step-3 is called as one"),
        ("--metrics.save_tb_folder= --checkpoint.folder=", "is the same"),
    ],
)
def test_a_place_of_two_options_is_refused(settings: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        check(load(settings.split()), 1)
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    "settings",
    [
        "--job.save_config_file=",
        "--checkpoint.folder=",
        "--job.save_config_file configs/mine.toml",
        "--profiling.save_traces_folder tb/plugins/profile",
        "--job.save_config_file checkpoint/config.toml",
        "--metrics.save_tb_folder logs",
    ],
)
def test_other_places_are_legal(settings: str) -> None:
    check(load(settings.split()), 1)
