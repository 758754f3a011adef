"""Check a pass of your own on tiny models of every family, in many layouts, on this machine's CPU.

First its graphs, of several ranks each, of which only one is there at a time: can they run, do all ranks send the same
in the same order, what do memory and traffic become? Then its numbers: models train with and without it, on one process
and on two. A failure is shown on a graph that is as small as could be found, in a file that runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan_graph.check.case import find_pass
from torchtitan_graph.check.passes import Wanted, checks
from torchtitan_graph.check.runner import parse, report
from torchtitan_graph.command import make_parser
from torchtitan_graph.config.job import ExtraPass
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import family_names, load_family


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for every check, and a summary. Return 0 if nothing failed, else 1."""
    parser = make_parser(__doc__, prog="python -m torchtitan_graph.check_pass")
    parser.add_argument("name", help="the pass, as my_pkg.my_pass, found on PYTHONPATH")
    parser.add_argument("--after", default="bucket_collectives", help="the pass it follows (default %(default)s)")
    parser.add_argument("--inexact", action="store_true", help="it may round: what exact = false promises")
    parser.add_argument("--families", default="all", help="such as llama3,my_pkg.my_model (default all of the package)")
    parser.add_argument("--graphs-only", action="store_true", help="train nothing")
    parser.add_argument("--full", action="store_true", help="train on four processes too")
    parser.add_argument("--out", type=Path, default=Path("outputs/check_pass"), help="folder for a small failing graph")
    options, attns = parse(parser, argv)
    torch.use_deterministic_algorithms(True)
    entry = ExtraPass(options.name, after=options.after, exact=not options.inexact)
    names = family_names() if options.families == "all" else options.families.split(",")
    try:
        find_pass(entry)
        families = [(name, flavor) for name in names for flavor in load_family(name).FLAVORS if "debugmodel" in flavor]
    except UserError as error:
        parser.error(str(error))
    wanted = Wanted(entry, families, attns, options.graphs_only, options.full, options.out)
    return report(f"{options.name} after {options.after}", checks(wanted), options)


if __name__ == "__main__":
    sys.exit(main())
