"""The script that makes two machines with a slow link: its orders of a step have the same bits, and fewer bytes cross
the link by machine, as its forecast says. No time is asserted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_slow_links.py"
CASES = ("direct, one by one", "direct, in pairs", "by machine, one by one", "by machine, in pairs")
SUMS = ("sums, one by one", "sums, in pairs")


def why_not() -> str | None:
    """Return why no slow link can be made here, None where it can."""
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"needs {' and '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces are root's to make"
    words = "unshare --net tc qdisc add dev lo root tbf rate 1mbit burst 32kb latency 50ms"
    done = subprocess.run(words.split(), capture_output=True, text=True, check=False)
    return f"no namespace with a slow link: {done.stderr.strip()}" if done.returncode else None


def namespaces() -> set[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in shown.stdout.splitlines()}


@pytest.mark.slow
def test_orders_over_a_slow_link_have_the_same_bits_and_fewer_bytes_by_machine(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    before, out = namespaces(), tmp_path / "steps.json"
    words = ["--rounds", "1", "--seq_len", "64", "--microbatches", "3", "--mbit", "1000", "--json", str(out)]
    subprocess.run([sys.executable, str(SCRIPT), *words], check=True, timeout=1500)
    assert namespaces() <= before, "they are removed"
    found = json.loads(out.read_text())
    losses, crossed = {}, {}
    for case in (*CASES, *SUMS):
        steps = [step for step in found["steps"] if step["case"] == case]
        losses[case], crossed[case] = [step["losses"] for step in steps], median(step["bytes"] for step in steps)
    assert all(losses[case] == losses[CASES[0]] for case in CASES), "these orders keep the bits"
    assert losses[SUMS[0]] == losses[SUMS[1]] != losses[CASES[0]], "sums round, in either order alike"
    assert len({str(step) for step in losses[CASES[0]]}) == len(losses[CASES[0]]), "each step learns"
    expected = {case: each["bytes"] for case, each in found["forecast"].items()}
    for order in ("one by one", "in pairs"):
        direct, by_machine, sums = (f"{exchange}, {order}" for exchange in ("direct", "by machine", "sums"))
        for more, fewer in ((direct, by_machine), (by_machine, sums)):
            saved = expected[more] - expected[fewer]  # gradients cross alike, in more bytes than the forecast's
            assert crossed[more] - crossed[fewer] == pytest.approx(saved, rel=0.25) and saved > 0, (more, fewer)
