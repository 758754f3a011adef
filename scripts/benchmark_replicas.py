"""Compare a step of two replica groups with one of HSDP on the same two ranks:

    python scripts/benchmark_replicas.py
    python scripts/benchmark_replicas.py --turns 8 --training.global_batch_size 16      four microbatches a rank
    sudo python scripts/benchmark_replicas.py --mbit 500        each rank behind a link of a limited rate

What else is on the line are options of the run (default: those of llama3_debug.toml, a microbatch a rank). The cases
run alongside each other, and take turns of several steps: the others are stopped meanwhile (SIGSTOP). Figures are
medians over steps but each turn's first two; ratios are medians of the ratios of neighbouring turns. `late` are replica
groups that begin to sum gradients after the graph, not while it runs. Processor seconds are those of all processes, a
step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure_slow_links import SUBNET, two_machines

from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.errors import UserError

CONFIG = Path(__file__).parents[1] / "train_configs" / "llama3_debug.toml"
FIXED = ["--metrics.log_freq", "1", "--validation.no-enable", "--checkpoint.no-enable", "--training.steps", "1000000"]
FIXED += ["--training.global_batch_size", "4", "--training.local_batch_size", "2", "--comm.train_timeout_seconds"]
FIXED += ["10000"]
GROUPS = ["--fault_tolerance.enable", "--fault_tolerance.replicas", "2"]
for _name in ("heartbeat_timeout", "timeout", "join_timeout"):  # a case that is stopped has lost nobody
    GROUPS += [f"--fault_tolerance.{_name}_seconds", "10000"]
TRAIN = "from torchtitan_graph.train import main; raise SystemExit(main())"
LATE = "import contextlib as c; from torchtitan_graph import replica_trainer as r; "
LATE += "r.taking = lambda *_: c.nullcontext(); "
START_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")


class Case:
    """Two ranks of a job, and what belongs to it; stopped but in its turns."""

    def __init__(self, name: str, folder: Path, options: Sequence[str], machines: Sequence[str]) -> None:
        self.name, self.records = name, folder / name / "metrics.jsonl"
        self.seconds: list[float] = []  # of a step, in each turn
        self.processor: list[float] = []
        self._output, self._machines = folder / f"{name}.log", machines
        self._processes: list[subprocess.Popen[bytes]] = []
        host = f"{SUBNET}.1" if machines else "127.0.0.1"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = ["--job.config_file", str(CONFIG), *FIXED, *options, "--job.dump_folder", str(folder / name)]
        if name == "hsdp":
            words += ["--parallelism.data_parallel_replicate_degree", "2"]
            for rank in range(2):
                place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
                self._start(rank, TRAIN, words, place | {"MASTER_ADDR": host, "MASTER_PORT": str(port)})
            return
        self.records = folder / name / "replica_0" / "metrics.jsonl"
        words += [*GROUPS, "--fault_tolerance.lighthouse", f"http://{host}:{port}"]
        self._start(0, "from torchtitan_graph.launch.lighthouse import main; raise SystemExit(main())", words, {})
        for group in range(2):
            own = ["--fault_tolerance.replica", str(group)]
            self._start(group, LATE * (name == "late") + TRAIN, [*words, *own], {})

    def _start(self, machine: int, code: str, words: Sequence[str], env: dict[str, str]) -> None:
        inside = ["ip", "netns", "exec", self._machines[machine]] if self._machines else []
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}
        if self._machines:
            env["GLOO_SOCKET_IFNAME"] = f"slow{machine}"
        with self._output.open("ab") as output:
            started = [*inside, sys.executable, "-c", code, *words]
            self._processes.append(
                subprocess.Popen(started, env=env, stdout=output, stderr=output, start_new_session=True)
            )

    def signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def steps(self) -> list[float]:
        """Return the seconds of each step so far."""
        if any(process.poll() is not None for process in self._processes):
            raise UserError(f"{self.name} has ended:\n{self._output.read_text(errors='replace')[-3000:]}")
        try:
            lines = self.records.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line)["step_time_s"] for line in lines if line.endswith("}") and "step_time_s" in line]

    def wait_for(self, number: int) -> None:
        deadline = time.monotonic() + START_S
        while len(self.steps()) < number:
            if time.monotonic() > deadline:
                raise UserError(f"{self.name} does no step; its output is in {self._output}")
            time.sleep(0.01)

    def _used(self) -> float:
        """Return the processor seconds that all processes have used."""
        used = (Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split() for process in self._processes)
        return sum(int(words[11]) + int(words[12]) for words in used) / TICKS

    def take_turn(self, steps: int) -> None:
        self.signal(signal.SIGCONT)
        first = len(self.steps()) + 2  # the first was stopped in its middle
        self.wait_for(first)
        used, begun = self._used(), len(self.steps())
        self.wait_for(first + steps)
        used, done = self._used() - used, self.steps()
        self.signal(signal.SIGSTOP)
        self.seconds.append(statistics.median(done[first : first + steps]))
        self.processor.append(used / (len(done) - begun))

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


@command
def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=6, help="of each case (default 6)")
    parser.add_argument("--steps", type=int, default=8, help="in a turn (default 8)")
    parser.add_argument("--mbit", type=float, help="rate of each rank's link in Mbit/s; needs root, ip and tc")
    given, options = parser.parse_known_args(argv)
    for name in ("turns", "steps"):
        if getattr(given, name) < 1:
            raise UserError(f"--{name} {getattr(given, name)}: must be a number of at least 1")
    if given.mbit is not None and not given.mbit > 0:
        raise UserError(f"--mbit {given.mbit:g}: must be a rate above 0, in Mbit/s")
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        machines = ending.enter_context(two_machines(given.mbit)) if given.mbit else []
        cases = []
        for name in ("hsdp", "replicas", "late"):
            cases.append(Case(name, folder, options, machines))
            ending.callback(cases[-1].close)
            cases[-1].wait_for(3)
            cases[-1].signal(signal.SIGSTOP)
        for turn in range(given.turns):
            for case in cases:
                case.take_turn(given.steps)
            print(f"turn {turn + 1}: {', '.join(f'{c.name} {c.seconds[-1] * 1e3:.0f} ms' for c in cases)}", flush=True)
    hsdp = cases[0]
    for case in cases:
        ratio = statistics.median(a / b for a, b in zip(case.seconds, hsdp.seconds, strict=True))
        used = statistics.median(a / b for a, b in zip(case.processor, hsdp.processor, strict=True))
        print(
            f"{case.name:9} {statistics.median(case.seconds) * 1e3:7.1f} ms {ratio:6.3f}   "
            f"processors {statistics.median(case.processor) * 1e3:7.1f} ms {used:6.3f}"
        )
    return 0


if __name__ == "__main__":
    run_command(main)
