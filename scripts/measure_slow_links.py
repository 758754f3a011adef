"""Measure a step of experts over a slow link, next to its forecast: tokens sent directly and by machine, microbatches
one after the other and in pairs.

    sudo python scripts/measure_slow_links.py
    sudo python scripts/measure_slow_links.py --mbit 300 --rounds 9 --json slow_links.json

Four gloo ranks are two machines of two. A machine is a network namespace of this one, and a link whose rate is limited
joins them (Linux, root, `ip` and `tc`); the namespaces are removed at the end. All orders of a step are built once in
the same processes, then take turns, a step each; medians are compared. Next to a step's seconds stand its processor
seconds over the number of cores, and the seconds that the bytes counted at the interface take at the link's rate: no
order is faster than either, and only hiding makes one faster than their sum. The forecast is the planner's clock over
the same graphs, with operators replayed on this CPU, gloo's copies as over loopback, and the link's rate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark import make_batch

from torchtitan_graph.analysis.cost import Costs, Link
from torchtitan_graph.analysis.traffic import collective_of, received
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.command import command, make_parser, run_command
from torchtitan_graph.config import load
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.models import qwen3
from torchtitan_graph.parallel.join import join
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.plan.on_cpu import ReplayedCosts, ThisCpu
from torchtitan_graph.plan.ranks import Rank, build, configuration
from torchtitan_graph.plan.simulate import simulate
from torchtitan_graph.rates import RATES, Rates
from torchtitan_graph.steps.held import runs_of
from torchtitan_graph.trainer import Trainer

WORLD, NEAR = 4, 2  # ranks, and ranks of a machine
SUBNET, PORT = "10.253.7", 29571
WARM_UP = 2  # steps of each case
FRAMES = 1448 / 1514  # of the bytes on a link, TCP's payload in Ethernet's frames

qwen3.FLAVORS["slow_links"] = qwen3.Config(256, 2, 4, 2, 128, num_experts=32, vocab_size=512, head_dim=64)
JOB = (
    "--model.name qwen3 --model.flavor slow_links --training.local_batch_size 1 --parallelism.expert_parallel_degree 4"
    " --parallelism.fsdp_once_a_step all --activation_checkpoint.mode none"
)
_BY_MACHINE = "--parallelism.expert_exchange by_machine"
EXCHANGES = {"direct": "", "by machine": _BY_MACHINE, "sums": f"{_BY_MACHINE} --parallelism.exchange_sums by_machine"}
ORDERS = {"one by one": "", "in pairs": "--parallelism.overlap_microbatches"}
CASES = {f"{e}, {o}": f"{EXCHANGES[e]} {ORDERS[o]}" for e in EXCHANGES for o in ORDERS}  # the first is the reference


def words_of(case: str, options: argparse.Namespace) -> list[str]:
    sizes = f"--training.seq_len {options.seq_len} --training.global_batch_size {WORLD * options.microbatches}"
    return f"{JOB} {sizes} {CASES[case]}".split()


def device(mbit: float) -> Rates:
    """Return a CPU whose two ranks share a link to the other machine."""
    return RATES["CPU"]._replace(num_near=NEAR, far=mbit * 1e6 / 8 / NEAR, network_share=FRAMES)


# --- the forecast -----------------------------------------------------------------------------------------------------


class SlowLinkCosts(ReplayedCosts):
    """A rank's core copies as over loopback; what comes from another machine arrives at the link's rate meanwhile."""

    def starting(self, node: torch.fx.Node) -> float:
        link = self.link(node)
        return super().sending(node, link) if link else 0.0

    def sending(self, node: torch.fx.Node, link: Link) -> float:
        return max(self.starting(node), Costs.sending(self, node, link))


def between_machines(node: torch.fx.Node, link: Link) -> float:
    """Return the bytes that a machine receives from the other in a collective, as `Costs.sending` counts them."""
    size, (_, degree, near) = received(node, link.degree), link
    if near == degree:
        return 0.0
    return size * NEAR * (degree - near) / (degree - 1) if collective_of(node).is_pairwise else size * NEAR / near


def forecast(case: str, options: argparse.Namespace, cpu: ThisCpu) -> dict[str, float]:
    """Return the forecast seconds of a step, those in which a rank waits for messages, and a machine's bytes."""
    rates = device(options.mbit)
    job = build(configuration(words_of(case, options), WORLD), WORLD, rates)
    cpu.learn(job)

    def prices(rank: Rank) -> Costs:
        costs = cpu.prices(rates)(rank)
        return SlowLinkCosts(**{field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)})

    step, (rank,) = simulate(job, prices, rates).step, job.ranks
    assert isinstance(rank.graphs.train, StageGraph)
    num_bytes = 0.0
    for name, times in runs_of(rank.graphs.train, job.options.num_microbatches):
        for node in rank.graphs.train.all_parts[name].gm.graph.nodes:
            link = prices(rank).link(node)
            num_bytes += times * between_machines(node, link) if link else 0.0
    return {"seconds": step.seconds, "waits": sum(step.exposed.values()), "bytes": num_bytes}


# --- the measurement --------------------------------------------------------------------------------------------------


