"""Replica groups: equal to HSDP to the bit, whoever is killed meanwhile; see replica_kills.py for many more kills."""

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from replica_kills import LAYOUTS, Storm, compare, reference
from runs import EAGER, TINY, Command, numbers, saved, train

from torchtitan_graph.checkpoint.folder import list_steps
from torchtitan_graph.config import load
from torchtitan_graph.launch import lighthouse
from torchtitan_graph.launch.lighthouse import serve_in_turn
from torchtitan_graph.replicas.network import AUTO, Connection, lighthouse_address

FP32 = ["--training.mixed_precision_param", "float32", "--validation.no-enable"]
EACH_ONE = ["--training.global_batch_size", "4", "--training.local_batch_size", "2", "--training.steps", "4"]


def test_groups_on_one_machine_are_hsdp_to_the_bit(tmp_path: Path) -> None:
    """The launcher, a lighthouse and two groups; a start again goes on. Nothing listens beyond loopback."""
    folder, hsdp = tmp_path / "run", tmp_path / "hsdp"
    words = [*EAGER, *FP32, *EACH_ONE, "--fault_tolerance.enable", "--job.dump_folder", str(folder)]
    launch = [sys.executable, "-m", "torchtitan_graph.launch", "--job.config_file", TINY]
    (code, output), addresses = Command(*launch, *words, NGPU="1").finish_watched()
    assert code == 0, output
    assert addresses == {"127.0.0.1"}
    assert "replicas: 2 of 2 live: 0, 1" in output
    theirs = train(*EAGER, *FP32, *EACH_ONE, "--job.dump_folder", str(hsdp),
                   "--parallelism.data_parallel_replicate_degree", "2", ranks=2)  # fmt: skip
    assert theirs.code == 0, theirs.output
    assert numbers(folder / "replica_0") == numbers(folder / "replica_1") == numbers(hsdp)
    assert saved(folder, 4) == saved(hsdp, 4)
    assert [*list_steps(folder / "checkpoint")] == [2, 4], "one group saves"
    states = [json.loads((folder / f"replica_{number}" / "status.json").read_text()) for number in range(2)]
    assert [state["state"] for state in states] == ["finished"] * 2
    assert states[1]["replicas"] == {
        "this": 1,
        "living": [0, 1],
        "of": 2,
        "replicas": 2,
        "redone_steps": 0,
        "heal_s": 0,
    }


def kill_one(folder: Path, layout: str, replicas: int, steps: int, kills: int, every_s: float) -> dict[str, Any]:
    theirs = reference(folder / "hsdp", layout, replicas, steps)
    storm = Storm(folder / "run", layout, replicas, steps, 0.1, random.Random(2))
    storm.run(kills, every_s, moments=0.0)
    assert len(storm.deaths) >= kills
    assert not any(storm.codes.values()), "no group failed by itself"
    return compare(storm, theirs, steps)


def test_a_group_that_is_killed_comes_back_and_no_bit_differs(tmp_path: Path) -> None:
    found = kill_one(tmp_path, "1", 2, 80, 1, 1.0)
    assert found["equal among replicas"] == found["equal to HSDP"] == found["rank-steps"] > 80


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_kills_in_every_layout(layout: str, tmp_path: Path) -> None:
    found = kill_one(tmp_path, layout, 3, 150, 6, 4.0)
    assert found["equal among replicas"] == found["rank-steps"]
    assert found["equal at the end"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_groups_are_hsdp_to_the_bit_in_every_layout(layout: str, tmp_path: Path) -> None:
    found = kill_one(tmp_path, layout, 2, 40, 0, 1.0)
    assert found["equal to HSDP"] == found["rank-steps"] == 80 * LAYOUTS[layout][0]


def test_another_lighthouse_takes_the_place_of_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lighthouse, "BEAT_S", 0.05)
    monkeypatch.setattr(lighthouse.socket, "gethostbyname", lambda _: "127.0.0.1")
    table = load(["--fault_tolerance.enable", "--fault_tolerance.lighthouse", AUTO]).fault_tolerance
    assert lighthouse_address(AUTO, tmp_path) is None
    ends = [threading.Event(), threading.Event()]
    threads = [threading.Thread(target=serve_in_turn, args=(table, tmp_path / "lighthouse", end)) for end in ends]

    def served_elsewhere(than: str | None) -> str:
        for _ in range(200):
            found = lighthouse_address(AUTO, tmp_path)
            if found is not None and found != than:
                return found
            threading.Event().wait(0.05)
        raise AssertionError("no other lighthouse serves")

    threads[0].start()
    first = served_elsewhere(None)
    threads[1].start()
    connection = Connection(first)
    assert connection.is_open()
    ends[0].set()
    second = served_elsewhere(first)
    threads[0].join(5)
    another = Connection(second)
    assert another.is_open() and not connection.is_open()
    another.close()
    connection.close()
    ends[1].set()
    threads[1].join(5)
