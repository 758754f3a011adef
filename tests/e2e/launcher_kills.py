"""Kill launchers of a job of replica groups at random, and what they started:

    python tests/e2e/launcher_kills.py [--kills 20] [--replicas 3] [--seed 0] [--folder FOLDER]

The job is started as a user does it: one launcher for all. What is killed is that one, which is then started again as
a user would; the launcher of a group; a rank; or the lighthouse. At the end each group's numbers are compared with the
others' and with HSDP's.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from replica_kills import BASE, rows
from runs import EAGER, TINY, Command, numbers, train

STEP_S = 300.0  # without a new step the job hangs


def children(pid: int) -> list[int]:
    try:
        found = (Path(f"/proc/{pid}/task") / str(pid) / "children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in found]


def victims(pid: int) -> dict[str, list[int]]:
    """Return the processes of a running job by their kind."""
    found: dict[str, list[int]] = {"launcher": [pid], "group's launcher": [], "lighthouse": [], "rank": []}
    for child in children(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_text()
        except OSError:
            continue
        if "launch.lighthouse" in words:
            found["lighthouse"].append(child)
        else:
            found["group's launcher"].append(child)
            found["rank"] += children(child)
    return found


def steps_of(folder: Path, number: int) -> dict[int, tuple[float, ...]]:
    place = folder / f"replica_{number}"
    return numbers(place) if (place / "metrics.jsonl").exists() else {}


def attack(kills: int, replicas: int, seed: int, folder: Path, steps: int) -> None:
    rng = random.Random(seed)
    words = [*BASE, *EAGER, "--training.steps", str(steps), *rows("FSDP 2", replicas, 2)]
    hsdp = train(
        *words,
        "--job.dump_folder",
        str(folder / "hsdp"),
        "--parallelism.data_parallel_replicate_degree",
        str(replicas),
        ranks=2 * replicas,
    )
    assert hsdp.code == 0, hsdp.output
    theirs = numbers(folder / "hsdp")
    place = folder / "run"
    command = [sys.executable, "-m", "torchtitan_graph.launch", "--job.config_file", TINY, *words]
    command += ["--job.dump_folder", str(place), "--fault_tolerance.enable", "--fault_tolerance.replicas"]
    command += [str(replicas), "--fault_tolerance.heartbeat_timeout_seconds", "2"]
    job = Command(*command, NGPU="2")
    done: list[str] = []
    waits: list[float] = []
    outputs = ""
    reached, moved = 0, time.monotonic()
    next_kill = time.monotonic() + 15
    while job.process.poll() is None:
        time.sleep(0.1)
        step = max((max(steps_of(place, number), default=0) for number in range(replicas)), default=0)
        if step > reached:
            if done:
                waits.append(time.monotonic() - moved)
            reached, moved = step, time.monotonic()
        assert time.monotonic() < moved + STEP_S, f"no step after {reached}:\n{job.output()}"
        if len(done) < kills and reached < steps - 10 and time.monotonic() > next_kill:
            there = victims(job.process.pid)
            kind = rng.choice([kind for kind, pids in there.items() if pids])
            pid = rng.choice(there[kind])
            subprocess.run(["kill", "-KILL", str(pid)], check=False)
            done.append(kind)
            print(f"after step {reached}: {kind}", flush=True)
            if kind == "launcher":
                assert job.process.wait() == -signal.SIGKILL
                outputs += job.output()
                time.sleep(1)
                job = Command(*command, NGPU="2")
            next_kill = time.monotonic() + 8 + 10 * rng.random()
    outputs += job.output()
    (folder / "output.log").write_text(outputs)
    assert job.process.returncode == 0, outputs[-8000:]
    every = [steps_of(place, number) for number in range(replicas)]
    union = {step: each[step] for each in every for step in each}
    assert sorted(union) == [*range(1, steps + 1)], f"missing: {sorted({*range(1, steps + 1)} - {*union})}"
    alike = sum(len({each[step] for each in every if step in each}) == 1 for step in union)
    worst = max(abs(union[step][0] / theirs[step][0] - 1) for step in union)
    assert all(union[step][2:] == theirs[step][2:] for step in union), "learning rates and tokens are HSDP's"
    states = [json.loads((place / f"replica_{n}" / "status.json").read_text())["state"] for n in range(replicas)]
    kinds = {kind: done.count(kind) for kind in dict.fromkeys(done)}
    print(f"{len(done)} kills: {kinds}; {alike} of {steps} steps alike in all groups; worst loss {worst:.1e}; {states}")
    print(f"longest seconds without a step: {sorted(waits)[-8:]}, median {statistics.median(waits):.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"kills": 20, "replicas": 3, "seed": 0, "steps": 1500}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=None)
    given = vars(parser.parse_args())
    given["folder"] = given["folder"] or Path(tempfile.mkdtemp())
    attack(**given)
