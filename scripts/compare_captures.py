"""Capture a configuration's steps by make_fx and by Dynamo, and say where the graphs differ; nothing is allocated.

    python scripts/compare_captures.py --job.config_file my.toml

What train.py takes is taken here as well; NGPU=64 in front compares one rank of 64. It ends with 0 if the graphs are
the same, with 1 if they differ or only one capture takes the step, with 2 if the configuration is refused.
"""

import functools
from collections.abc import Sequence

from torchtitan_graph.check.captures import Comparing
from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.config import DRY, load, read_beside
from torchtitan_graph.plan.ranks import dry_rank


def compare(words: Sequence[str]) -> Comparing:
    """Build the graphs of a configuration both ways, as a dry run does.

    Raises:
        UserError: as a run of that configuration, or both captures fail on a step.
    """
    comparing = Comparing()
    with dry_rank(load([*words, *DRY])) as blueprint:
        blueprint.capture = functools.partial(comparing, **blueprint.capture.keywords)
        blueprint.dry_run()
    return comparing


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__, allow_abbrev=False)
    parser.add_argument("--values", action="store_true", help="list the Python values that the graph depends on")
    options, of_training = read_beside(parser, argv)
    found = compare(of_training).found
    for number, each in enumerate(found, 1):
        rests_on = [f"  depends on {value}" for value in each.values if options.values]
        print(f"graph {number} of {len(found)}:", "\n".join([*each.lines(), *rests_on]))
    return 0 if all(each.is_same for each in found) else 1


if __name__ == "__main__":
    run_command(main)
