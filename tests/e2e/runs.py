"""Start training as users do, in processes of its own, and read what a run wrote."""

import datetime
import hashlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sockets import listening
from torchtitan_graph.parallel.join import LOOPBACK, host_store

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
OWN = [str(HERE), str(REPOSITORY / "examples")]  # where a user's modules are found
TINY = str(HERE / "tiny.toml")
PATCHED_TRAIN = str(HERE / "patched_train.py")
EAGER = ["--compile.mode", "eager"]  # starts in a third of the time, and computes and saves the same bits
TIMEOUT_S = 250  # a run takes seconds; a busy machine takes longer

# Forks processes that have imported everything already, from a clean one: much cheaper than starting Python anew.
_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["torchtitan_graph.train", "torch._dynamo"])  # a trace imports the second


class Result(NamedTuple):
    """How a process ended (a negative code is the signal that killed it), and what it printed on both streams."""

    code: int
    output: str


def train(*options: str, ranks: int = 1, patch: Callable[[], None] | None = None, **env: str) -> Result:
    """Train with `tiny.toml` and these options, each rank a forked process."""
    return start(*options, ranks=ranks, patch=patch, **env).finish()


def start(*options: str, ranks: int = 1, patch: Callable[[], None] | None = None, **env: str) -> "Forks":
    """Start what `train` waits for.

    No launcher is about: all ranks print to one stream. And forks order their sets alike; ranks of their own, which
    must agree though they don't, are those of `torchrun`, run_train.sh and the pool.
    """
    return _on_ranks(Forks("--job.config_file", TINY, *options), _train, patch, ranks, env)


def evaluate(*words: str, ranks: int = 1) -> Result:
    """Run python -m torchtitan_graph.evaluate with these words, each rank a forked process."""
    return _on_ranks(Forks(*words), _evaluate, None, ranks, {}).finish()


