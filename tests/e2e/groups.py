"""Run the replica groups of a job, each in forked processes, with their lighthouse."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runs import TINY, Forks, Result, start

FAST = ["--fault_tolerance.heartbeat_timeout_seconds", "1", "--fault_tolerance.timeout_seconds", "10"]


class Groups:
    """Replica groups of a job in `folder`, which share a lighthouse."""

    def __init__(self, folder: Path, *options: str, ranks: int = 1, number: int = 2) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.lighthouse = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.folder, self._ranks = folder, ranks
        self._options = [*FAST, *options, "--job.dump_folder", str(folder), "--fault_tolerance.enable"]
        self._options += ["--fault_tolerance.replicas", str(number), "--fault_tolerance.lighthouse", self.lighthouse]
        self._lighthouse = Forks("--job.config_file", TINY, *self._options)
        self._lighthouse.fork(_serve, None, {})
        self.running: dict[int, Forks] = {}

    def start(self, *numbers: int, patch: Callable[[], None] | None = None, options: tuple[str, ...] = ()) -> None:
        for number in numbers:
            words = [*self._options, "--fault_tolerance.replica", str(number), *options]
            if number in self.running:
                self.running[number].close()
            self.running[number] = start(*words, ranks=self._ranks, patch=patch)

    def finish(self) -> dict[int, Result]:
        """Wait for all groups that run; all have to end well."""
        results = {number: group.finish() for number, group in self.running.items()}
        for result in results.values():
            assert result.code == 0, result.output
        return results

    def kill(self) -> None:
        for run in (*self.running.values(), self._lighthouse):
            run.kill()
            run.close()


@contextmanager
def groups(folder: Path, *options: str, ranks: int = 1, number: int = 2) -> Iterator[Groups]:
    """Yield groups that are to be started; at the end, kill what still runs."""
    made = Groups(folder, *options, ranks=ranks, number=number)
    try:
        yield made
    finally:
        made.kill()


def _serve(words: list[str]) -> int:
    from torchtitan_graph.launch.lighthouse import main

    return main(words)
