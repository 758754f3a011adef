"""Restarts of a SLURM job: the decisions before and after multinode_trainer.slurm trains.

    python -m torchtitan_graph.launch.requeue begin|end|stopped [--table.key value ...]

`stopped` is the end of an attempt that got a signal to stop. The run's status and failures decide, never an exit code.
The history of the job's attempts is in `requeue.json` in the run's folder.

The script does what is decided, which the last line on stdout says: `train FOLDER`, `requeue [NODES TO EXCLUDE]`,
`finished` or `stop`. SLURM's commands are not called here, for a container has none: the script passes what they say in
JOB_NODES (the job's nodes), DOWN_NODES (the cluster's nodes that are down) and JOB (`scontrol --oneliner show job`).
"""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple, TypedDict

from torchtitan_graph.config import load, run_folder
from torchtitan_graph.errors import UserError, printable
from torchtitan_graph.patience import find_full_disk
from torchtitan_graph.run.failure import BAD_NODE, CONFIGURATION, FAULT, FINAL, STORAGE_UNAVAILABLE, read_failures
from torchtitan_graph.run.files import read_record, write_json
from torchtitan_graph.run.lock import is_held_by_another
from torchtitan_graph.run.status import FINISHED, STOPPED, read_status
from torchtitan_graph.small_files import Count, write_text
from torchtitan_graph.transient import is_transient

MAX_FRUITLESS = 3  # attempts in a row without progress: then the job stops
MAX_NODE_FAILURES = 2  # of one node in one job: then the job excludes the node
NAME = "requeue.json"
VARIABLES = ("SLURM_JOB_ID", "JOB_NODES", "DOWN_NODES", "JOB")  # which the script sets


class Attempt(TypedDict):
    """An attempt of a job: its restart number, first step and nodes, how it ended, and its bad nodes."""

    restart: int
    begins_at: Count
    nodes: list[str]
    end: str | None
    bad_nodes: list[str]


class History(TypedDict):
    """The attempts of a job, as in requeue.json."""

    job_id: str
    attempts: list[Attempt]


class Decision(NamedTuple):
    """The decision whether to go on, why, and without which nodes."""

    again: bool
    why: str
    exclude: list[str]


def begin_attempt(folder: Path, job_id: str, restart: int, nodes: list[str], down: list[str]) -> Decision:
    """Record that an attempt begins on `nodes`, and decide whether it should.

    A previous attempt without an end was ended by SLURM, which had lost a node: one of those that are `down`.
    """
    if is_held_by_another(folder, job_id):
        return Decision(False, f"another run has {folder}", [])
    attempts = _attempts(folder, job_id)
    if attempts and attempts[-1]["end"] is None:
        attempts[-1]["end"] = "SLURM lost a node"
        attempts[-1]["bad_nodes"] = [node for node in attempts[-1]["nodes"] if node in down]
    status = read_status(folder)
    begins_at = status["step"] if status else 0
    attempts.append({"restart": restart, "begins_at": begins_at, "nodes": nodes, "end": None, "bad_nodes": []})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / NAME, json.dumps({"job_id": job_id, "attempts": attempts}, indent=1) + "\n")
    except OSError as error:
        if is_transient(error):
            raise
        hint = "; if the container does not show it, add it to CONTAINER_MOUNTS" if os.environ.get("CONTAINER") else ""
        return Decision(False, f"{folder} can't be written: {find_full_disk(folder, str(error)) or error}{hint}", [])
    return _limit(attempts, [], f"attempt {restart + 1} on {', '.join(nodes)}")


def end_attempt(folder: Path, job_id: str, restart: int, down: list[str], got_signal: bool = False) -> Decision:
    """Record how an attempt ended, and decide whether another follows."""
    attempts = _attempts(folder, job_id)
    if not attempts:  # the record of its beginning is lost
        attempts = [{"restart": restart, "begins_at": 0, "nodes": [], "end": None, "bad_nodes": []}]
    attempt = attempts[-1]
    status, failures = read_status(folder), read_failures(folder)
    mine = status if status and status["job_id"] == job_id and status["attempt"][0] == restart else None
    state = mine["state"] if mine else None
    codes = {failure["code"] for failure in failures}
    attempt["bad_nodes"] = [node for node in attempt["nodes"] if node in down]
    again = False
    if state == FINISHED:
        why = "the run is finished"
    elif mine and state == STOPPED:
        again, why = True, f"stopped by {mine['reason']}"
    elif STORAGE_UNAVAILABLE in codes:
        again, why = True, "storage was unavailable"
    elif codes.intersection(FINAL):
        why = "it would fail in the same way again"
    elif FAULT in codes and not failures[0]["lost_peer"]:
        why = "an error that is not a node's"
    elif got_signal and not failures:
        again, why = True, f"stopped by a signal before it {'had saved' if mine else 'trained'}"
    else:
        again, why = True, "a node failed the preflight" if failures and not mine else "a process or a node was lost"
        attempt["bad_nodes"] += [failure["host"] for failure in failures if failure["code"] == BAD_NODE]
    attempt["end"] = why
    try:
        write_json(folder / NAME, {"job_id": job_id, "attempts": attempts})
    except OSError as error:
        if is_transient(error):
            raise
        print(f"requeue: {folder / NAME} can't be written: {error}", file=sys.stderr)
    return _limit(attempts, [status["step"] if status else 0], why) if again else Decision(False, why, [])


