"""The preflight names the bad node, and no other."""

import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_graph.launch import preflight
from torchtitan_graph.launch.preflight import judge, merge, not_read, ring, slow_nodes

WELL = {"code": "abc", "device": "cuda", "torch": "2.13.0", "python": "3.11.2"}


def reports(folder: Path, *nodes: str) -> dict[int, dict]:
    """Return the reports of well nodes, a process on each."""
    for rank, node in enumerate(nodes):
        (folder / f".preflight-{rank}").write_text(node)
    return {
        rank: {**WELL, "node": node, "rank": rank, "problems": [], "links": {}, "not_read": []}
        for rank, node in enumerate(nodes)
    }


@pytest.mark.parametrize("words", [[], ["--help"], ["a", "b"], ["/dev/null/x"], ["x" * 300]])
def test_a_wrong_call_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["preflight", *words])
    monkeypatch.setattr(preflight, "_join", None)  # it gets no further
    assert preflight.main() == 2


def test_nothing_is_wrong_with_equal_nodes(tmp_path: Path) -> None:
    assert judge(tmp_path, reports(tmp_path, "a", "b", "c")) == {}
    assert not list(tmp_path.iterdir())


def test_node_that_differs_is_named(tmp_path: Path) -> None:
    found = reports(tmp_path, "a", "b", "c")
    found[1]["torch"] = "2.12.0"
    found[2]["problems"] = ["its device cuda:0 does not compute: no"]
    assert judge(tmp_path, found) == {
        "b": ["its torch is 2.12.0, elsewhere 2.13.0"],
        "c": ["its device cuda:0 does not compute: no"],
    }


def test_node_that_does_not_share_the_folder_is_named(tmp_path: Path) -> None:
    found = reports(tmp_path, "a", "b")
    (tmp_path / ".preflight-1").unlink()
    assert list(judge(tmp_path, found)) == ["b"]


def test_a_mark_that_is_no_file_is_not_read(tmp_path: Path) -> None:
    found = reports(tmp_path, "a", "b")
    (tmp_path / ".preflight-1").unlink()
    os.mkfifo(tmp_path / ".preflight-1")
    assert list(judge(tmp_path, found)) == ["b"]
    assert preflight.report(tmp_path, 1)["problems"] == []  # it is replaced


def test_gpu_with_fewer_links_than_the_others_is_named(tmp_path: Path) -> None:
    found = reports(tmp_path, "a", "b")
    found[0]["links"] = {"0": 18, "1": 18}
    found[1]["links"] = {"0": 18, "1": 17}
    (problem,) = judge(tmp_path, found)["b"]
    assert problem.startswith("GPU 1: 17 of its NVLinks are active, usual are 18")
    bridged = reports(tmp_path, "a", "b")
    for each in bridged.values():
        each["links"] = {"0": 12, "1": 12}  # bridges leave six of them free
    assert judge(tmp_path, bridged) == {}


def test_the_first_process_of_a_node_reads_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that knows one command, and fails in the others; see test_gpu_health.py for the rest."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'; echo ' Link 0: 26.562 GB/s'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    first = preflight.report(tmp_path / "run", 0)
    assert first["links"] == {"0": 1} and len(first["not_read"]) == 4 and first["problems"] == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert preflight.report(tmp_path / "run", 1)["links"] == {}


def test_what_was_not_read_is_told_once_for_all_nodes(tmp_path: Path) -> None:
    found = reports(tmp_path, "a", "b", "c")
    for rank in (0, 2):
        found[rank]["not_read"] = ["dcgmi diag (not installed)"]
    assert not_read(found) == {"dcgmi diag (not installed)": ["a", "c"]}
    assert judge(tmp_path, found) == {}


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8])
def test_a_node_has_two_neighbours_and_one_of_them_at_a_time(number: int) -> None:
    turns = ring(number)
    links = [frozenset(pair) for turn in turns for pair in turn]
    assert len({*links}) == len(links) == (number if number > 2 else number - 1)
    assert all(len({*sum(turn, ())}) == 2 * len(turn) for turn in turns)
    assert number < 3 or all(sum(node in link for link in links) == 2 for node in range(number))


NODES, RAILS = 16, 8


