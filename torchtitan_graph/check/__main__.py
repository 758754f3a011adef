"""Run our own tests on a tiny model of a family, yours or one of the package, in processes on this machine's CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from torchtitan_graph.check.family import checks
from torchtitan_graph.check.report import report
from torchtitan_graph.models.layers.decoder import ATTENTION


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for every check, and a summary. Return 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_graph.check", description=__doc__)
    parser.add_argument("name", help="llama3, ..., or the dotted name of a module of your own, found on PYTHONPATH")
    parser.add_argument("--flavor", default="debugmodel", help="of its FLAVORS; its sizes are made tiny")
    parser.add_argument("--attn", default="sdpa", help="of sdpa, flex, varlen: one, or several as sdpa,flex")
    parser.add_argument("--full", action="store_true", help="also DDP, and FSDP 2 x TP 2 on four processes")
    parser.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first failure")
    parser.add_argument("--traceback", action="store_true", help="of every failure, of every rank")
    options = parser.parse_args(argv)
    attns = options.attn.split(",")
    if not set(attns) <= {*ATTENTION}:
        parser.error(f"--attn {options.attn}: legal are {', '.join(ATTENTION)}, and several as sdpa,flex")
    torch.set_num_threads(1)  # workers with several ranks use one, too: more would add in another order
    found = checks(options.name, options.flavor, attns, options.full)
    return report(f"{options.name} {options.flavor}", found, options.exitfirst, options.traceback)


if __name__ == "__main__":
    sys.exit(main())
