"""Forecast a job on any cluster, on this machine: its memory, its speed and what it sends.

    python -m torchtitan_graph.plan --job.config_file F --world 512 --device h100

It builds the graphs that the run would execute, passes included, as a dry run does; nothing is allocated or sent. All
options of training are taken too. A device is a file of figures with their sources: torchtitan_graph/rates/h100.toml
and others alongside it, or one of your own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.command import check_result, command, make_parser, run_command, write_result
from torchtitan_graph.config import JobConfig, check, read_beside
from torchtitan_graph.config.job import FaultTolerance
from torchtitan_graph.device import host_peak_memory_gib
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.layout import DP_REPLICATE
from torchtitan_graph.plan import find, outlook
from torchtitan_graph.plan.on_cpu import ThisCpu
from torchtitan_graph.plan.ranks import CPU, build, configuration, ranks_of_group
from torchtitan_graph.plan.report import as_data, lines
from torchtitan_graph.plan.simulate import JobForecast, Prices, by_rates, simulate
from torchtitan_graph.rates import RATES, Rates, find_rates
from torchtitan_graph.steps import num_replicas

_HEADROOM, _MOST_HEADROOM = 10, 90  # percent


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that training doesn't have."""
    epilog = "Other options are those of python -m torchtitan_graph.train --help."
    made = make_parser(__doc__, prog="python -m torchtitan_graph.plan", allow_abbrev=False, epilog=epilog)
    names = ", ".join(name.lower() for name in RATES)
    made.add_argument(
        "--world",
        type=int,
        required=True,
        help="the number of devices, of all replica groups together where fault_tolerance.enable is set: each group has"
        " an equal part",
    )
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
    ranks, groups = ranks_of_group(config, options.world), num_replicas(config)
    outlook.check_arguments(options, config)
    if groups > 1 and options.node_mtbf_hours is not None:
        outlook.check_replicas(groups, config, options.world, rates.num_near)
    if options.replicas is not None:
        if varied is not None and DP_REPLICATE in varied:
            raise UserError(
                f"--replicas {options.replicas}: groups are copies of the model, and --search varies their number; name"
                f" what it varies, without {DP_REPLICATE}"
            )
        outlook.check_replicas(options.replicas, config, options.world, rates.num_near)
    if options.expert_load is not None:
        outlook.check_loads(options.expert_load, Blueprint(config, ranks).model)
    cpu = ThisCpu(options.world) if rates.name == CPU else None
    rates = rates if cpu is None else cpu.rates(rates)
    if varied is not None:
        of, found = find.search(config, ranks, rates, cpu, varied, headroom / 100)
        print("\n".join(find.lines(of, found)))
        best = find.best_toml(of, found.best)
        print(best) if options.out is None else write_result("--out", options.out, best)
        config = of.configured(found.best.settings)
    plan, prices = forecast(config, ranks, rates, cpu)
    hsdp = beside_hsdp(plan, rates, cpu) if groups > 1 else None
    ahead = outlook.look_ahead(options, plan, prices, hsdp)
    print("\n".join([*lines(plan), *ahead.lines()]))
    if options.json is not None:
        write_result("--json", options.json, json.dumps({**as_data(plan), **ahead.data()}, indent=1) + "\n")
    logger.info(
        f"forecast of {options.world} ranks done in {time.perf_counter() - begin:.1f} s, "
        f"peak memory of this process {host_peak_memory_gib():.2f} GiB"
    )
    return 0


def forecast(config: JobConfig, world_size: int, rates: Rates, cpu: ThisCpu | None) -> tuple[JobForecast, Prices]:
    """Return the forecast of a job, or of a replica group of one, and the cost model that it is by."""
    job = build(config, world_size, rates)
    if cpu is not None:
        cpu.learn(job, progress)
    prices = by_rates(job, rates) if cpu is None else cpu.prices(rates)
    return simulate(job, prices, rates), prices


def beside_hsdp(plan: JobForecast, rates: Rates, cpu: ThisCpu | None) -> outlook.Hsdp:
    """Return a forecast of replica groups alongside that of HSDP on the same ranks."""
    job, tokens = plan.job, plan.job.tokens_per_step
    degree = job.dims.dp_replicate * job.options.num_replicas
    config = dataclasses.replace(
        job.config,
        fault_tolerance=FaultTolerance(),
        parallelism=dataclasses.replace(job.config.parallelism, data_parallel_replicate_degree=degree),
    )
    logger.info(f"alongside it HSDP: {DP_REPLICATE} {degree}")
    try:
        check(config, job.num_ranks)
        other, _ = forecast(config, job.num_ranks, rates, cpu)
    except UserError as error:
        return outlook.Hsdp(plan.step.seconds, tokens, why=str(error))
    waits = sum(seconds for axis, seconds in other.step.exposed.items() if DP_REPLICATE in axis.split("/"))
    return outlook.Hsdp(plan.step.seconds, tokens, other.step.seconds, waits)


def progress(done: int, number: int) -> None:
    """Log every hundredth replayed operator, and the last."""
    if done == number or done % 100 == 0:
        logger.info(f"replayed {done} of {number} operators on this CPU")


if __name__ == "__main__":
    run_command(main)
