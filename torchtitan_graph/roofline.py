"""What bounds a job's step, before any GPU is there.

python -m torchtitan_graph.roofline --job.config_file my.toml --device h100

The step's graph is built as a dry run does, passes and optimizer included, and every operator's FLOPs and bytes are
counted, unfused and fused: by class of operator and by module, with what bounds each, and MFU. All options of training
are taken too. docs/tune/roofline.md explains the figures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph.command import check_result, command, make_parser, run_command, write_result
from torchtitan_graph.config import read_beside
from torchtitan_graph.errors import UserError
from torchtitan_graph.plan.ranks import CPU, configuration
from torchtitan_graph.plan.roofline import as_data, lines, roofline
from torchtitan_graph.rates import RATES, find_rates

OTHERS = "Other options are those of python -m torchtitan_graph.train --help."


@command
def main(argv: Sequence[str]) -> int:
    """Print the roofline for the arguments. Return the exit code: 0 done, 2 for a UserError."""
    parser = make_parser(__doc__, allow_abbrev=False, epilog=OTHERS)
    devices = [name.lower() for name in RATES if name != CPU]
    names = ", ".join(devices)
    parser.add_argument("--device", default="h100", help=f"{names}, or your own file, such as my.toml (default h100)")
    parser.add_argument("--world", type=int, default=1, help="the number of devices; one if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as data too")
    options, of_training = read_beside(parser, argv)
    rates = find_rates(options.device, devices)
    if rates.name == CPU:
        raise UserError(f"--device {options.device}: a CPU has no peaks that a file could hold; legal are {names}")
    if options.json is not None:
        check_result("--json", options.json)
    config = configuration(of_training, options.world)
    found = roofline(config, options.world, rates)
    print("\n".join(lines(found)))
    if options.json is not None:
        write_result("--json", options.json, json.dumps(as_data(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
