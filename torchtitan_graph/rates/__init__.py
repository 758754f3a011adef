"""Rates of devices and their networks, read from a file for each kind of machine, with its sources.

`h100.toml` in this folder is the device H100. A user's file has the same keys, all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_graph.errors import UserError
from torchtitan_graph.small_files import read_toml


class Rates(NamedTuple):
    """Peak rates of one device of a kind, in one direction; the share of each that is reached; and the number of
    devices in a machine.

    fp8, half, full   FLOP/s of products in float8, in bf16 and fp16, and in wider dtypes
    memory            bytes/s read and written
    memory_gib        GiB visible to torch
    reserved_gib      GiB of these not available to tensors: contexts, libraries' workspaces, the allocator's rounding
    near, far         bytes/s received from devices of the same machine, and from those of others
    host              bytes/s copied from the host's memory, or to it
    host_memory       bytes/s that the host reads and writes of its memory for each device
    num_near          devices in a machine
    product_share, fp8_share, attention_share, memory_share, network_share
                      the share of a peak that is reached; by products, by those in float8, by attention
    fusion_share      of the bytes that ideal fusion of neighbours would save, the share that a compiled
                      region saves
    message_share     the share of a device's arithmetic that a collective takes while it runs
    launch            seconds of the host to launch an operator
    kernel            least seconds of an operator
    near_hop, far_hop latency of a message in seconds, within a machine, and between two
    """

    name: str
    fp8: float
    half: float
    full: float
    memory: float
    memory_gib: float
    reserved_gib: float
    near: float
    far: float
    host: float
    host_memory: float
    num_near: int
    product_share: float
    fp8_share: float
    attention_share: float
    memory_share: float
    network_share: float
    fusion_share: float
    message_share: float
    launch: float
    kernel: float
    near_hop: float
    far_hop: float

    def peak(self, width: int) -> float:
        """Return the FLOP/s of products of numbers of `width` bytes."""
        return self.fp8 if width < 2 else self.half if width == 2 else self.full


_MAY_BE_ZERO = ("reserved_gib", "launch", "kernel", "near_hop", "far_hop", "fusion_share", "message_share")
_MOST_OF_MESSAGES = 0.9  # a device computes alongside its collectives
# The legal range of each figure, to detect one in another unit: 989 for 989e12 FLOP/s, 6 for 6e-6 s.
_UNITS: dict[str, tuple[str, float, float]] = {
    **dict.fromkeys(("fp8", "half", "full"), ("FLOP/s", 1e7, 1e19)),
    **dict.fromkeys(("memory", "near", "far", "host", "host_memory"), ("bytes/s", 1e5, 1e16)),
    **dict.fromkeys(("memory_gib", "reserved_gib"), ("GiB", 1e-3, 1e6)),
    **dict.fromkeys(("launch", "kernel", "near_hop", "far_hop"), ("seconds", 1e-12, 0.1)),
}


def read_rates(path: Path) -> Rates:
    """Return the rates in a device's file.

    Raises:
        UserError: it can't be read, a key is missing or unknown, or a value is not legal; names the file and the key.
    """
    try:
        table = read_toml(path)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
    for key in table:
        if key not in Rates._fields:
            near = difflib.get_close_matches(key, Rates._fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"legal are {', '.join(Rates._fields)}"
            raise UserError(f"{path}: {key}: unknown; {hint}")
    if missing := [key for key in Rates._fields if key not in table]:
        raise UserError(f"{path}: {', '.join(missing)}: missing; a file has all of {', '.join(Rates._fields)}")
    for key, value in table.items():
        if why := _problem(key, value):
            raise UserError(f"{path}: {key} = {_shown(value)}: must be {why}")
    values: dict[str, Any] = {key: float(x) if type(x) is int and key != "num_near" else x for key, x in table.items()}
    return Rates(**values)


def _shown(value: Any) -> str:
    # Python can't print integers of thousands of digits.
    return "a whole number" if type(value) is int and abs(value) >= 2**1000 else f"{value!r:.80}"


def _problem(key: str, value: Any) -> str | None:
    """Return what a key's value must be, None if it is legal."""
    if key == "name":
        return None if isinstance(value, str) and value.strip() else "a name"
    if key == "num_near":
        return None if type(value) is int and value > 0 else "a whole number of at least 1"
    is_number = type(value) in (int, float)
    if is_number and value == 0 and key in _MAY_BE_ZERO:
        return None
    or_zero = "0, or " if key in _MAY_BE_ZERO else ""
    if key == "message_share":
        return None if is_number and 0 < value <= _MOST_OF_MESSAGES else f"{or_zero}a part, up to {_MOST_OF_MESSAGES}"
    if key.endswith("_share"):
        return None if is_number and 1e-6 <= value <= 1 else f"{or_zero}a part, from 1e-06 to 1"
    unit, least, most = _UNITS[key]
    return None if is_number and least <= value <= most else f"{or_zero}{unit}, from {least:g} to {most:g}"


RATES: dict[str, Rates] = {each.name: each for each in map(read_rates, sorted(Path(__file__).parent.glob("*.toml")))}


def find_rates(name: str, legal: Sequence[str] = tuple(RATES)) -> Rates:
    """Return the rates of a device by its name, whatever its case, or by its file.

    Args:
        legal: the names that an error lists.

    Raises:
        UserError: there is no such device, or as `read_rates`.
    """
    known = {each.lower(): each for each in RATES}
    if name.lower() in known:
        return RATES[known[name.lower()]]
    if name.endswith(".toml"):
        found = read_rates(Path(name))
        if found.name == "CPU" and found != RATES["CPU"]:
            raise UserError(
                f"{name}: name = 'CPU': means this machine, where operators are timed, and figures not looked at;"
                " give your own another name"
            )
        return found
    names = [each.lower() for each in legal]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"--device {name!r}: no such device; legal are {', '.join(names)}, or a file such as my.toml{hint}")
