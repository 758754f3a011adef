"""Run our own tests on a tiny model of a family, yours or one of the package, in processes on this machine's CPU."""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Sequence

import torch

from torchtitan_graph.check.family import Check, Skipped, checks
from torchtitan_graph.check.pool import RanksFailed


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for every check, and a summary. Returns 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_graph.check", description=__doc__)
    parser.add_argument("name", help="llama3, ..., or the dotted name of a module of your own, found on PYTHONPATH")
    parser.add_argument("--flavor", default="debugmodel", help="of its FLAVORS; its sizes are made tiny")
    parser.add_argument("--attn", default="sdpa", help="sdpa, flex or sdpa,flex")
    parser.add_argument("--full", action="store_true", help="also DDP, and FSDP 2 x TP 2 on four processes")
    parser.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first failure")
    parser.add_argument("--traceback", action="store_true", help="of every failure, of every rank")
    options = parser.parse_args(argv)
    attns = options.attn.split(",")
    if not set(attns) <= {"sdpa", "flex"}:
        parser.error(f"--attn {options.attn}: legal are sdpa, flex and sdpa,flex")
    torch.set_num_threads(1)  # every process of several ranks takes one, too: more would add in another order
    results: dict[str, str] = {}
    for check in checks(options.name, options.flavor, attns, options.full):
        begin = time.perf_counter()
        results[check.title], said = _result(check, results, options.traceback)
        seconds = time.perf_counter() - begin
        print(f"{results[check.title]:<5} {check.title:<84} {seconds:5.1f} s", flush=True)
        if said:
            print("      " + said.strip().replace("\n", "\n      "), flush=True)
        if results[check.title] == "FAIL" and (options.exitfirst or not check.needs):
            break
    count = [f"{list(results.values()).count(kind)} {word}" for kind, word in _WORDS.items()]
    print(f"{options.name} {options.flavor}: {', '.join(count)}")
    return 1 if "FAIL" in results.values() else 0


_WORDS = {"ok": "passed", "FAIL": "failed", "skip": "skipped"}


def _result(check: Check, results: dict[str, str], with_traceback: bool) -> tuple[str, str]:
    """Run a check; give the word for its result, and what there is to say about it."""
    if check.needs and results[check.needs] != "ok":
        return "skip", f"because not: {check.needs}"
    try:
        check.run()
    except Skipped as reason:
        return "skip", str(reason)
    except Exception as error:
        if with_traceback:
            return "FAIL", str(error) if isinstance(error, RanksFailed) else traceback.format_exc()
        raised = (error.first or str(error)) if isinstance(error, RanksFailed) else traceback.format_exc()
        return "FAIL", _gist(raised)
    return "ok", ""


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


if __name__ == "__main__":
    sys.exit(main())
