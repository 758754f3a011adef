"""What the null GPU was asked to do. Only in a process that has it preloaded, see null_gpu.cpp."""

import collections
import ctypes
import re
import subprocess
from typing import NamedTuple

import torch

_LIBRARY = ctypes.CDLL("libcuda.so.1")  # the one that is there already
_LIBRARY.null_gpu_take.restype = _LIBRARY.null_gpu_take_sent.restype = ctypes.c_char_p

Counts = collections.Counter[str]


def become(word: str) -> None:
    """Answer as the GPU whose name has this word, "H100" or "A100", not as an H100: before torch asks."""
    assert not torch.cuda.is_initialized() and _LIBRARY.null_gpu_become(word.encode()), word


def take() -> Counts:
    """Give what happened since the last call, and how often: "kernel NAME <<<grid, block>>>", "product ...",
    "copy ...", "wait ...". Kernels have their mangled names."""
    lines = (line.split("\t", 1) for line in _LIBRARY.null_gpu_take().decode().splitlines())
    return collections.Counter({what: int(number) for number, what in lines})


class Message(NamedTuple):
    """What one call of NCCL sends: `number` elements, by this process, which is `rank` of the `size` of `group`; all
    of them know the group by that name. To or from `peer`, a rank of the group, or -1: all. Calls that NCCL takes
    together are of one `batch`."""

    group: str
    rank: int
    size: int
    batch: int
    kind: str
    dtype: str
    number: int
    peer: int


def take_sent() -> list[Message]:
    """Give what was sent since the last call, in order."""
    lines = [line.split("\t") for line in _LIBRARY.null_gpu_take_sent().decode().splitlines()]
    return [
        Message(group, int(rank), int(size), int(batch), kind, dtype, int(number), int(peer))
        for group, rank, size, batch, kind, dtype, number, peer in lines
    ]


def plain(names: list[str]) -> list[str]:
    """Give names as they are in the source, short enough to read."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"\(anonymous namespace\)::|at::native::", "", line)[:200] for line in text.splitlines()]


def tell(text: str) -> None:
    """Say something under the test's line of the report."""
    print(f"note: {text}", flush=True)
