"""Copies to the host's memory and back, as operators that a graph starts and waits for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import declare, operator

_LIBRARY = "torchtitan_graph"


@operator(lambda x: torch.empty_like(x, device="cpu"), copies="to the host", compiles=False)
def offload(x: Tensor) -> Tensor:
    """Start copying a tensor to the host's memory; `arrived` must follow.

    On CUDA the memory is pinned, and the copy runs on its own stream, parallel to the work that follows here.
    """
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    return _start_copy(host, x, "out")


@operator(lambda host, device: torch.empty_like(host, device=device), copies="from the host", compiles=False)
def reload(host: Tensor, device_type: str) -> Tensor:
    """Start copying a tensor back to the device; `arrived` must follow."""
    return _start_copy(torch.empty_like(host, device=device_type), host, "in")


def _arrived(copy: Tensor, source: Tensor) -> Tensor:
    """Make the current stream wait for a copy, and return it. Afterwards its source may be freed: so neither copy needs
    memory that the allocator would keep until the host has seen it end."""
    if (event := _ENDS.pop(copy.data_ptr(), None)) is not None:
        event.wait()
    return copy


def _landed(copy: Tensor) -> Tensor:
    """Make the host wait for a copy that has `arrived` in its memory, and return it: the host may read it."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copy


_COPIES = torch.library.Library(_LIBRARY, "FRAGMENT")  # `custom_op` can't declare that a result is an argument
_COPIES.define("arrived(Tensor(a) copy, Tensor source) -> Tensor(a)")
_COPIES.define("landed(Tensor(a) copy) -> Tensor(a)")
for _name, _wait in (("arrived", _arrived), ("landed", _landed)):
    _COPIES.impl(_name, _wait, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY}::{_name}", lambda copy, source=None: copy)
arrived, landed = torch.ops.torchtitan_graph.arrived.default, torch.ops.torchtitan_graph.landed.default
declare(arrived, waits=True, compiles=False)
declare(landed, host_reads=0, compiles=False)

_ENDS: dict[int, torch.cuda.Event] = {}  # address of a copy -> its end event


def _start_copy(copy: Tensor, source: Tensor, way: str) -> Tensor:
    if not (copy.is_cuda or source.is_cuda):
        return copy.copy_(source)
    stream = _stream(way, torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())  # it computes the source, or still reads the copy's memory
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
    _ENDS[copy.data_ptr()] = stream.record_event()
    return copy


@functools.cache
def _stream(way: str, device: int) -> torch.cuda.Stream:
    """Return the stream of the copies out of a device, or into it: they may overlap."""
    return torch.cuda.Stream(device)
