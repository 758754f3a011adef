"""The commands' options, and execution of checks one after the other, with a line printed for each as it ends."""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from torchtitan_graph.check.pool import PoolFailed
from torchtitan_graph.models.layers.decoder import ATTENTION


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Add the options that both commands have; return all options, and the attention implementations."""
    parser.add_argument("--attn", default="sdpa", help="of sdpa, flex, varlen: one, or several as sdpa,flex")
    parser.add_argument("--only", metavar="TITLE", help="only the checks whose title, as printed, has this in it")
    parser.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first failure")
    parser.add_argument("--traceback", action="store_true", help="of every failure, of every rank")
    options = parser.parse_args(argv)
    attns = options.attn.split(",")
    if not set(attns) <= {*ATTENTION}:
        parser.error(f"--attn {options.attn}: legal are {', '.join(ATTENTION)}, and several as sdpa,flex")
    torch.set_num_threads(1)  # workers with several ranks use one, too: more would add in another order
    return options, attns


class Failed(Exception):
    """Error: a check failed; the message is what and where to look."""


class Skipped(Exception):
    """Error: there is nothing to check; the message is why."""


class Check(NamedTuple):
    """A check: `run` raises `Failed`, `Skipped` or any other error, and may return a text to show. It is skipped unless
    the check called `needs` passes; if it `ends` and fails, no other check runs."""

    title: str
    run: Callable[[], str | None]
    needs: str = ""
    ends: bool = False


def report(what: str, checks: Iterable[Check], options: argparse.Namespace) -> int:
    """Print a line for every check that --only chooses, and a summary. Return 0 if nothing failed, 2 if no check is
    chosen, else 1."""
    results: dict[str, str] = {}
    every = [*checks]
    checks = [check for check in every if options.only is None or options.only in check.title]
    if not checks:
        titles = "\n  ".join(check.title for check in every)
        print(f"--only {options.only}: is in the title of no check; they are\n  {titles}", file=sys.stderr)
        return 2
    for check in checks:
        begin = time.perf_counter()
        results[check.title], said = _result(check, results, options.traceback)
        seconds = time.perf_counter() - begin
        print(f"{results[check.title]:<5} {check.title:<84} {seconds:5.1f} s", flush=True)
        if said:
            print("      " + said.strip().replace("\n", "\n      "), flush=True)
        if results[check.title] == "FAIL" and (options.exitfirst or check.ends):
            break
    if (failed := [title for title, result in results.items() if result == "FAIL"]) and len(results) > 1:
        print(f"to run one again: --only {failed[0]!r}")
    count = [f"{list(results.values()).count(kind)} {word}" for kind, word in _WORDS.items()]
    print(f"{what}: {', '.join(count)}")
    return 1 if "FAIL" in results.values() else 0


_WORDS = {"ok": "passed", "FAIL": "failed", "skip": "skipped"}


def _result(check: Check, results: dict[str, str], with_traceback: bool) -> tuple[str, str]:
    """Run a check; return the word for its result, and the text to show."""
    if results.get(check.needs, "ok") != "ok":
        return "skip", f"for this did not pass: {check.needs}"
    try:
        said = check.run()
    except Skipped as reason:
        return "skip", str(reason)
    except Exception as error:
        if with_traceback:
            return "FAIL", str(error) if isinstance(error, PoolFailed) else traceback.format_exc()
        raised = (error.first or str(error)) if isinstance(error, PoolFailed) else traceback.format_exc()
        return "FAIL", _gist(raised)
    return "ok", said or ""


def _gist(raised: str) -> str:
    """Return the end of a traceback, the error itself; for an error that is not ours, also its origin."""
    *_, error = re.split(r"^  File .*\n(?:    .*\n)*", raised, flags=re.MULTILINE)
    message, ours = re.subn(r"^([a-z_]+\.)*(Failed|UserError): ", "", error)
    frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', raised, re.MULTILINE)
    outside_torch = [frame for frame in frames if "/torch/" not in frame[0]]
    if ours or not outside_torch:
        return message
    file, line, function = outside_torch[-1]
    return f"{message.rstrip()}\nin {function}, {file}:{line}; --traceback shows the way there"
