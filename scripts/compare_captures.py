"""Capture a configuration's steps by make_fx and by Dynamo, and say where the graphs differ; nothing is allocated.

    python scripts/compare_captures.py --job.config_file my.toml

What train.py takes is taken here as well; NGPU=64 in front compares one rank of 64. It ends with 0 if the graphs are
the same, with 1 if they differ or only one capture takes the step, with 2 if the configuration is refused.
"""

import argparse
import functools
from collections.abc import Sequence

import torch.distributed as dist

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.check.captures import Comparing
from torchtitan_graph.command import command, run_command
from torchtitan_graph.config import DRY, check, load, ranks_asked_for, read_beside
from torchtitan_graph.log import logger
from torchtitan_graph.torch_private.distributed import init_fake_process_group


def compare(words: Sequence[str]) -> Comparing:
    """Build the graphs of a configuration both ways, as a dry run does.

    Raises:
        UserError: as a run of that configuration, or both captures fail on a step.
    """
    config = load([*words, *DRY])
    world_size = ranks_asked_for() or 1
    for notice in check(config, world_size):
        logger.warning(notice)
    blueprint = Blueprint(config, world_size)
    comparing = Comparing()
    blueprint.capture = functools.partial(comparing, **blueprint.capture.keywords)
    init_fake_process_group(world_size, config.comm.fake_rank)
    try:
        blueprint.dry_run()
    finally:
        dist.destroy_process_group()
    return comparing


@command
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--values", action="store_true", help="list what the graph rests on beside its inputs")
    options, of_training = read_beside(parser, argv)
    found = compare(of_training).found
    for number, each in enumerate(found, 1):
        rests_on = [f"  rests on {value}" for value in each.values if options.values]
        print(f"graph {number} of {len(found)}:", "\n".join([*each.lines(), *rests_on]))
    return 0 if all(each.is_same for each in found) else 1


if __name__ == "__main__":
    run_command(main)
