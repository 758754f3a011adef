"""Kill ranks, replica groups and the lighthouse of a job at random, and compare what it computed with a run without
replica groups that nothing has happened to:

    python tests/e2e/replica_kills.py [--kills 100] [--layout "FSDP 2"] [--replicas 3] [--seed 0]

Some kills come at a random time, others at a named moment of a step, which a process draws when it starts. A group that
loses a rank is killed whole, as torchrun does, and started again; so is the lighthouse. Each group writes of every step
that counts when it was done, its numbers, and a digest of all its state.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from runs import TINY, Forks, start

EXPERTS = ["--model.name", "my_models.experts"]
LAYOUTS = {
    "1": (1, []),
    "FSDP 2": (2, []),
    "FSDP 2, graph": (2, []),
    "TP 2": (2, ["--parallelism.tensor_parallel_degree", "2"]),
    "PP 2": (2, ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B"]),
    "EP 2": (2, [*EXPERTS, "--parallelism.expert_parallel_degree", "2"]),
}
MOMENTS = ("join", "gather", "train", "sum", "commit", "clip", "give", "recv_checkpoint", "_write")
BASE = ["--training.mixed_precision_param", "float32", "--training.local_batch_size", "2", "--training.seq_len", "32"]
BASE += ["--validation.no-enable", "--checkpoint.interval", "10", "--checkpoint.async_mode", "async"]
BASE += ["--checkpoint.keep_latest_k", "3", "--checkpoint.no-last_save_model_only"]
LOG = "steps.jsonl"
SAME_S = 300.0  # without a new step the run hangs


class Death(NamedTuple):
    """A moment at which a rank kills itself: before the `nth` call of a function, on one rank."""

    moment: str
    nth: int
    rank: int


def patch(pace: float, death: Death | None) -> None:
    """In a rank of a run: wait in each step, write what it computed, and die at a moment."""
    import torch

    from torchtitan_graph.capture.state import local_part
    from torchtitan_graph.checkpoint import tensors_of
    from torchtitan_graph.checkpoint.save import Saver
    from torchtitan_graph.config.job import run_folder
    from torchtitan_graph.replicas.replicas import Replicas
    from torchtitan_graph.replicas.transport import Transport
    from torchtitan_graph.run import folder
    from torchtitan_graph.steps import EagerUpdate, Steps
    from torchtitan_graph.trainer import Trainer

    folder.HEARTBEAT_S = 1  # type: ignore[attr-defined]
    train_step, rank = Trainer.train_step, int(os.environ.get("RANK", "0"))

    def step_and_tell(self: Trainer, metrics: Any) -> bool:
        trained = train_step(self, metrics)
        if trained:
            sums = hashlib.sha256()
            for name, x in sorted(tensors_of(self.model, self.optimizer).items()):
                sums.update(
                    name.encode() + local_part(x).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
            record = {"step": self.step, "t": time.time(), "digest": sums.hexdigest()[:16], "loss": metrics.loss}
            record["pid"] = os.getpid()
            record |= {"tokens": self.tokens_seen, "rows": self.train_data.state_dict()["rows"]}
            record["living"] = len(self.replicas.living) if self.replicas else 0
            with (run_folder(self.config) / f"{LOG}.{rank}").open("a") as file:
                file.write(json.dumps(record) + "\n")
        return trained

    Trainer.train_step = step_and_tell  # type: ignore[method-assign]
    train = Steps.train

    def train_slowly(*given: Any) -> Any:
        time.sleep(pace)
        return train(*given)

    Steps.train = train_slowly  # type: ignore[method-assign]
    if death is None or death.rank != rank:
        return
    holders = (Replicas, Steps, EagerUpdate, Transport, Saver)
    holder = next(cls for cls in holders if hasattr(cls, death.moment)) if death.moment != "give" else Trainer
    name = "_own_state" if death.moment == "give" else death.moment
    function, calls = getattr(holder, name), iter(range(death.nth))

    def die_or_go_on(*given: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    setattr(holder, name, die_or_go_on)


def _lighthouse(words: list[str]) -> int:
    from torchtitan_graph.launch.lighthouse import main

    return main(words)


def drawn_death(rng: random.Random, ranks: int) -> Death:
    moment = rng.choice(MOMENTS)
    nth = rng.randint(0, 3) if moment in ("give", "recv_checkpoint", "_write") else rng.randint(1, 40)
    return Death(moment, nth, rng.randrange(ranks))


class Storm:
    """A job of replica groups, some of whose processes are killed."""

    timeout_s = 40  # of a message between replicas

    def __init__(
        self,
        folder: Path,
        layout: str,
        replicas: int,
        steps: int,
        pace: float,
        rng: random.Random,
        draw: Callable[[int], Death | None] = lambda _: None,
    ) -> None:
        """Start the job. `draw` gives the moment of death of a group's ranks, each time it starts."""
        self.folder, self.rng, self.pace, self.draw = folder, rng, pace, draw
        self.is_through = False  # whether nothing more is to die
        self.ranks, options = LAYOUTS[layout]
        self.has_stages = layout == "PP 2"  # whose ranks are the outermost of the mesh
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.options = [*BASE, *options, "--training.steps", str(steps), *rows(layout, replicas, self.ranks)]
        self.options += ["--job.dump_folder", str(folder), *mode(layout), "--fault_tolerance.enable"]
        self.options += ["--fault_tolerance.replicas", str(replicas), "--fault_tolerance.lighthouse", address]
        self.options += ["--fault_tolerance.heartbeat_timeout_seconds", "2"]
        self.options += ["--fault_tolerance.timeout_seconds", str(self.timeout_s)]
        self.lighthouse = self._start_lighthouse()
        self.codes: dict[int, list[int]] = {number: [] for number in range(replicas)}
        self.deaths: list[tuple[float, str]] = []
        self.drawn: dict[int, Death | None] = {}
        self.groups = {number: self._start(number) for number in range(replicas)}

    def _start_lighthouse(self) -> Forks:
        run = Forks("--job.config_file", TINY, *self.options)
        run.fork(_lighthouse, None, {})
        return run

    def _start(self, number: int) -> Forks:
        death = self.drawn[number] = None if self.is_through else self.draw(number)
        words = [*self.options, "--fault_tolerance.replica", str(number)]
        return start(*words, ranks=self.ranks, patch=functools.partial(patch, self.pace, death))

    def kill(self) -> None:
        """Kill something that runs: a rank, a group, all ranks of the job, or the lighthouse."""
        what = self.rng.choice(
            ["rank"] * 4 + ["group"] * 3 + ["lighthouse"] + ["two groups"] + ["all"] * (not self.rng.randrange(4))
        )
        running = [number for number, group in self.groups.items() if any(p.is_alive() for p in group.processes)]
        if not running:
            return
        self.deaths.append((time.time(), what))
        if what == "lighthouse":
            self.lighthouse.kill()
        elif what == "rank":
            self.rng.choice(self.groups[self.rng.choice(running)].processes).kill()
        else:
            number = {"group": 1, "two groups": 2, "all": len(running)}[what]
            for each in self.rng.sample(running, min(number, len(running))):
                self.groups[each].kill()

    def run(self, kills: int, every_s: float) -> None:
        """Run to the end, with so many kills on the way, from the first step on; ranks that have a moment of death may
        die before."""
        left, next_kill, moved, reached = kills, 0.0, time.monotonic(), 0
        while True:
            time.sleep(0.1)
            if not any(p.is_alive() for p in self.lighthouse.processes):
                time.sleep(self.rng.random() * 2)
                self.lighthouse.close()
                self.lighthouse = self._start_lighthouse()
            for number, group in list(self.groups.items()):
                codes = [process.exitcode for process in group.processes]
                if any(codes) or (None not in codes and codes[0] != 0):
                    if not all(code in (None, 0, -signal.SIGKILL) for code in codes):
                        self.codes[number].append(next(c for c in codes if c not in (None, 0, -signal.SIGKILL)))
                    if len(self.deaths) < kills and (-signal.SIGKILL in codes) and self._own_death(number, codes):
                        self.deaths.append((time.time(), f"moment {self.drawn[number].moment}"))
                    group.kill()
                    self._keep_output(number)
                    self.is_through |= len(self.deaths) >= kills > 0
                    self.groups[number] = self._start(number)
            if all(p.exitcode == 0 for group in self.groups.values() for p in group.processes):
                break
            if any(all(p.exitcode == 0 for p in group.processes) for group in self.groups.values()):
                self.is_through = True
            if left > 0 and reached and not self.is_through and time.monotonic() > next_kill:
                self.kill()
                left -= 1
                next_kill = time.monotonic() + every_s * 2 * self.rng.random()
            step = max((max(found, default=0) for found in map(self.steps, self.groups)), default=0)
            if step > reached:
                reached, moved = step, time.monotonic()
            if time.monotonic() > moved + SAME_S:
                raise TimeoutError(f"no step after {reached}")
        self.close()

    def close(self) -> None:
        """Kill what runs still, and keep what it printed."""
        for number, group in self.groups.items():
            group.kill()
            self._keep_output(number)
        self.lighthouse.kill()
        self.lighthouse.close()

    def _keep_output(self, number: int) -> None:
        with (self.folder / f"output.{number}").open("a") as file:
            file.write(self.groups[number].output())
        self.groups[number].close()

    def _own_death(self, number: int, codes: list[int | None]) -> bool:
        death = self.drawn.get(number)
        return death is not None and codes[death.rank] == -signal.SIGKILL

    def steps(self, number: int, rank: int = 0) -> dict[int, dict[str, Any]]:
        """Return what a group's rank wrote of each step; of one that it did twice, the last."""
        return read(self.folder / f"replica_{number}", rank)


