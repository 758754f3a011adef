"""Run our own tests on a tiny model of a family, yours or one of the package, in processes on this machine's CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchtitan_graph.check.family import checks
from torchtitan_graph.check.runner import parse, report


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for every check, and a summary. Return 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_graph.check", description=__doc__)
    parser.add_argument("name", help="llama3, ..., or the dotted name of a module of your own, found on PYTHONPATH")
    parser.add_argument("--flavor", default="debugmodel", help="of its FLAVORS; its sizes are made tiny")
    parser.add_argument("--full", action="store_true", help="also DDP, and FSDP 2 x TP 2 on four processes")
    options, attns = parse(parser, argv)
    found = checks(options.name, options.flavor, attns, options.full)
    return report(f"{options.name} {options.flavor}", found, options)


if __name__ == "__main__":
    sys.exit(main())