def _on_ranks(
    run: "Forks", work: Callable[[list[str]], Any], patch: Callable[[], None] | None, ranks: int, env: dict[str, str]
) -> "Forks":
    if ranks > 1:  # this process hosts the store, as a launcher does
        run.store = host_store(datetime.timedelta(seconds=TIMEOUT_S))
        env = {"MASTER_PORT": str(run.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"} | env
        env = {"MASTER_ADDR": LOOPBACK, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)} | env
    for rank in range(ranks):
        run.fork(work, patch, {"RANK": str(rank), "LOCAL_RANK": str(rank), **env} if ranks > 1 else env)
    return run


def generate(*arguments: str, ranks: int = 1) -> Result:
    """Generate texts with these arguments, each rank a forked process."""
    return _on_ranks(Forks(*arguments), _generate, None, ranks, {}).finish()


def precompile(*options: str, ranks: int) -> Result:
    """Precompile `tiny.toml` with these options for so many ranks, in a forked process."""
    run = Forks("--job.config_file", TINY, *options)
    run.fork(_precompile, None, {"NGPU": str(ranks)})
    return run.finish()


def run_script(name: str, *arguments: str) -> Result:
    """Run a file of scripts/, or a command of the package, in a forked process."""
    folder = "scripts" if (REPOSITORY / "scripts" / name).is_file() else "torchtitan_graph"
    run = Forks(str(REPOSITORY / folder / name), *arguments)
    run.fork(_script, None, {})
    return run.finish()


class Forks:
    """Forked processes that run with these words, and print to one file."""

    store: Any = None  # kept for as long as they run

    def __init__(self, *words: str) -> None:
        self.words = list(words)
        self.processes: list[Any] = []
        self._output = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115  (as long as this object)

    def fork(self, work: Callable[[list[str]], Any], patch: Callable[[], None] | None, env: dict[str, str]) -> None:
        arguments = (work, self.words, patch, self._output.name, {**_environment(), **env})
        self.processes.append(_fork.Process(target=_in_fork, args=arguments))
        self.processes[-1].start()

    def finish(self) -> Result:
        """Wait for the end. The first to fail gives its code and, as a launcher does, ends the others."""
        waiting, code = {process.sentinel: process for process in self.processes}, 0
        deadline = time.monotonic() + TIMEOUT_S
        while waiting and (ended := wait(list(waiting), deadline - time.monotonic())):
            for process in [waiting.pop(sentinel) for sentinel in ended]:
                process.join()
                if process.exitcode and not code:
                    code = process.exitcode
                    for other in waiting.values():
                        other.terminate()
        if waiting:
            self.kill()
            raise TimeoutError(f"{self.words} is not done after {TIMEOUT_S} s:\n{self.output()}")
        return Result(code, self.output())

    def wait_for(self, path: Path) -> None:
        """Wait until there is a file at `path`."""
        _wait_for(path, lambda: all(process.is_alive() for process in self.processes), self.output)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Forget what was printed."""
        self._output.close()

    def output(self) -> str:
        return Path(self._output.name).read_text(errors="replace")


def _wait_for(path: Path, is_alive: Callable[[], bool], output: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert is_alive(), f"no {path} was made:\n{output()}"
        assert time.monotonic() < deadline, f"no {path} was made in {TIMEOUT_S} s:\n{output()}"
        time.sleep(0.05)


def _in_fork(
    work: Callable[[list[str]], Any], words: list[str], patch: Callable[[], None] | None, output: str, env: dict
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.path[:0] = OWN
    if patch is not None:
        patch()
    sys.exit(work(words))


def _train(words: list[str]) -> int:
    from torchtitan_graph import stop
    from torchtitan_graph.train import main

    stop.START = time.time()  # not when the process that was forked began
    return main(words)


def _evaluate(words: list[str]) -> int:
    from torchtitan_graph.evaluate.__main__ import main

    return main(words)


def _precompile(words: list[str]) -> int:
    from torchtitan_graph.precompile import main

    return main(words)


def _generate(words: list[str]) -> int:
    from torchtitan_graph.generate.__main__ import main

    return main(words)


def _script(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as Python itself does
    runpy.run_path(words[0], run_name="__main__")


class Command:
    """A command that runs, with its output in a file, or where the descriptor `output` leads."""

    def __init__(self, *words: str, cwd: Path | None = None, output: int | None = None, **env: str) -> None:
        self.words = words
        self._output = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115  (as long as this object)
        with open(self._output.name, "w") as file:
            self.process = subprocess.Popen(
                words, cwd=cwd, env={**_environment(), **env}, stdout=output or file, stderr=subprocess.STDOUT
            )

    def finish(self, timeout_s: float = TIMEOUT_S) -> Result:
        """Wait for the end."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun passes it on to its ranks
            raise TimeoutError(f"{self.words} is not done after {timeout_s} s:\n{self.output()}") from None
        return Result(code, self.output())

    def wait_for(self, path: Path) -> None:
        """Wait until there is a file at `path`."""
        _wait_for(path, lambda: self.process.poll() is None, self.output)

    def finish_watched(self) -> tuple[Result, set[str]]:
        """Wait for the end. Return also the addresses on which it, or a process that it started, took connections."""
        addresses: set[str] = set()
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            addresses |= listening(self.process.pid)
            time.sleep(0.2)
        return self.finish(timeout_s=1), addresses

    def output(self) -> str:
        return Path(self._output.name).read_text(errors="replace")


def torchrun(num_ranks: int, *options: str, patch: str | None = None, **env: str) -> Command:
    """Start `tiny.toml` with these options under torchrun."""
    what = ["-m", "torchtitan_graph.train"] if patch is None else [PATCHED_TRAIN, patch]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--rdzv_backend"]
    launch += ["c10d", "--rdzv_conf", "store_type=file", "--local_addr", "127.0.0.1"]
    return Command(*launch, *what, "--job.config_file", TINY, *options, **env)


def _environment() -> dict[str, str]:
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NGPU", "CONFIG_FILE", "COMM_MODE")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return inherited | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*OWN, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # on any machine the same numbers; tests/gpu is for the others
    }


def records(folder: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> dict[int, tuple[float, ...]]:
    """Give loss, gradient norm, learning rate and tokens of every step: all that a run computes and logs."""
    keys = ("loss", "grad_norm", "lr", "tokens_seen")
    return {record["step"]: tuple(record[key] for key in keys) for record in records(folder) if "loss" in record}


def digest(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], str]:
    """Say what a tensor holds, to the bit, in few characters: pytest takes minutes to print how megabytes differ."""
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()


def saved(folder: Path, step: int) -> dict[str, Any]:
    """Read the checkpoint of a step, every tensor as its digest, so that equal means bitwise equal."""
    path = folder / "checkpoint" / f"step-{step}"
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(path, file.name)
        tensors = torch.load(file.name, weights_only=True)
    state = json.loads((path / "train_state.json").read_text())
    return {name: digest(tensor) for name, tensor in tensors.items()} | state


def saved_steps(folder: Path) -> list[int]:
    """List the steps whose checkpoints are there; anything else in the folder, but the best's record, is an error."""
    found = [path.name for path in (folder / "checkpoint").iterdir() if path.name != "best.json"]
    return sorted(int(name.removeprefix("step-")) for name in found)
