"""The preflight names the bad node, and no other."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_graph.launch import preflight
from torchtitan_graph.launch.preflight import judge, merge, slow_nodes

WELL = {"code": "abc", "torch": "2.13.0", "python": "3.11.2", "problems": []}


def reports(folder: Path, *nodes: str) -> dict[int, dict]:
    """Return the reports of well nodes, a process on each."""
    for rank, node in enumerate(nodes):
        (folder / f".preflight-{rank}").write_text(node)
    return {rank: {**WELL, "node": node, "rank": rank, "problems": []} for rank, node in enumerate(nodes)}


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


def test_slow_node_is_named_and_its_neighbours_are_not() -> None:
    nodes = ["a", "b", "c", "d", "e"]
    seconds = {(0, 1): 1.0, (2, 3): 9.0, (1, 2): 9.0, (3, 4): 1.1}
    assert list(slow_nodes(nodes, seconds)) == ["c"]
    assert slow_nodes(nodes, dict.fromkeys(seconds, 9.0)) == {}


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
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wrong_clock_and_absent_node_are_named_at_once(tmp_path: Path) -> None:
    """Node b's clock is an hour off; node c never comes. The time for reports is shortened."""
    patch = "import os, time\np.REPORT_WITHIN_S = 15.0\n"
    patch += "if os.environ['SLURM_PROCID'] == '1': now = time.time; time.time = lambda: now() + 3600"
    codes, output = launch(tmp_path, [0, 1], 3, ["a", "b", "c"], {"PATCH": patch, "PREFLIGHT_NODES": "a b c"})
    assert codes == [5, 5], output
    assert "node b: its clock is +3600 s off that of a" in output
    assert "node c: it did not report" in output
    assert "node a" not in output
    failures = [json.loads(path.read_text()) for path in (tmp_path / "failures").iterdir()]
    assert sorted(failure["host"] for failure in failures) == ["b", "c"]
    assert all(failure["code"] == 5 and failure["time"] <= time.time() for failure in failures)
