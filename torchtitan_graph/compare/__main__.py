"""Compare runs: `python -m torchtitan_graph.compare RUN RUN ...`, with the folders of two runs or more.

Prints what differs in their configurations, their curves of the loss, the metrics at the last step that all logged, and
the first step at which bits differ; draws all curves into one SVG file. The first run is what the others are compared
with. Runs may be in progress.
"""

from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph.command import check_result, command, make_parser, run_command, write_result
from torchtitan_graph.compare.picture import picture
from torchtitan_graph.compare.report import report
from torchtitan_graph.compare.runs import read_runs


@command
def main(argv: Sequence[str]) -> int:
    """Print the comparison and write the picture; return 0, or 2 where a folder or file can't be used."""
    parser = make_parser(__doc__, prog="python -m torchtitan_graph.compare")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder, its job.dump_folder")
    words = "the picture (default: %(default)s)"
    parser.add_argument("--picture", type=Path, default=Path("compare.svg"), metavar="FILE.svg", help=words)
    arguments = parser.parse_args(argv)
    check_result("--picture", arguments.picture)
    runs = read_runs(arguments.runs)
    print(report(runs))
    write_result("--picture", arguments.picture, picture(runs))
    print(f"\nall curves: {arguments.picture}")
    return 0


if __name__ == "__main__":
    run_command(main)