def read_all(folder: Path, rank: int) -> Iterator[dict[str, Any]]:
    path = folder / f"{LOG}.{rank}"
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # cut by a kill
            yield json.loads(line)


def read(folder: Path, rank: int) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in read_all(folder, rank)}


def mode(layout: str) -> list[str]:
    """Return the options of how steps run: a pipeline needs graphs."""
    return ["--compile.mode", "graph" if layout in ("PP 2", "FSDP 2, graph") else "eager"]


def rows(layout: str, replicas: int, ranks: int) -> list[str]:
    """Return the options of the rows of a step: two microbatches a replica in a pipeline, else one."""
    groups_of_rows = replicas * (ranks if layout in ("FSDP 2", "FSDP 2, graph", "EP 2") else 1)
    pipeline = ["--parallelism.pipeline_parallel_microbatch_size", "1"] if layout == "PP 2" else []
    return ["--training.global_batch_size", str(2 * groups_of_rows), *pipeline]


def reference(folder: Path, layout: str, replicas: int, steps: int) -> list[dict[int, dict[str, Any]]]:
    """Do the run without replica groups, by HSDP; return each rank's steps."""
    ranks, options = LAYOUTS[layout]
    words = [*BASE, *options, *rows(layout, replicas, ranks), "--training.steps", str(steps), *mode(layout)]
    words += ["--job.dump_folder", str(folder), "--parallelism.data_parallel_replicate_degree", str(replicas)]
    result = start(*words, ranks=ranks * replicas, patch=functools.partial(patch, 0.0, None)).finish()
    assert result.code == 0, result.output
    return [read(folder, rank) for rank in range(ranks * replicas)]


