"""The device of this process: its kind, its peak FLOP/s, its memory."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.rates import RATES, Rates

GIB = 2**30

# Dense bf16 peak with fp32 accumulation, FLOP/s, from the vendors' data sheets (which often print the figure with
# sparsity, twice as much). A GPU matches a row when its name holds all of the row's words; the first match counts.
_PEAK_FLOPS: list[tuple[str, float]] = [
    ("A100", 312e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H20", 148e12),
    ("B200", 2250e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("GB300", 2500e12),
    ("MI250X", 191.5e12),  # one of the two dies of a card: torch sees each as a device
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
    ("MI350X", 2307e12),
    ("MI355X", 2517e12),
]


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that graphs are for: this process's, or the one that a dry run estimates for.

    device       where this process's tensors are
    rates        speeds of the target, for the cost model
    is_gpu       whether the graphs call a GPU's kernels
    runs         whether they run in this process; else nothing is compiled or recorded
    fused_norms  whether RMSNorm is traced as the one operator that it is on a GPU, in graphs that run nowhere
    """

    device: torch.device
    rates: Rates
    is_gpu: bool
    runs: bool = True
    fused_norms: bool = False

    @staticmethod
    def here(*, runs: bool = True) -> Target:
        """Return this process's device as the target."""
        return Target(device(), rates(), device_type() == "cuda", runs)

    @staticmethod
    def of(rates: Rates) -> Target:
        """Return a target for estimates, by its rates, whose name begins with CPU if they are of one."""
        for_gpu, has_gpu = not rates.name.upper().startswith("CPU"), device_type() == "cuda"
        return Target(device(), rates, for_gpu or has_gpu, runs=False, fused_norms=for_gpu and not has_gpu)


def rates() -> Rates:
    """Return the rates of this process's device, as placed by torchrun. A GPU that has not been measured takes those of
    an H100, and their name says so."""
    name = torch.cuda.get_device_name(device()) if device_type() == "cuda" else "CPU"
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    unmeasured = RATES["H100"]._replace(name=f"H100, for {name} has none of its own")
    found = next((RATES[name] for name in RATES if name in words), unmeasured)
    return found._replace(num_near=int(os.environ.get("LOCAL_WORLD_SIZE", found.num_near)))


def device_type() -> str:
    """Return "cuda" where a GPU can be used (ROCm's included), else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device() -> torch.device:
    """Return this process's device: the GPU numbered LOCAL_RANK, or the CPU."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_local_rank() -> None:
    """Raise UserError if this process is one more than this machine has GPUs."""
    rank, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device_type() == "cuda" and rank >= there:
        raise UserError(
            f"LOCAL_RANK = {rank}: each process has a GPU of its own, and there are {there} here: start at most as many"
            " processes on this machine (torchrun's --nproc_per_node)"
        )


def share_gpus(num_groups: int, num_ranks: int) -> list[str]:
    """Return each replica group's GPUs as CUDA_VISIBLE_DEVICES names them, one for each of its ranks on this machine;
    an empty list where there are none. Raises UserError if there are too few."""
    if device_type() != "cuda":
        return []
    there = torch.cuda.device_count()
    if num_groups * num_ranks > there:
        of, most = "", f"must be at most {there // num_groups}"
        if num_groups > 1:
            of = f" of {num_groups} replica groups"
            most += ", for fewer groups more" if there >= num_groups else f": start at most {there} groups here"
        raise UserError(
            f"NGPU = {num_ranks}: each process{of} has a GPU of its own, and there are {there} here: {most}"
        )
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(there)))).split(",")
    return [",".join(names[group * num_ranks : (group + 1) * num_ranks]) for group in range(num_groups)]


def peak_flops() -> float | None:
    """Return the device's dense bf16 peak in FLOP/s, or None where it is not known (a CPU, a slice of a GPU)."""
    return _peak_flops_of(torch.cuda.get_device_name(device())) if device_type() == "cuda" else None