def train_as_a_rank(options: argparse.Namespace) -> None:
    """Train as one of the ranks, all cases in turns; rank 0 writes a record of each step."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    join("gloo")
    target = dataclasses.replace(Target.of(device(options.mbit)), runs=True)
    trainers: dict[str, Trainer] = {}
    for case in CASES:
        trainers[case] = Trainer(Blueprint(load(words_of(case, options)), WORLD, target))
        if rank == 0:
            print(f"{case}: built", flush=True)
    torch.manual_seed(rank)
    batches = [make_batch(1, options.seq_len, 512, target.device) for _ in range(options.microbatches)]
    num_tokens = torch.tensor(WORLD * options.microbatches * options.seq_len)
    counter = Path(f"/sys/class/net/slow{rank // NEAR}/statistics/rx_bytes")
    records: list[dict[str, Any]] = []
    for number in range(WARM_UP + options.rounds):
        for case, trainer in trainers.items():
            dist.barrier()
            begin, before, used = time.perf_counter(), int(counter.read_text()), time.process_time()
            loss = trainer.steps.train(batches, num_tokens).loss
            trainer.steps.clip(1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            used = time.process_time() - used
            dist.barrier()
            took, came = time.perf_counter() - begin, int(counter.read_text()) - before
            each: list[Any] = [None] * WORLD
            dist.all_gather_object(each, (used, float(loss).hex()))
            if rank == 0:
                print(f"step {number + 1}, {case}: {took:.3f} s, {came / 1e6:.1f} MB", flush=True)
                cpu, losses = zip(*each, strict=True)
                records.append({"case": case, "seconds": took, "bytes": came, "cpu": sum(cpu), "losses": losses})
    if rank == 0:
        Path(options.as_rank).write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def run(*words: str) -> None:
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip() or "failed"
        raise UserError(f"{' '.join(words)}: {why}; run it as root, where namespaces and tbf are allowed")


@contextlib.contextmanager
def two_machines(mbit: float) -> Iterator[list[str]]:
    """Make two network namespaces with a link of a limited rate, yield their names, and remove them at the end."""
    shape = f"tbf rate {mbit:g}mbit burst 16kb latency 400ms"  # a larger burst lets a message after a pause go faster
    names = [f"slow_links_{os.getpid()}_{i}" for i in range(WORLD // NEAR)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(*f"ip link add slow0 netns {names[0]} type veth peer name slow1 netns {names[1]}".split())
        for i, name in enumerate(names):
            run(*f"ip -n {name} addr add {SUBNET}.{i + 1}/24 dev slow{i}".split())
            run(*f"ip -n {name} link set slow{i} up".split())
            run(*f"ip -n {name} link set lo up".split())
            run(*f"tc -n {name} qdisc add dev slow{i} root {shape}".split())
        yield names
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on both machines, and return the record of each step."""
    with two_machines(options.mbit) as names, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        out, ranks = Path(folder, "steps.json"), []
        for rank in range(WORLD):
            machine = rank // NEAR
            place = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": rank % NEAR, "LOCAL_WORLD_SIZE": NEAR}
            place |= {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": f"slow{machine}"}
            place |= {"OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # no name server: c10d would warn
            words = ["ip", "netns", "exec", names[machine], sys.executable, *sys.argv, "--as_rank", str(out)]
            env = os.environ | {key: str(value) for key, value in place.items()}
            ranks.append(subprocess.Popen(words, env=env, start_new_session=True))
            ending.callback(ranks[-1].wait)
            ending.callback(ranks[-1].kill)
        while any(each.poll() is None for each in ranks):
            if any(each.poll() for each in ranks):
                raise UserError("a rank has failed, see above")
            time.sleep(0.2)
        if any(each.returncode for each in ranks):
            raise UserError("a rank has failed, see above")
        return json.loads(out.read_text())


def print_table(steps: list[dict[str, Any]], expected: dict[str, dict[str, float]], mbit: float) -> None:
    """Print the medians of each case's steps after the first ones, and its forecast; ratios are to the first case's."""
    cores, firsts = os.cpu_count() or 1, None
    print(f"{'':24}{'measured':>10} ratio  processors  link    MB | {'forecast':>8} ratio  link   MB")
    for case, own in expected.items():
        kept = [step for step in steps if step["case"] == case][WARM_UP:]
        took, num_bytes, cpu = (statistics.median(step[key] for step in kept) for key in ("seconds", "bytes", "cpu"))
        firsts = firsts or (took, own["seconds"])
        link, link_then = (each * 8 / 1e6 / mbit for each in (num_bytes, own["bytes"] / FRAMES))
        measured = f"{took:8.3f} s {took / firsts[0]:5.2f} {cpu / cores:9.3f} s {link:6.3f} {num_bytes / 1e6:5.1f}"
        then = own["seconds"], own["seconds"] / firsts[1], link_then, own["bytes"] / 1e6
        print(f"{case:24}{measured} | {then[0]:6.3f} s {then[1]:5.2f} {then[2]:6.3f} {then[3]:5.1f}", flush=True)


@command
def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--mbit", type=float, default=120.0, help="rate of the link in Mbit/s (default 120)")
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each case, in turns (default 15)")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens of a microbatch of a rank (default 128)")
    parser.add_argument("--microbatches", type=int, default=4, help="of a rank and step (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all steps and forecasts as data too")
    parser.add_argument("--as_rank", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    logger.setLevel(logging.WARNING)
    if options.as_rank:
        train_as_a_rank(options)
        return 0
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise UserError(f"{' and '.join(missing)}: not found; install iproute2, which makes the slow link")
    if os.geteuid() != 0:
        raise UserError("network namespaces are root's to make: run it with sudo, or in a container as root")
    for name, least in (("rounds", 1), ("microbatches", 2), ("seq_len", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} {getattr(options, name)}: must be a number of at least {least}")
    if not options.mbit > 0:
        raise UserError(f"--mbit {options.mbit:g}: must be a rate above 0, in Mbit/s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cpu, expected = ThisCpu(WORLD), {}
    for case in CASES:
        expected[case] = forecast(case, options, cpu)
        print(f"{case}: forecast {expected[case]['seconds']:.3f} s", flush=True)
    steps = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps({"steps": steps, "forecast": expected}, indent=1) + "\n")
    print_table(steps, expected, options.mbit)
    return 0


if __name__ == "__main__":
    run_command(main)