def compare(storm: Storm, hsdp: list[dict[int, dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Check that every step was done, that all replicas have the same bits, and how far they are from HSDP's."""
    found: dict[str, Any] = collections.Counter()
    worst = 0.0
    every = {number: [storm.steps(number, rank) for rank in range(storm.ranks)] for number in storm.groups}
    done = set().union(*(each[0] for each in every.values()))
    assert done == set(range(1, steps + 1)), f"steps {sorted(set(range(1, steps + 1)) - done)} are missing"
    for rank in range(storm.ranks):
        records = [record for each in every.values() for record in each[rank].values()]
        parted: dict[int, int] = {}  # the step that a process did apart from the others
        for step in range(1, steps + 1):
            here = [each[rank][step] for each in every.values() if step in each[rank]]
            # Of a job that lost all groups, and went back to a checkpoint: what was done before is done anew.
            here = [one for one in here if not any(x["step"] <= step and x["t"] > one["t"] + 1.5 for x in records)]
            if not here:
                continue  # the last rank that did it was killed before it wrote
            found["rank-steps"] += len(here)
            found["equal among replicas"] += len(here) * (len({record["digest"] for record in here}) == 1)
            # A group may have done a step that the others lost it in; it then dies, or heals.
            digests = collections.Counter(record["digest"] for record in here)
            apart = {record["pid"] for record in here if record["digest"] != digests.most_common(1)[0][0]}
            assert not any(parted.get(pid) == step - 1 for pid in apart), f"replicas go on apart in step {step}"
            parted = dict.fromkeys(apart, step)
            theirs = hsdp[rank * len(storm.groups) if storm.has_stages else rank][step]
            found["equal to HSDP"] += sum(record["digest"] == theirs["digest"] for record in here)
            for record in here:
                assert record["tokens"] == theirs["tokens"], (step, record, theirs)
                assert record["rows"] == theirs["rows"], (step, record, theirs)
                worst = max(worst, abs(record["loss"] / theirs["loss"] - 1))
        last = [each[rank][steps]["digest"] for each in every.values() if steps in each[rank]]
        found["equal at the end"] += len(set(last)) == 1
    return {**found, "worst loss": worst}


def delays(storm: Storm) -> list[tuple[float, str, bool]]:
    """Return for each kill the longest time, from it on, without a step of any group, its kind, and whether a process
    lived through that time. It counts for a kill if it begins before the next one, and within 15 s. Kills before the
    first step, or after the last, have none."""
    records = [record for number in storm.groups for record in read_all(storm.folder / f"replica_{number}", 0)]
    times = sorted(record["t"] for record in records)

    def outlived(a: float, b: float) -> bool:
        before, after = ({x["pid"] for x in records if x["t"] <= a}, {x["pid"] for x in records if x["t"] >= b})
        return not before.isdisjoint(after)

    found = []
    for (at, kind), then in zip(storm.deaths, [*storm.deaths[1:], (math.inf, "")], strict=True):
        gaps = [(b - max(a, at), a, b) for a, b in itertools.pairwise(times) if b > at and a < min(at + 15, then[0])]
        if gaps and at > times[0]:
            seconds, a, b = max(gaps)
            found.append((seconds, kind, outlived(a, b)))
    return found


def attack(
    kills: int, layout: str, replicas: int, seed: int, folder: Path, per_run: int, steps: int, pace: float
) -> None:
    rng = random.Random(seed)
    hsdp = reference(folder / "hsdp", layout, replicas, steps)
    total: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    waits: list[tuple[float, str, bool]] = []
    worst, number = 0.0, 0

    def draw(_: int) -> Death | None:
        return drawn_death(rng, LAYOUTS[layout][0]) if rng.random() < 0.4 else None

    while sum(kinds.values()) < kills or not number:
        number += 1
        place = folder / f"run-{number}"
        storm = Storm(place, layout, replicas, steps, rng.choice([0.0, pace]), rng, draw=draw)
        try:
            storm.run(min(per_run, kills - sum(kinds.values())), every_s=4.0)
            found = compare(storm, hsdp, steps)
        except BaseException:
            storm.close()
            print(f"run {number}: {place}", flush=True)
            raise
        worst = max(worst, found.pop("worst loss"))
        total.update(found)
        kinds.update(what for _, what in storm.deaths)
        waits += delays(storm)
        others = {n: codes for n, codes in storm.codes.items() if codes}
        print(f"run {number}: {len(storm.deaths)} kills, {found}, other exit codes {others}", flush=True)
        if not others:
            shutil.rmtree(place)
    print(f"{layout}, {replicas} replicas: {dict(kinds)}; {dict(total)}; worst loss {worst:.1e}")
    for what, has_lived in (("a group lived", True), ("none lived, the job starts again", False)):
        these = sorted((seconds, kind) for seconds, kind, lived in waits if lived == has_lived)
        if len(these) > 2:
            tenths = statistics.quantiles([seconds for seconds, _ in these], n=10)
            print(
                f"seconds without a step after {len(these)} kills through which {what}: median {tenths[4]:.1f}, ",
                end="",
            )
            print(f"90 % {tenths[8]:.1f}, most {these[-1][0]:.1f}; the longest: {these[-6:]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {
        "kills": 20,
        "layout": "FSDP 2",
        "replicas": 3,
        "seed": 0,
        "per_run": 8,
        "steps": 200,
    }.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--pace", type=float, default=0.15)
    parser.add_argument("--folder", type=Path, default=None)
    given = vars(parser.parse_args())
    given["folder"] = given["folder"] or Path(tempfile.mkdtemp())
    attack(**given)