def _peak_flops_of(gpu_name: str) -> float | None:
    words = set(re.split(r"[^A-Za-z0-9]+", gpu_name))
    if "MIG" in words:
        return None
    return next((flops for row, flops in _PEAK_FLOPS if words.issuperset(row.split())), None)


class CudaRecorder:
    """A recorder of some work as a CUDA graph. Its values are in the pool, which graphs that replay in turn share."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Record the work, run it once, and return its results."""
        # Other threads (a save, NCCL's watchdog) may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            results = run()
        self._graph.replay()
        return results

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


class Recorders:
    """The recorders of a process: `make(pool)` is called for each, with one pool."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make, self._made = make, []  # type: ignore[var-annotated]
        self._pool: Any = None

    def new(self) -> Any:
        if self._pool is None and device_type() == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        self._made.append(self._make(self._pool))
        return self._made[-1]

    def close(self) -> None:
        """Release all recordings. NCCL can't end communication that a CUDA graph still holds."""
        if self._made and device_type() == "cuda":
            torch.cuda.synchronize()
        for recorder in self._made:
            recorder.reset()
        self._made.clear()


def peak_memory_gib() -> float:
    """Return the most memory held since the start, in GiB.

    On a GPU: bytes that torch's allocator reserved. On a CPU: the process's resident memory.
    """
    return torch.cuda.max_memory_reserved(device()) / GIB if device_type() == "cuda" else host_peak_memory_gib()


def host_peak_memory_gib() -> float:
    """Return the most resident memory of this process since its start, in GiB."""
    status = Path("/proc/self/status")
    if status.exists():
        # Rather than getrusage: that one also counts the parent's memory at the fork.
        high_water = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if high_water:
            return int(high_water[1]) * 1024 / GIB
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def memory_total_gib() -> float:
    """Return the memory that this device has, in GiB: on a CPU the machine's, or the container's limit if lower."""
    if device_type() == "cuda":
        return torch.cuda.get_device_properties(device()).total_memory / GIB
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit)
        if path.exists() and path.read_text().strip().isdigit():  # "max": no limit
            total = min(total, int(path.read_text()))
    return total / GIB


def memory_of_rank_gib() -> float:
    """Return the memory available to this process, in GiB: its GPU's, or on a CPU its share of the machine's."""
    sharing = 1 if device_type() == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return memory_total_gib() / sharing


def bind_to_numa_node(sysfs: Path = Path("/sys")) -> None:
    """Bind this process to the CPUs nearest to its GPU, on a machine with several NUMA nodes.

    Nothing changes where CPUs are already chosen (by SLURM, numactl, torchrun), or where the nodes are unknown.
    """
    if device_type() != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    gpu: Any = torch.cuda.get_device_properties(device())  # torch's stubs leave out the address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    cpus = nearest_cpus(address, sysfs)
    if cpus and os.sched_getaffinity(0) == set(range(os.cpu_count() or 0)):
        os.sched_setaffinity(0, cpus)


def nearest_cpus(pci_address: str, sysfs: Path) -> set[int]:
    """Return the CPUs of a PCI device's NUMA node; none where there is one node, or it is unknown."""
    nodes = {path.name: path / "cpulist" for path in (sysfs / "devices/system/node").glob("node[0-9]*")}
    node = sysfs / "bus/pci/devices" / pci_address / "numa_node"
    if len(nodes) < 2 or not node.exists():
        return set()
    cpulist = nodes.get(f"node{node.read_text().strip()}")  # -1: the firmware does not say
    return _parse_cpulist(cpulist.read_text()) if cpulist is not None else set()


def _parse_cpulist(text: str) -> set[int]:
    """Return the set of numbers in the kernel's notation, such as `0-3,8`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for first, *last in ranges for cpu in range(int(first), int(last[0] if last else first) + 1)}


def seconds_of_product(dtype: torch.dtype, size: int = 256) -> float:
    """Return the seconds of a product of two square matrices on this CPU, the best of three: a few milliseconds."""
    x, best = torch.ones(size, size, dtype=dtype), float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        x @ x
        best = min(best, time.perf_counter() - begin)
    return best