def _attempts(folder: Path, job_id: str) -> list[Attempt]:
    """Return the recorded attempts of a job."""
    history = read_record(folder / NAME, History)
    return history["attempts"] if history and history["job_id"] == job_id else []


def _limit(attempts: list[Attempt], ends_at: list[int], why: str) -> Decision:
    """Return the decision to go on, unless the last attempts made no progress; exclude nodes that failed repeatedly.

    An attempt ended where the next one begins; the last, if it has ended, at `ends_at`.
    """
    furthest, *reached = [attempt["begins_at"] for attempt in attempts] + ends_at
    fruitless = 0
    for step in reached:
        fruitless = 0 if step > furthest else fruitless + 1
        furthest = max(furthest, step)
    bad = [node for attempt in attempts for node in set(attempt["bad_nodes"])]
    exclude = sorted({node for node in bad if bad.count(node) >= MAX_NODE_FAILURES})
    if fruitless >= MAX_FRUITLESS:
        return Decision(False, f"{why}, but {fruitless} attempts got no further than step {furthest}", exclude)
    return Decision(True, why, exclude)


def main() -> int:
    """Print the decision, and return 0; 2 if the call is wrong."""
    when, *options = sys.argv[1:] or [""]
    missing = [f"{name} is not set" for name in VARIABLES if name not in os.environ]
    if when not in ("begin", "end", "stopped"):
        missing.insert(0, f"{when!r} is not begin, end or stopped")
    if missing:
        usage = "python -m torchtitan_graph.launch.requeue begin|end|stopped [--table.key value ...]"
        print(f"requeue: {'; '.join(missing)}. In a job of multinode_trainer.slurm: {usage}", file=sys.stderr)
        return CONFIGURATION
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by SLURM to a job that is ending: there is work left to do
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    print(_decide(when, options))
    return 0


def _decide(when: str, options: list[str]) -> str:
    """Return the line for the script, and print why."""
    job_id, restart = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    nodes, down = os.environ["JOB_NODES"].split(), os.environ["DOWN_NODES"].split()
    try:
        folder = run_folder(load(options))
        if when == "begin":
            decision = begin_attempt(folder, job_id, restart, nodes, down)
        else:
            decision = end_attempt(folder, job_id, restart, down, got_signal=when == "stopped")
            _report(folder)
    except UserError as error:
        print(f"requeue: no attempt: {error}", file=sys.stderr)
        return "stop"
    except OSError as error:
        if not is_transient(error):
            raise
        print(f"requeue: go on: storage is unavailable: {error}", file=sys.stderr)
        return _requeue([])
    print(f"requeue: {'go on' if decision.again else 'stop'}: {decision.why}", file=sys.stderr)
    if not decision.again:
        return "finished" if decision.why == "the run is finished" else "stop"
    if when == "begin" and not set(decision.exclude).intersection(nodes):
        return f"train {folder}"
    return _requeue(decision.exclude)


def _report(folder: Path) -> None:
    """Print the failures, the cause first."""
    failures = read_failures(folder)
    for number, failure in enumerate(failures):
        first_line = failure["message"].partition("\n")[0]
        print(printable(f"requeue: {failure['host']}: {first_line}"), file=sys.stderr)
        if number == 0 and failure["code"] == FAULT:
            print(printable(failure["traceback"]), file=sys.stderr)


def _requeue(exclude: list[str]) -> str:
    """Return the line that requeues the job without some nodes; `stop` if somebody has cancelled it."""
    job = os.environ["JOB"]
    if re.search(r"JobState=(CANCELLED|PREEMPTED)", job):
        print("requeue: the job is cancelled or preempted: SLURM has the word", file=sys.stderr)
        return "stop"
    if not exclude:
        return "requeue"
    print(f"requeue: without {', '.join(exclude)}, which failed repeatedly", file=sys.stderr)
    before = re.search(r"ExcNodeList=(?!\(null\))(\S+)", job)  # the user's own, and ours of earlier attempts
    return f"requeue {','.join([*([before[1]] if before else []), *exclude])}"


if __name__ == "__main__":
    sys.exit(main())
