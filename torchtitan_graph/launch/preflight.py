"""Name the bad nodes of an allocation, in less than a minute, before a run meets them:

    srun --ntasks-per-node=8 python -m torchtitan_graph.launch.preflight DUMP_FOLDER
    torchrun --nproc-per-node=8 -m torchtitan_graph.launch.preflight DUMP_FOLDER

One process per GPU, or per CPU node; under srun with MASTER_ADDR and MASTER_PORT set. Every process checks its device,
the shared folder, its clock and its code, the first of a node also what NVIDIA's tools say of its GPUs, and reports to
rank 0 through a store; a node that does not report is bad too. Then they all communicate. Exit code 5 if a node is bad.

Note [Slow links]
A link is slow only against the others: what is usual differs from cluster to cluster. Each is measured REPEATS times,
and its time is the median, so that a message that met others does not count. The usual time u is the median over all
links (the lower one of two: with four nodes, one of them bad, half of the links are slow). Times differ without any
fault, by the spread s: that of the links' times around u, or if that is larger, the one that a median of REPEATS has by
a link's repetitions alone; both from median absolute deviations, scaled to a normal distribution's standard deviation.
A link is slow above u (1 + LEAST_SLOWER) and u + DEVIATIONS s. A slow node makes its neighbour's link slow as well, but
not its neighbour's other one: nodes form a ring, so that each GPU has two links, and one is bad if both are slow. It
takes four nodes: of the three links of three nodes a bad node slows two, and they are the median.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_graph
from torchtitan_graph import device as devices
from torchtitan_graph.config.check import check_environment
from torchtitan_graph.errors import UserError
from torchtitan_graph.launch.gpu_health import read_gpus
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.parallel.join import connect, meet
from torchtitan_graph.run.failure import BAD_NODE, CONFIGURATION, write_bad_node
from torchtitan_graph.run.folder import check_place
from torchtitan_graph.run.identity import identity
from torchtitan_graph.small_files import BadFile, read_text, write_text

REPORT_WITHIN_S = 30.0  # after rank 0 has started: Python and torch may come from a slow file system
COMMUNICATE_WITHIN_S = 15.0
CLOCK_DIFFERENCE_S = 10.0
REPEATS, DEVIATIONS, LEAST_SLOWER, LEAST_NODES = 7, 4, 0.2, 4  # See Note [Slow links].
MEBIBYTES = 64 if devices.device_type() == "cuda" else 16

Problems = dict[str, list[str]]  # by node


def main() -> int:
    """Check the nodes, and return 0 if all are well, else 5."""
    init_logging()
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        logger.error("usage, in each process of an allocation: python -m torchtitan_graph.launch.preflight DUMP_FOLDER")
        return CONFIGURATION
    try:
        check_environment()
        folder = check_place(sys.argv[1])
    except UserError as error:
        logger.error(str(error))
        return CONFIGURATION
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # without a launcher: one process
    os.environ["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    store = _join(rank)
    if store is None:
        return BAD_NODE
    mine = report(folder, rank)
    store.set(f"report/{rank}", json.dumps(mine))
    if rank:
        _answer_for_clock(store, rank)
        return _follow(store, rank, world_size)
    reports, problems = _collect(store, world_size)
    for why, those in not_read(reports).items():
        logger.info(f"not read on {those[0]}{f' and {len(those) - 1} more nodes' * (len(those) > 1)}: {why}")
    problems = merge(problems, judge(folder, reports), _compare_clocks(store, reports))
    store.set("verdict", json.dumps(problems))
    if not problems:
        problems = _communicate(store, rank, world_size, [reports[r]["node"] for r in range(world_size)])
    for node, found in sorted(problems.items()):
        why = "; ".join(sorted(set(found)))
        logger.error(f"node {node}: {why}")
        try:
            write_bad_node(folder, node, why)
        except OSError as error:
            logger.warning(f"that node {node} is bad is not written to {folder}: {error}")
    if not problems:
        number = len({r["node"] for r in reports.values()})
        logger.info(f"preflight: {'the node is' if number == 1 else f'all {number} nodes are'} well")
    return BAD_NODE if problems else 0


def report(folder: Path, rank: int) -> dict[str, Any]:
    """Return the report of this process's own checks."""
    found: dict[str, Any] = {"node": identity()["host"], "rank": rank, "problems": []}
    try:
        _check_device()
    except Exception as error:  # a broken driver may raise anything
        found["problems"].append(f"its device {devices.device()} does not compute: {error}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f".preflight-{rank}", found["node"])
    except OSError as error:
        found["problems"].append(f"it can't write to {folder}: {error}")
    found |= {"links": {}, "not_read": []}
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first and (devices.device_type() == "cuda" or shutil.which("nvidia-smi")):
        health = read_gpus()
        found["problems"] += health.problems
        found |= {"links": health.links, "not_read": health.not_read}
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    return found | {"code": code_digest(), "device": devices.device_type(), **versions}


def code_digest() -> str:
    """Return a digest of this package's sources."""
    package = Path(torchtitan_graph.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def judge(folder: Path, reports: dict[int, dict[str, Any]]) -> Problems:
    """Return the problems of the nodes by their reports: their own findings, and differences from the majority."""
    problems: Problems = {}
    for name in ("code", "device", "torch", "python"):
        usual = Counter(report[name] for report in reports.values()).most_common(1)[0][0]
        for each in reports.values():
            if each[name] != usual:
                problems.setdefault(each["node"], []).append(f"its {name} is {each[name]}, elsewhere {usual}")
    counts = Counter(number for each in reports.values() for number in each["links"].values())
    usual_links = max(counts, key=lambda number: (counts[number], number), default=0)
    for rank, each in reports.items():
        problems.setdefault(each["node"], []).extend(each["problems"])
        problems[each["node"]] += [
            f"GPU {gpu}: {number} of its NVLinks are active, usual are {usual_links}; look at the fabric manager's log"
            for gpu, number in each["links"].items()
            if number < usual_links
        ]
        mark = folder / f".preflight-{rank}"
        if _read(mark) == each["node"]:
            mark.unlink()
        elif not each["problems"]:
            problems[each["node"]].append(f"its file in {folder} can't be read by rank 0: the folder is not shared")
    return {node: found for node, found in problems.items() if found}


def _read(mark: Path) -> str | None:
    try:
        return read_text(mark)
    except (OSError, BadFile):
        return None


def merge(*parts: Problems) -> Problems:
    """Return the union of several findings."""
    nodes = dict.fromkeys(node for part in parts for node in part)
    return {node: [problem for part in parts for problem in part.get(node, [])] for node in nodes}


def not_read(reports: dict[int, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the nodes on which a tool printed nothing, by what it was and why."""
    nodes: dict[str, list[str]] = {}
    for each in reports.values():
        if each["not_read"]:
            nodes.setdefault(", ".join(each["not_read"]), []).append(each["node"])
    return nodes


def ring(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return the links of a ring of nodes, in turns in which each node has one at most."""
    links = [(node, (node + 1) % num_nodes) for node in range(num_nodes)][
        : num_nodes if num_nodes > 2 else num_nodes - 1
    ]
    turns = [links[: num_nodes // 2 * 2 : 2], links[1::2], links[num_nodes - 1 :] if num_nodes % 2 else []]
    return [turn for turn in turns if turn]


def slow_nodes(nodes: list[str], seconds: dict[tuple[int, int], list[float]]) -> Problems:
    """Return the nodes of the ranks all of whose links are slow, by the seconds of each pair of ranks, several times.

    See Note [Slow links].
    """
    times = {pair: statistics.median(each) for pair, each in seconds.items()}
    usual = statistics.median_low(times.values())
    of_repeats = statistics.median(abs(s - times[pair]) for pair, each in seconds.items() for s in each)
    of_repeats *= math.sqrt(math.pi / 2 / REPEATS)  # of their median
    of_links = statistics.median_low([abs(taken - usual) for taken in times.values()])
    slow = max(usual * (1 + LEAST_SLOWER), usual + DEVIATIONS * 1.4826 * max(of_repeats, of_links))
    fastest: dict[int, float] = {}
    for pair, taken in times.items():
        for rank in pair:
            fastest[rank] = min(taken, fastest.get(rank, math.inf))
    problems: Problems = {}
    for rank, taken in fastest.items():
        if taken > slow:
            problems.setdefault(nodes[rank], []).append(
                f"rank {rank} sends {_rate(taken)} over the faster one of its links; the median of all {len(times)} is"
                f" {_rate(usual)}, and below {_rate(slow)} is slow"
            )
    return problems


def _rate(seconds: float) -> str:
    return f"{MEBIBYTES / 1024 / seconds:.2f} GiB/s"


def _join(rank: int) -> dist.TCPStore | None:
    try:
        return connect(rank, datetime.timedelta(seconds=REPORT_WITHIN_S))
    except (RuntimeError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        logger.error(f"rank {rank} on {identity()['host']}: no connection to {address}: {error}")
        return None


def _check_device() -> None:
    """Check products of matrices of small whole numbers, which are exact."""
    device = devices.device()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(-8, 8, (2, 512, 512), generator=generator).float().to(device)
    expected = a.double().cpu() @ b.double().cpu()
    for _ in range(10):
        if not torch.equal((a @ b).double().cpu(), expected):
            raise RuntimeError("a product of matrices is wrong")


def _collect(store: dist.TCPStore, world_size: int) -> tuple[dict[int, dict[str, Any]], Problems]:
    """Wait for all reports, and return them with problems for the missing ranks, whose nodes come from SLURM's list."""
    deadline, reports = time.monotonic() + REPORT_WITHIN_S, {}
    for rank in range(world_size):
        left = max(deadline - time.monotonic(), 0.1)
        try:
            store.wait([f"report/{rank}"], datetime.timedelta(seconds=left))
        except RuntimeError:
            continue
        reports[rank] = json.loads(store.get(f"report/{rank}"))
    missing = [rank for rank in range(world_size) if rank not in reports]
    return reports, {_node_of(rank, world_size): [f"it did not report in {REPORT_WITHIN_S:.0f} s"] for rank in missing}


def _node_of(rank: int, world_size: int) -> str:
    """Return the node of a rank by its number: ranks fill nodes in order."""
    names = os.environ.get("JOB_NODES", "").split()
    return names[rank * len(names) // world_size] if names else f"of rank {rank}"


def _answer_for_clock(store: dist.TCPStore, rank: int) -> None:
    with contextlib.suppress(RuntimeError):  # rank 0 is gone, and the next wait reports it
        store.wait([f"clock?/{rank}"], datetime.timedelta(seconds=2 * REPORT_WITHIN_S))
        store.set(f"clock/{rank}", repr(time.time()))


def _compare_clocks(store: dist.TCPStore, reports: dict[int, dict[str, Any]]) -> Problems:
    problems: Problems = {}
    for rank in sorted(reports.keys() - {0}):
        before = time.time()
        store.set(f"clock?/{rank}", "")
        there = float(store.get(f"clock/{rank}"))
        difference = there - (before + time.time()) / 2
        if abs(difference) > CLOCK_DIFFERENCE_S:
            problems[reports[rank]["node"]] = [f"its clock is {difference:+.0f} s off that of {reports[0]['node']}"]
    return problems


def _follow(store: dist.TCPStore, rank: int, world_size: int) -> int:
    """Run rank 0's decision on another rank, and return the exit code."""
    try:
        store.wait(["verdict"], datetime.timedelta(seconds=2 * REPORT_WITHIN_S))
    except RuntimeError:
        logger.error(f"rank {rank} on {identity()['host']}: rank 0 is gone")
        return BAD_NODE
    found = json.loads(store.get("verdict")) or _communicate(store, rank, world_size, [""] * world_size)
    return BAD_NODE if found else 0


def _communicate(store: dist.TCPStore, rank: int, world_size: int, nodes: list[str]) -> Problems:
    """All-reduce over all, and send to the neighbours' GPUs of the same number; return the slow nodes."""
    if devices.device_type() == "cuda":
        torch.cuda.set_device(devices.device())
    try:
        dist.init_process_group(
            "nccl" if devices.device_type() == "cuda" else "gloo",
            store=dist.PrefixStore("preflight", store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=COMMUNICATE_WITHIN_S),
        )
        seconds = _measure(rank, world_size)
        store.set(f"done/{rank}", "")
    except RuntimeError as error:
        if rank:
            return {"": [str(error)]}
        done = [r for r in range(world_size) if store.check([f"done/{r}"])]
        logger.error(f"the all-reduce failed; ranks that finished it: {done or 'none'}: {error}")
        return {nodes[r]: ["it did not finish an all-reduce"] for r in range(1, world_size) if r not in done}
    dist.destroy_process_group()
    if rank or not seconds:
        return {}
    if (number := len(set(nodes))) < LEAST_NODES:
        times = [statistics.median(each) for each in seconds.values()]
        logger.info(
            f"links between the {number} nodes: {_rate(max(times))} to {_rate(min(times))}; whether one is slow is not"
            f" judged, which takes {LEAST_NODES} nodes"
        )
        return {}
    return slow_nodes(nodes, seconds)


def _measure(rank: int, world_size: int) -> dict[tuple[int, int], list[float]]:
    """Return the seconds of each pair of neighbours, several times."""
    data = torch.ones(MEBIBYTES * 2**18, device=devices.device())
    for measured in (False, True):  # the first time connects
        begin = time.perf_counter()
        dist.all_reduce(data)
        total = data[0].item()
        taken = time.perf_counter() - begin
        if not (data == total).all():
            raise RuntimeError("an all-reduce gave different sums")
        if measured and rank == 0:
            rate = 2 * (world_size - 1) / world_size * MEBIBYTES / 1024 / taken
            logger.info(f"all-reduce of {MEBIBYTES} MiB over {world_size} ranks: {rate:.2f} GiB/s per rank")
        data.fill_(1)
    stride = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    position, own = rank // stride, dict[tuple[int, int], list[float]]()
    for turn in ring(world_size // stride):
        meet()
        neighbours = [sum(pair) - position for pair in turn if position in pair]
        if not neighbours:
            continue
        other = rank + (neighbours[0] - position) * stride
        times = []
        for _ in range(1 + REPEATS):
            begin = time.perf_counter()
            if rank < other:
                dist.send(data, other)
                dist.recv(data, other)
            else:
                dist.recv(data, other)
                dist.send(data, other)
            data[0].item()
            times.append((time.perf_counter() - begin) / 2)
        own[min(rank, other), max(rank, other)] = times[1:]  # the first time connects
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, own)
    return {pair: taken for part in everyone for pair, taken in part.items()}


if __name__ == "__main__":
    sys.exit(main())
