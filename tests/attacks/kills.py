"""Kill runs as they make, renew and remove the files of their folder, and look at what the next start makes of it:

    python tests/attacks/kills.py [--kills 200] [--seed 0]

Each start is killed (SIGKILL) at a change to a file that is drawn at random; some of them end by an error before. After
every few kills a start is left alone: it must end with the bits of a run that nothing has happened to.
"""

import argparse
import collections
import functools
import json
import random
import signal
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "e2e")]

from runs import Result, numbers, saved, saved_steps, train

from dying import die_at
from torchtitan_graph.checkpoint.folder import find_problem, list_steps

STEPS, IN_A_ROW = 5, 8  # steps of a run; at most so many kills before a start that is left alone
ENDS = 14  # changes to files when a run fails
OPTIONS = ["--compile.mode", "eager", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"]
OPTIONS += ["--training.steps", str(STEPS), "--checkpoint.async_mode"]
LEFT = {"checkpoint", "config.toml", "failures", "metrics.jsonl", "metrics_dropped.jsonl", "status.json"}
KINDS = (*LEFT, "run.lock", "run.reserve", "comm_traces")


def attack(kills: int, seed: int, folder: Path) -> collections.Counter[str]:
    """Kill so many starts. Return how many of them at each kind of file, and how many ended before their kill."""
    rng = random.Random(seed)
    references = {mode: _reference(folder / mode, mode) for mode in ("disabled", "async")}
    counts: collections.Counter[str] = collections.Counter()
    done = chain = 0
    while done < kills:
        chain += 1
        mode, place = rng.choice(["disabled", "async"]), folder / f"chain-{chain}"
        for _ in range(min(rng.randint(1, IN_A_ROW), kills - done)):
            torn, fails = rng.random() < 0.5, rng.random() < 0.25
            # A start makes few files beside those of checkpoints, and one that goes on has less left to do.
            most = ENDS if fails else rng.choice([30, references[mode] // 3, references[mode]])
            number = rng.randint(1, most)
            killed_at = _killed_start(place, mode, number, torn, fails)
            counts[killed_at or "(none: the start ended before)"] += 1
            done += killed_at is not None
        _check_alone(place, mode, folder / mode)
    return counts


def _start(place: Path, mode: str, patch: functools.partial | None) -> Result:
    return train("--job.dump_folder", str(place), *OPTIONS, mode, patch=patch)


def _reference(place: Path, mode: str) -> int:
    """Do a run that nothing happens to; return how many changes to files it makes."""
    log = place.with_name(f"{place.name}.log")
    result = _start(place, mode, functools.partial(_prepare, 0, place, False, log, False))
    assert result.code == 0, result.output
    return len(log.read_text().splitlines())


def _prepare(number: int, place: Path, torn: bool, log: Path, fails: bool) -> None:
    """In the process that trains: let its heart beat fast, and let it die; if it fails, amid what it does then."""
    from torchtitan_graph.errors import UserError
    from torchtitan_graph.run import folder
    from torchtitan_graph.trainer import Trainer

    folder.HEARTBEAT_S = 0.1  # type: ignore[attr-defined]

    def fail(self: Trainer, metrics: object) -> bool:
        die_at(number, place, torn, log)
        raise UserError("injected")

    if fails:
        Trainer.train_step = fail  # type: ignore[method-assign]
    else:
        die_at(number, place, torn, log)


def _killed_start(place: Path, mode: str, number: int, torn: bool, fails: bool) -> str | None:
    """Start a run that is killed; return at what kind of file, or None if it ended before."""
    log = place.with_name(f"{place.name}.log")
    log.unlink(missing_ok=True)
    expected = _resumable(place)
    result = _start(place, mode, functools.partial(_prepare, number, place, torn, log, fails))
    _check_start(result, expected)
    changes = log.read_text().splitlines() if log.exists() else []
    if result.code == -signal.SIGKILL:  # a thread that was about to change another file may not have said so
        event, _, path = changes[min(number, len(changes)) - 1].partition(" ")
        return f"{event.removeprefix('os.')} {_kind(path)}"
    assert result.code == (2 if "injected" in result.output else 0), result.output
    return None


def _kind(path: str) -> str:
    kinds = (kind for kind in KINDS if path.startswith(kind))
    return next(kinds, "a checkpoint that is deleted" if path else "the folder")


def _resumable(place: Path) -> set[int]:
    """Return the steps from which the next start may go on: the newest whole checkpoint's, or that of one which was
    whole but for its name."""
    whole = {step: path for step, path in list_steps(place / "checkpoint").items() if find_problem(path) is None}
    almost = [path for path in (place / "checkpoint").glob("step-*.tmp") if find_problem(path) is None]
    newest = max(whole, default=0)
    return {newest, *(int(path.stem.removeprefix("step-")) for path in almost)}


def _check_start(result: Result, expected: set[int]) -> None:
    """Check what a start says: no traceback, nobody else in the folder, and from where it goes on."""
    assert "Traceback" not in result.output, result.output
    assert "job.dump_folder" not in result.output, result.output
    if "resuming after step " in result.output:
        step = int(result.output.partition("resuming after step ")[2].split()[0])
        assert step in expected and step >= min(expected), (step, expected, result.output)
    elif "step 1/" in result.output:
        assert 0 in expected, (expected, result.output)


def _check_alone(place: Path, mode: str, reference: Path) -> None:
    """Start once more, without a kill, and compare with a run that nothing has happened to."""
    expected = _resumable(place)
    result = _start(place, mode, None)
    assert result.code == 0, result.output
    _check_start(result, expected)
    assert {path.name for path in place.iterdir()} <= LEFT, sorted(place.iterdir())
    assert numbers(place) == numbers(reference)
    assert saved(place, STEPS) == saved(reference, STEPS)
    assert saved_steps(place) == saved_steps(reference)
    assert json.loads((place / "status.json").read_text())["state"] == "finished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in sorted(attack(options.kills, options.seed, Path(folder)).items()):
            print(f"{count:5}  {kind}")


if __name__ == "__main__":
    main()