def measured(dice: random.Random, rates: dict[int, float], noise: float = 0.04) -> dict[tuple[int, int], list[float]]:
    """Return seconds of the links of 16 nodes with eight GPUs each, whose ranks have these shares of the usual rate.

    Links differ by 3 %, repetitions of one by `noise`; every twentieth meets other messages and takes up to three times
    as long.
    """
    seconds = {}
    for node, other in [pair for turn in ring(NODES) for pair in turn]:
        for rail in range(RAILS):
            one, two = node * RAILS + rail, other * RAILS + rail
            usual = 0.01 * math.exp(dice.gauss(0, 0.03)) / min(rates.get(one, 1), rates.get(two, 1))
            seconds[one, two] = [
                usual * math.exp(dice.gauss(0, noise)) * (dice.uniform(1, 3) if dice.random() < 0.05 else 1)
                for _ in range(preflight.REPEATS)
            ]
    return seconds


def blamed(jobs: int, rates: dict[int, float], noise: float = 0.04) -> list[list[str]]:
    """Return the nodes that are called slow, of jobs with random measurements."""
    dice, nodes = random.Random(0), [f"n{rank // RAILS}" for rank in range(NODES * RAILS)]
    return [[*slow_nodes(nodes, measured(dice, rates, noise))] for _ in range(jobs)]


def test_of_links_that_differ_by_chance_none_is_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for noise in (0.01, 0.04, 0.15):
        assert blamed(50, {}, noise) == [[]] * 50
    monkeypatch.setattr(preflight, "DEVIATIONS", 0)  # Negative control: what the spread is there for.
    monkeypatch.setattr(preflight, "LEAST_SLOWER", 0)
    assert any(blamed(5, {}, 0.15))


def test_a_gpu_at_70_percent_of_the_usual_rate_is_found() -> None:
    assert blamed(50, {3 * RAILS + 5: 0.7}) == [["n3"]] * 50, "one of the eight"
    assert blamed(50, dict.fromkeys(range(3 * RAILS, 4 * RAILS), 0.7)) == [["n3"]] * 50, "all of a node"
    assert blamed(50, {3 * RAILS + 5: 0.9}) == [[]] * 50, "it may as well be chance"


def test_of_four_nodes_the_slow_one_is_named_and_its_neighbours_are_not() -> None:
    seconds = {(0, 1): [1.0, 1.1], (2, 3): [1.5, 1.6], (1, 2): [1.5, 1.5], (0, 3): [1.0, 1.0]}
    assert list(slow_nodes(["a", "b", "c", "d"], seconds)) == ["c"]
    assert slow_nodes(["a", "b", "c", "d"], seconds | {(1, 2): [1.0, 1.0]}) == {}, "one link is of two nodes"
    assert slow_nodes(["a", "b", "c", "d"], dict.fromkeys(seconds, [9.0, 9.0])) == {}


def test_findings_add_up() -> None:
    assert merge({"a": ["x"]}, {}, {"a": ["y"], "b": ["z"]}) == {"a": ["x", "y"], "b": ["z"]}


def launch(folder: Path, ranks: list[int], world_size: int, node_of: list[str], env: dict[str, str]) -> list:
    """Start the preflight as srun does, for some of the ranks; return their codes and rank 0's output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_NTASKS": str(world_size), **env}
    script = "import sys, torchtitan_graph.launch.preflight as p\n" + env.get("PATCH", "") + "\nsys.exit(p.main())"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder)],
            env={**os.environ, **common, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": node_of[rank]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]
    outputs = [process.communicate()[0] for process in started]
    return [[process.returncode for process in started], outputs[0]]


@pytest.mark.slow
def test_two_nodes_that_are_well(tmp_path: Path) -> None:
    codes, output = launch(tmp_path, [0, 1], 2, ["a", "b"], {})
    assert codes == [0, 0], output
    assert "preflight: all 2 nodes are well" in output
    assert "GiB/s per rank" in output
    assert "links between the 2 nodes: " in output and "not judged, which takes 4 nodes" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wrong_clock_and_absent_node_are_named_at_once(tmp_path: Path) -> None:
    """Node b's clock is an hour off; node c never comes. The time for reports is shortened."""
    patch = "import os, time\np.REPORT_WITHIN_S = 15.0\n"
    patch += "if os.environ['SLURM_PROCID'] == '1': now = time.time; time.time = lambda: now() + 3600"
    codes, output = launch(tmp_path, [0, 1], 3, ["a", "b", "c"], {"PATCH": patch, "JOB_NODES": "a b c"})
    assert codes == [5, 5], output
    assert "node b: its clock is +3600 s off that of a" in output
    assert "node c: it did not report" in output
    assert "node a" not in output
    failures = [json.loads(path.read_text()) for path in (tmp_path / "failures").iterdir()]
    assert sorted(failure["host"] for failure in failures) == ["b", "c"]
    assert all(failure["code"] == 5 and failure["time"] <= time.time() for failure in failures)
