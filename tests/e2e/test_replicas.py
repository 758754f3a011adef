"""Replica groups: equal to HSDP to the bit, whoever is killed meanwhile; see replica_kills.py for many more kills."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft", reason="replica groups need torchft")

import replica_kills
from groups import groups
from replica_kills import LAYOUTS, Death, Storm, compare, reference
from runs import EAGER, TINY, Command, numbers, saved, train

from torchtitan_graph.checkpoint.folder import list_steps
from torchtitan_graph.config import load
from torchtitan_graph.launch import lighthouse
from torchtitan_graph.launch.lighthouse import serve_in_turn
from torchtitan_graph.replicas.network import AUTO, Connection, lighthouse_address

FP32 = ["--training.mixed_precision_param", "float32", "--validation.no-enable"]
EACH_TWO = ["--training.global_batch_size", "6", "--training.local_batch_size", "1", "--training.steps", "4"]


def test_groups_on_one_machine_are_hsdp_to_the_bit(tmp_path: Path) -> None:
    """The launcher, a lighthouse and three groups, whose graphs begin the sums with their second microbatch. Nothing
    listens beyond loopback."""
    folder, hsdp = tmp_path / "run", tmp_path / "hsdp"
    words = [*FP32, *EACH_TWO, "--fault_tolerance.enable", "--job.dump_folder", str(folder)]
    words += ["--fault_tolerance.replicas", "3"]
    launch = [sys.executable, "-m", "torchtitan_graph.launch", "--job.config_file", TINY]
    (code, output), addresses = Command(*launch, *words, NGPU="1").finish_watched()
    assert code == 0, output
    assert addresses == {"127.0.0.1"}
    assert "replicas: 3 of 3 live: 0, 1, 2" in output
    theirs = train(*EAGER, *FP32, *EACH_TWO, "--job.dump_folder", str(hsdp), "--parallelism.fsdp_once_a_step", "all",
                   "--parallelism.data_parallel_replicate_degree", "3", ranks=3)  # fmt: skip
    assert theirs.code == 0, theirs.output
    assert all(numbers(folder / f"replica_{number}") == numbers(hsdp) for number in range(3))
    assert saved(folder, 4) == saved(hsdp, 4)
    assert [*list_steps(folder / "checkpoint")] == [2, 4], "one group saves"
    states = [json.loads((folder / f"replica_{number}" / "status.json").read_text()) for number in range(3)]
    assert [state["state"] for state in states] == ["finished"] * 3
    assert states[1]["replicas"] == {
        "this": 1,
        "living": [0, 1, 2],
        "of": 3,
        "replicas": 3,
        "redone_steps": 0,
        "heal_s": 0,
    }


def kill_one(folder: Path, layout: str, replicas: int, steps: int, kills: int, every_s: float) -> dict[str, Any]:
    theirs = reference(folder / "hsdp", layout, replicas, steps)
    storm = Storm(folder / "run", layout, replicas, steps, 0.1, random.Random(2))
    storm.run(kills, every_s)
    assert len(storm.deaths) >= kills
    if LAYOUTS[layout][0] == 1:  # else a rank ends with an error when the other one is killed
        assert not any(storm.codes.values()), "no group failed by itself"
    return compare(storm, theirs, steps)


def test_the_loss_of_one_group_ends_what_the_others_wait_for_from_each_other(tmp_path: Path) -> None:
    """Of three, only one notices that a group has died in the sum: it tells the other."""
    deaths = {1: Death("sum", 20, 0)}
    storm = Storm(tmp_path, "1", 3, 60, 0.0, random.Random(0), lambda number: deaths.pop(number, None))
    storm.run(0, 1.0)
    said = (tmp_path / "output.0").read_text() + (tmp_path / "output.2").read_text()
    assert not deaths and "which is repeated" in said
    steps = storm.steps(0)
    assert sorted(steps) == [*range(1, 61)] and not any(storm.codes.values())
    waits = [b["t"] - a["t"] for a, b in itertools.pairwise(steps.values())]
    assert max(waits) < storm.timeout_s, "no wait ended with the time that a message may take"


def test_a_group_that_is_killed_comes_back_and_no_bit_differs(tmp_path: Path) -> None:
    found = kill_one(tmp_path, "1", 2, 70, 1, 0.5)
    assert found["equal among replicas"] == found["equal to HSDP"] == found["rank-steps"] > 70


def heal_slowly() -> None:
    """In a rank: receive a state slowly, and ask the lighthouse again soon."""
    from torchtitan_graph.replicas import replicas
    from torchtitan_graph.replicas.transport import Transport

    replicas.ASK_AGAIN_S = 1.0
    receive = Transport.recv_checkpoint

    def receive_slowly(self: Transport, *given: Any, **named: Any) -> Any:
        self.is_receiving = True
        time.sleep(5)
        return receive(self, *given, **named)

    Transport.recv_checkpoint = receive_slowly  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_heal_that_takes_long_is_no_lost_lighthouse(tmp_path: Path) -> None:
    """A group comes back, and receives the state for longer than the lighthouse may take: once is enough."""
    words = [*EAGER, *FP32, "--training.global_batch_size", "4", "--training.local_batch_size", "2"]
    with groups(tmp_path, *words, "--training.steps", "1000", "--checkpoint.interval", "100") as run:
        run.start(0, 1)
        run.running[0].wait_for(tmp_path / "checkpoint" / "step-100")
        run.running[1].kill()
        run.start(1, patch=heal_slowly)
        results = run.finish()
    assert results[1].output.count("healed in") == 1
    every = [numbers(tmp_path / f"replica_{number}") for number in range(2)]
    assert sorted(every[0]) == [*range(1, 1001)] and len(every[1]) < 1000
    assert every[1] == {step: every[0][step] for step in every[1]}


def test_a_signal_to_the_launcher_of_all_groups_saves_and_a_start_goes_on(tmp_path: Path) -> None:
    words = [*EAGER, *FP32, "--training.global_batch_size", "4", "--training.local_batch_size", "2"]
    words += ["--checkpoint.interval", "1000", "--fault_tolerance.enable", "--job.dump_folder", str(tmp_path)]
    launch = [sys.executable, "-m", "torchtitan_graph.launch", "--job.config_file", TINY, *words]
    run = Command(*launch, "--training.steps", "100000", NGPU="1")
    run.wait_for(tmp_path / "replica_1" / "metrics.jsonl")
    while run.process.poll() is None and not numbers(tmp_path / "replica_1"):
        time.sleep(0.1)
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == 0, result.output
    (step,) = list_steps(tmp_path / "checkpoint")
    assert step == max(numbers(tmp_path / "replica_0")) and f"stopped by SIGTERM after step {step}" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_kills_in_every_layout(layout: str, tmp_path: Path) -> None:
    found = kill_one(tmp_path, layout, 3, 150, 6, 4.0)
    assert found["equal among replicas"] == found["rank-steps"]
    assert found["equal at the end"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mode"),
    [(layout, mode) for layout in ("1", "FSDP 2", "TP 2", "EP 2") for mode in ("eager", "graph")] + [("PP 2", "graph")],
)
def test_three_groups_are_hsdp_to_the_bit_in_every_layout(
    layout: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_kills, "mode", lambda _: ["--compile.mode", mode])
    found = kill_one(tmp_path, layout, 3, 20, 0, 1.0)
    assert found["equal to HSDP"] == found["rank-steps"] == 60 * LAYOUTS[layout][0]


def test_another_lighthouse_takes_the_place_of_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lighthouse, "BEAT_S", 0.05)
    monkeypatch.setattr(lighthouse, "own_address", lambda: "127.0.0.1")
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


def why_no_namespaces() -> str | None:
    """Return why no network can be cut here, None where it can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "needs ip and root, for network namespaces"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() or None


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces, and a bridge that joins them and this one: cutting the second's link parts it."""
    names = ["tgcut0", "tgcut1"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("link", "add", "tgcut", "type", "bridge")
        ip("link", "set", "tgcut", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"tgcutv{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"tgcutv{number}", "master", "tgcut", "up")
            for words in (f"addr add 10.254.9.{number + 1}/24 dev eth0", "link set eth0 up", "link set lo up"):
                ip("-n", name, *words.split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", "tgcut"], capture_output=True, check=False)


@pytest.mark.slow
def test_a_full_disk_for_a_group_s_output_does_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "replica_0").mkdir()
    (tmp_path / "replica_0" / "output.log").symlink_to("/dev/full")
    words = ["--fault_tolerance.enable", "--job.dump_folder", str(tmp_path), *EAGER]
    launch = [sys.executable, "-m", "torchtitan_graph.launch", "--job.config_file", TINY, *words]
    code, output = Command(*launch, NGPU="1").finish()
    assert code == 0, output
    assert output.count("output.log: the output of replica 0 is left out in part ([Errno 28]") == 1
    assert "[rank0]:" in output and [*numbers(tmp_path / "replica_0")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_network_that_is_cut_stops_the_smaller_side_and_nothing_diverges(tmp_path: Path, request) -> None:
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(reason)
    machines = request.getfixturevalue("machines")
    folder, address = tmp_path / "run", "http://10.254.9.1:29510"
    words = [*EAGER, *FP32, "--training.global_batch_size", "6", "--training.local_batch_size", "2"]
    words += ["--training.steps", "2000", "--fault_tolerance.enable", "--fault_tolerance.replicas", "3"]
    words += ["--fault_tolerance.lighthouse", address, "--fault_tolerance.heartbeat_timeout_seconds", "2"]
    words += ["--fault_tolerance.timeout_seconds", "3", "--job.dump_folder", str(folder), "--model.name"]
    words += ["my_models.slow", "--job.config_file", TINY]

    def on(machine: str, module: str, *more: str) -> Command:
        python = ["ip", "netns", "exec", machine, sys.executable, "-m", f"torchtitan_graph.{module}"]
        return Command(*python, *words, *more, SLOW_S="0.3")

    def steps(number: int) -> list[int]:
        path = folder / f"replica_{number}" / "metrics.jsonl"
        return [0, *numbers(path.parent)] if path.exists() else [0]

    def wait_for(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not what():
            assert time.monotonic() < deadline, f"see {tmp_path}"
            time.sleep(0.2)

    lighthouse = on(machines[0], "launch.lighthouse")
    groups = [on(machines[number == 2], "train", "--fault_tolerance.replica", str(number)) for number in range(3)]
    try:
        wait_for(lambda: all(steps(number)[-1] >= 5 for number in range(3)))
        subprocess.run(["ip", "link", "set", "tgcutv1", "down"], check=True)
        wait_for(lambda: steps(0)[-1] > steps(2)[-1] + 10)
        alone = steps(2)[-1]
        wait_for(lambda: steps(0)[-1] > alone + 20)
        assert steps(2)[-1] == alone, "the side without the lighthouse stops"
        subprocess.run(["ip", "link", "set", "tgcutv1", "up"], check=True)
        wait_for(lambda: steps(2)[-1] > alone + 5)
        for group in groups:
            group.process.terminate()
        for group in groups:
            result = group.finish()
            assert result.code == 0, result.output
    finally:
        lighthouse.process.terminate()
        for number, each in enumerate((lighthouse, *groups)):
            each.process.kill()
            each.process.wait()
            (tmp_path / f"output.{number}").write_text(each.output())
    every = [numbers(folder / f"replica_{number}") for number in range(3)]
    assert sorted(every[0]) == [*range(1, len(every[0]) + 1)], "every step is done once"
    for one in every[1:]:
        common = sorted(one.keys() & every[0].keys())
        assert common[-1] > alone + 5
        assert {step: one[step] for step in common} == {step: every[0][step] for step in common}, "nothing diverges"
    assert len(common) < len(every[0]) - 15
