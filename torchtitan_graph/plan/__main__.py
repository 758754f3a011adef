"""Forecast a job on any cluster, on this machine: its memory, its speed and what it sends.

    python -m torchtitan_graph.plan --job.config_file F --world 512 --device h100

It builds the graphs that the run would execute, passes included, as a dry run does; nothing is allocated or sent. All
options of training are taken too. A device is a file of figures with their sources: torchtitan_graph/rates/h100.toml
and others beside it, or one of your own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.config import read_beside
from torchtitan_graph.device import host_peak_memory_gib
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.layout import DP_REPLICATE
from torchtitan_graph.plan import find, outlook
from torchtitan_graph.plan.on_cpu import ThisCpu
from torchtitan_graph.plan.ranks import CPU, build, configuration
from torchtitan_graph.plan.report import as_data, lines
from torchtitan_graph.plan.simulate import by_rates, simulate
from torchtitan_graph.rates import RATES, find_rates
from torchtitan_graph.run.files import check_result, write_result

_HEADROOM, _MOST_HEADROOM = 10, 90  # percent


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that training doesn't have."""
    epilog = "Other options are those of python -m torchtitan_graph.train --help."
    made = make_parser(__doc__, prog="python -m torchtitan_graph.plan", allow_abbrev=False, epilog=epilog)
    names = ", ".join(name.lower() for name in RATES)
    made.add_argument("--world", type=int, required=True, help="the number of devices")
    made.add_argument("--device", required=True, help=f"{names}, or a file of your own, such as my.toml")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the forecast as data too")
    made.add_argument(
        "--search",
        nargs="?",
        const="",
        metavar="WHAT",
        help="find the fastest way to run the job that fits, by varying all of dp_replicate,tp,cp,pp,ep,schedule,rows,"
        "recompute,reshard,once,pairs,exchange, or those named; the forecast is then that of the best; Ctrl-C ends it"
        " with the best so far",
    )
    made.add_argument(
        "--headroom",
        type=float,
        metavar="PERCENT",
        help="with --search: the part of the memory that a candidate must leave free (default 10)",
    )
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="with --search: where to write the best, as TOML; else it is printed"
    )
    outlook.add_arguments(made)
    return made


@command
def main(argv: Sequence[str]) -> int:
    """Print the forecast of the arguments. Return the exit code: 0 done, 2 something to change."""
    options, of_training = read_beside(parser(), argv)
    begin = time.perf_counter()
    rates = find_rates(options.device)
    if options.out is not None and options.search is None:
        raise UserError(f"--out {options.out}: is where --search writes the best; add --search, or leave it out")
    if options.headroom is not None and options.search is None:
        raise UserError(f"--headroom {options.headroom:g}: is what --search leaves free; add --search, or leave it out")
    headroom = _HEADROOM if options.headroom is None else options.headroom
    if not 0 <= headroom <= _MOST_HEADROOM:
        raise UserError(f"--headroom {headroom:g}: must be a percentage from 0 to {_MOST_HEADROOM}")
    for name in ("json", "out"):
        if (path := getattr(options, name)) is not None:
            check_result(f"--{name}", path)
    varied = None if options.search is None else find.check_varied(options.search)
    config = configuration(of_training, options.world)
    outlook.check_arguments(options, config)
    if options.replicas is not None:
        if varied is not None and DP_REPLICATE in varied:
            raise UserError(
                f"--replicas {options.replicas}: groups are copies of the model, and --search varies their number; name"
                f" what it varies, without {DP_REPLICATE}"
            )
        outlook.check_replicas(options.replicas, config, options.world, rates.num_near)
    if options.expert_load is not None:
        outlook.check_loads(options.expert_load, Blueprint(config, options.world).model)
    cpu = ThisCpu(options.world) if rates.name == CPU else None
    rates = rates if cpu is None else cpu.rates(rates)
    if varied is not None:
        of, found = find.search(config, options.world, rates, cpu, varied, headroom / 100)
        print("\n".join(find.lines(of, found)))
        best = find.best_toml(of, found.best)
        print(best) if options.out is None else write_result("--out", options.out, best)
        config = of.configured(found.best.settings)
    job = build(config, options.world, rates)
    if cpu is not None:
        cpu.learn(job, progress)
    prices = by_rates(job, rates) if cpu is None else cpu.prices(rates)
    plan = simulate(job, prices, rates)
    ahead = outlook.look_ahead(options, plan, prices)
    print("\n".join([*lines(plan), *ahead.lines()]))
    if options.json is not None:
        write_result("--json", options.json, json.dumps({**as_data(plan), **ahead.data()}, indent=1) + "\n")
    logger.info(
        f"forecast of {options.world} ranks done in {time.perf_counter() - begin:.1f} s, "
        f"peak memory of this process {host_peak_memory_gib():.2f} GiB"
    )
    return 0


def progress(done: int, number: int) -> None:
    """Log every hundredth replayed operator, and the last."""
    if done == number or done % 100 == 0:
        logger.info(f"replayed {done} of {number} operators on this CPU")


if __name__ == "__main__":
    run_command(main)
