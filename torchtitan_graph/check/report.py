"""Run checks one after the other, and print a line for each as it ends."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchtitan_graph.check.pool import RanksFailed


class Failed(Exception):
    """Say what does not hold, and where to look."""


class Skipped(Exception):
    """Say why there is nothing to check."""


class Check(NamedTuple):
    """`run` raises `Failed`, `Skipped` or whatever it comes upon, and may give a text to show. It makes no sense unless
    the check called `needs` holds; if it `ends` and fails, nothing else is checked."""

    title: str
    run: Callable[[], str | None]
    needs: str = ""
    ends: bool = False


def report(what: str, checks: Iterable[Check], exit_first: bool, with_traceback: bool) -> int:
    """Print a line for every check, and a summary. Returns 0 if nothing failed, else 1."""
    results: dict[str, str] = {}
    for check in checks:
        begin = time.perf_counter()
        results[check.title], said = _result(check, results, with_traceback)
        seconds = time.perf_counter() - begin
        print(f"{results[check.title]:<5} {check.title:<84} {seconds:5.1f} s", flush=True)
        if said:
            print("      " + said.strip().replace("\n", "\n      "), flush=True)
        if results[check.title] == "FAIL" and (exit_first or check.ends):
            break
    count = [f"{list(results.values()).count(kind)} {word}" for kind, word in _WORDS.items()]
    print(f"{what}: {', '.join(count)}")
    return 1 if "FAIL" in results.values() else 0


_WORDS = {"ok": "passed", "FAIL": "failed", "skip": "skipped"}


def _result(check: Check, results: dict[str, str], with_traceback: bool) -> tuple[str, str]:
    """Run a check; give the word for its result, and what there is to say about it."""
    if results.get(check.needs, "ok") != "ok":
        return "skip", f"for this did not pass: {check.needs}"
    try:
        said = check.run()
    except Skipped as reason:
        return "skip", str(reason)
    except Exception as error:
        if with_traceback:
            return "FAIL", str(error) if isinstance(error, RanksFailed) else traceback.format_exc()
        raised = (error.first or str(error)) if isinstance(error, RanksFailed) else traceback.format_exc()
        return "FAIL", _gist(raised)
    return "ok", said or ""


def _gist(raised: str) -> str:
    """Give what a traceback ends with, the error itself; of an error that is not ours, also where it came from."""
    *_, error = re.split(r"^  File .*\n(?:    .*\n)*", raised, flags=re.MULTILINE)
    message, ours = re.subn(r"^([a-z_]+\.)*(Failed|UserError): ", "", error)
    frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', raised, re.MULTILINE)
    outside_torch = [frame for frame in frames if "/torch/" not in frame[0]]
    if ours or not outside_torch:
        return message
    file, line, function = outside_torch[-1]
    return f"{message.rstrip()}\nin {function}, {file}:{line}; --traceback shows the way there"
