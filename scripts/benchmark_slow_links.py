"""Time a step of experts on four ranks as two machines with a slow link between them: one microbatch after another, and
in pairs; directly, and by machine.

    sudo python scripts/benchmark_slow_links.py
    sudo python scripts/benchmark_slow_links.py --mbit 100 --rounds 5 --json slow_links.json

The machines are network namespaces of this one, joined by a link whose rate is limited (Linux, root, `ip` and `tc`).
Two gloo ranks run in each. Beside the measured seconds of a step stands the forecast's for a CPU whose far links have
that rate. The cases take turns, and the medians are compared; more ranks than cores take the processor from one
another, which the forecast does not know.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchtitan_graph.command import make_parser
from torchtitan_graph.plan.ranks import build, configuration
from torchtitan_graph.plan.simulate import by_rates, simulate
from torchtitan_graph.rates import RATES

OPTIONS = (
    "--job.config_file deepseek_v3_debug.toml --parallelism.expert_parallel_degree 4 --training.local_batch_size 2"
    " --training.global_batch_size 32 --training.seq_len 256 --training.steps 8 --metrics.log_freq 1"
    " --parallelism.fsdp_once_a_step all --validation.no-enable --checkpoint.no-enable --metrics.no-enable_tensorboard"
)
JOB = OPTIONS.split()
CASES = {
    f"{exchange}, {order}": ["--parallelism.expert_exchange", exchange, *pairs]
    for exchange, (order, pairs) in itertools.product(
        ("direct", "by_machine"),
        (("one by one", []), ("in pairs", ["--parallelism.overlap_microbatches"])),
    )
}
NAMES, SUBNET, PORT = ("slow_links_a", "slow_links_b"), "10.253.7", 29571
WARM_UP = 3  # steps


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextlib.contextmanager
def two_machines(mbit: float) -> Iterator[None]:
    """Make two network namespaces with a link of a limited rate, and remove them at the end."""
    links = ("slow0", "slow1")
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(NAMES, links, strict=True), 1):
            inside = ("ip", "netns", "exec", name)
            run("ip", "link", "set", link, "netns", name)
            run(*inside, "ip", "addr", "add", f"{SUBNET}.{i}/24", "dev", link)
            run(*inside, "ip", "link", "set", link, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            shape = f"tbf rate {mbit:g}mbit burst 64kbit latency 500ms".split()
            run(*inside, "tc", "qdisc", "add", "dev", link, "root", *shape)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def seconds_of_a_step(words: list[str]) -> float:
    """Train on both machines, and return the median seconds of a step after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(4):
            place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
            place |= {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
            place |= {"GLOO_SOCKET_IFNAME": f"slow{rank // 2}", "TP_SOCKET_IFNAME": f"slow{rank // 2}"}
            command = [sys.executable, "-m", "torchtitan_graph.train", *JOB, *words, "--job.dump_folder", folder]
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", NAMES[rank // 2], *command],
                    env=os.environ | {key: str(value) for key, value in place.items()},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        said = [each.communicate()[1] for each in ranks]
        if any(each.returncode for each in ranks):
            raise SystemExit("\n".join(said))
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record][WARM_UP:]
    return 32 * 256 / statistics.median(rates)


def foretold(words: list[str], mbit: float) -> float:
    """Return the forecast's seconds of a step, for two CPUs with two ranks each."""
    rates = RATES["CPU"]._replace(name="two CPUs", num_near=2, far=mbit * 1e6 / 8 / 2)  # two ranks share the link
    job = build(configuration([*JOB, *words], 4), 4, rates)
    return simulate(job, by_rates(job, rates), rates).step.seconds


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--mbit", type=float, default=500.0, help="rate of the link in Mbit/s (default 500)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case, which take turns (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds as data too")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces are root's to make: run it with sudo, or in a container as root")
    expected = {name: foretold(words, options.mbit) for name, words in CASES.items()}
    measured: dict[str, list[float]] = {name: [] for name in CASES}
    with two_machines(options.mbit):
        for _ in range(options.rounds):
            for name, words in CASES.items():
                measured[name].append(seconds_of_a_step(words))
                print(f"{name}: {measured[name][-1]:.3f} s a step", flush=True)
    first = next(iter(CASES))
    for name in CASES:
        median = statistics.median(measured[name])
        ratios = median / statistics.median(measured[first]), expected[name] / expected[first]
        print(
            f"{name:24} {median:7.3f} s, {ratios[0]:.2f} of {first}; forecast {expected[name]:7.3f} s, {ratios[1]:.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"measured": measured, "forecast": expected}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
