"""Process groups, DTensors, and the index of a checkpoint."""

import contextlib
import datetime
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

# FSDP2's name for "sharded on dim 0 over data parallel, inside a shard of tensor parallel on the same dim".
# Replaced by a public placement when torch makes it public.
StridedShard = _StridedShard


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a DTensor, for `make_dtensor`."""
    return DTensorSpec(mesh, placements, TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of a local tensor. `DTensor.from_local` does the same through an autograd function, with a new
    spec, at many times the cost, which is paid for every gradient of every step."""
    return DTensor(local, spec, requires_grad=False)


_fake_stands_for = ""


def init_fake_process_group(world_size: int, rank: int = 0, stands_for: str = "nccl") -> None:
    """Initialize a fake process group of any size: this process is one rank, and nothing is sent. torch has it for
    its own tests.

    One may follow another in a process, so DTensor's caches are cleared: meshes of the same ranks compare equal there,
    and the previous world's groups would be used. `stands_for`: the backend whose copies a forecast counts.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _fake_stands_for
    _fake_stands_for = stands_for
    _clear_sharding_prop_cache()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int = 0, stands_for: str = "nccl") -> Iterator[None]:
    """Have a fake process group inside the context, see `init_fake_process_group`."""
    init_fake_process_group(world_size, rank, stands_for)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def ranks_of_group(name: str) -> list[int]:
    """Return the ranks of a group by its name, all that a graph's collectives have of it. Replaced when functional
    collectives take groups."""
    return torch.distributed.get_process_group_ranks(_resolve_process_group(name))  # type: ignore[arg-type, unused-ignore]


def is_gloo(group: str) -> bool:
    """Return whether a group's collectives run on gloo, or on a fake group in place of gloo, by the group's name; False
    for an unknown one. Replaced as `ranks_of_group`."""
    try:
        backend = torch.distributed.get_backend(_resolve_process_group(group))  # type: ignore[arg-type, unused-ignore]
        return (_fake_stands_for if backend == "fake" else backend) == "gloo"
    except RuntimeError:  # a graph of another process
        return False


def name_group(name: str, group: torch.distributed.ProcessGroup) -> None:
    """Register a group under a further name for collectives. Replaced as `ranks_of_group`."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type, unused-ignore]


@functools.cache
def one_thread_per_gloo_group() -> None:
    """Make every later gloo group run its collectives in one thread, one after the other.

    torch starts two for each network interface, and both write the name of the finished collective into one string of
    the group, without a lock (`ProcessGroupGloo::runLoop`; 2.11 to 2.15): if two collectives of a group end at the same
    moment, the heap is corrupt. No argument of `init_process_group` or `new_group` sets the number. A lock in torch
    would replace this.
    """
    if not torch.distributed.is_gloo_available():
        return
    gloo: Any = torch.distributed.ProcessGroupGloo
    start = gloo.__init__

    def start_one_thread(self: Any, store: Any, rank: int, size: int, *options_given: Any, **settings: Any) -> None:
        if options_given:
            start(self, store, rank, size, *options_given, **settings)
            return
        options = gloo._Options()
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
        options._threads = 1
        for name, value in settings.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
        start(self, store, rank, size, options)

    gloo.__init__ = start_one_thread


def set_timeout(group: torch.distributed.ProcessGroup, seconds: int) -> None:
    """Change the timeout of a live group's collectives: before 2.15 public API sets it only at the start."""
    public = getattr(torch.distributed, "set_timeout", None)
    (public or _set_pg_timeout)(datetime.timedelta(seconds=seconds), group)


# Of a checkpoint's pickled `.metadata`, which an index in JSON would replace: a tensor's file and place in it, and the
# functions that it calls for a tensor's layout and memory format.
StorageInfo = _StorageInfo
METADATA_GETTERS = {
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}
