"""Health of a node's GPUs, read from NVIDIA's tools and the kernel's log, for the preflight.

What is read, and where NVIDIA documents it:

- `nvidia-smi --query-gpu` and `--query-remapped-rows`: `--help-query-gpu`, `--help-query-remapped-rows`, and the manual
  page, docs.nvidia.com/deploy/nvidia-smi. Older drivers say clocks_throttle_reasons for clocks_event_reasons.
- `nvidia-smi nvlink -s`: the same page.
- Xid errors, of `dmesg`, or where it may not be read of `journalctl`: docs.nvidia.com/deploy/xid-errors, the Xid
  catalog.
- `dcgmi diag -r 1 -j`: checks of some seconds without load; docs.nvidia.com/datacenter/dcgm, "dcgmi diag" and
  "Diagnostic Errors". Its JSON has no stable form.

A tool that is missing or fails says nothing about the GPUs: it is named as not read.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

READ_WITHIN_S = 15.0  # all tools together; they run side by side
HOT_C = 85  # before training: a GPU that does nothing is far below
XID_WITHIN_S = 3600.0  # an older error may have been repaired since by a reset

# Fields of nvidia-smi: the least value that is bad (Yes and Active count as 1), and what to do.
_OF_GPU = {
    "ecc.errors.uncorrected.volatile.total": (1, "reset the GPU or reboot the node; replace a GPU that has them again"),
    "retired_pages.pending": (1, "reboot the node, which retires the pages"),
    "temperature.gpu": (HOT_C, "look at the node's cooling"),
    "clocks_event_reasons.hw_slowdown": (1, "the GPU runs slower: look at cooling and power supply"),
    "clocks_event_reasons.hw_thermal_slowdown": (1, "the GPU is too hot and runs slower: look at the node's cooling"),
    "clocks_event_reasons.hw_power_brake_slowdown": (1, "the node's power supply slows the GPU: look at it"),
}
_OF_ROWS = {
    "remapped_rows.pending": (1, "reset the GPU, which remaps the rows"),
    "remapped_rows.failure": (1, "replace the GPU: it has no spare rows for broken ones"),
}
_LOST = ("GPU requires reset", "GPU is lost")  # in place of a value

# Xid errors after which a GPU has to be reset or replaced. Others come from the program, or are shown by fields above.
_XIDS = {
    46: "the GPU stopped processing",
    48: "an uncorrectable memory error",
    62: "its microcontroller halted",
    64: "a row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "an unrecovered memory error",
    143: "the GPU could not be initialized",
}
_XID_LINE = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \((?:PCI:)?([^)]+)\): (\d+)")

_TO_ISOLATE = (2, 6)  # DCGM_ERROR_ISOLATE and DCGM_ERROR_RESET; others are settings, or to be watched
_OF_HARDWARE = ("Page Retirement/Row Remap", "Inforom")  # tests of releases whose warnings have no severity


class Health(NamedTuple):
    """What the tools say: problems in words, the number of active NVLinks by GPU, and what was not read and why."""

    problems: list[str]
    links: dict[str, int]
    not_read: list[str]


class _NotReadError(Exception):
    """Error: a tool gave no usable answer."""


Run = Callable[..., str]  # a command's words -> its output


def read_gpus() -> Health:
    """Read the health of all GPUs that nvidia-smi shows on this node, within READ_WITHIN_S."""
    deadline = time.monotonic() + READ_WITHIN_S

    def run(*command: str) -> str:
        return _output(command, deadline)

    parts: dict[str, Callable[[], Any]] = {
        "nvidia-smi --query-gpu": lambda: _bad_fields(run, "gpu", "index", _OF_GPU),
        "nvidia-smi --query-remapped-rows": lambda: _bad_fields(run, "remapped-rows", "gpu_bus_id", _OF_ROWS),
        "Xid errors": lambda: _xids(_kernel_log(run), time.monotonic()),
        "dcgmi diag": lambda: _diagnosed(run("dcgmi", "diag", "-r", "1", "-j")),
        "nvidia-smi nvlink": lambda: active_links(run("nvidia-smi", "nvlink", "-s")),
    }
    health = Health([], {}, [])
    with ThreadPoolExecutor(len(parts)) as pool:
        for name, future in {name: pool.submit(read) for name, read in parts.items()}.items():
            try:
                found = future.result()
            except _NotReadError as error:
                health.not_read.append(f"{name} ({error})")
            else:
                health.links.update(found) if isinstance(found, dict) else health.problems.extend(found)
    return health


def _output(command: tuple[str, ...], deadline: float) -> str:
    """Return all that a command prints, whatever its exit code: nvidia-smi's is also that of a mere warning."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
    except FileNotFoundError as error:
        raise _NotReadError("not installed") from error
    except OSError as error:
        raise _NotReadError(error.strerror or str(error)) from error
    try:
        return process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # no longer: a call into a dead driver can't be killed
        assert process.stdout is not None
        process.stdout.close()
        raise _NotReadError(f"no answer in {READ_WITHIN_S:.0f} s") from error


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no output")[:200]


def _bad_fields(run: Run, kind: str, name_of_gpu: str, limits: dict[str, tuple[int, str]]) -> list[str]:
    """Return the bad fields of all GPUs in words; a field that the driver does not know is left out."""
    fields = {field: field for field in limits}  # as asked for
    while True:
        words = ",".join([name_of_gpu, *fields.values()])
        text = run("nvidia-smi", f"--query-{kind}={words}", "--format=csv,noheader,nounits")
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        field = unknown and next((field for field, asked in fields.items() if asked == unknown[1]), None)
        if not field:
            break
        older = field.replace("clocks_event_reasons", "clocks_throttle_reasons")
        if fields.pop(field) != older:
            fields[field] = older
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 1 + len(fields)]
    if not rows or not fields:
        raise _NotReadError(_first_line(text))
    found = []
    for gpu, *values in rows:
        lost = [value.strip("[]") for value in values if value.strip("[]") in _LOST]
        if lost:
            found.append(f"GPU {gpu}: nvidia-smi says: {lost[0]}; reset it or reboot the node")
        for field, value in zip(fields, values, strict=True):
            least, what_to_do = limits[field]
            amount = _amount(value)
            if amount is not None and amount >= least:
                found.append(f"GPU {gpu}: {field} is {value}: {what_to_do}")
    return found


def _amount(value: str) -> float | None:
    """Return a field's value as a number, and None for one that the GPU does not have: [N/A], [Not Supported]."""
    words = {"Yes": 1.0, "Active": 1.0, "No": 0.0, "Not Active": 0.0}
    try:
        return words[value] if value in words else float(value)
    except ValueError:
        return None


def active_links(text: str) -> dict[str, int]:
    """Return the number of active NVLinks by GPU, of the output of `nvidia-smi nvlink -s`."""
    links: dict[str, int] = {}
    for line in text.splitlines():
        if gpu := re.match(r"\s*GPU (\d+):", line):
            links[gpu[1]] = 0
        elif links and (rate := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)) and float(rate[1]):
            links[[*links][-1]] += 1
    if not links:
        raise _NotReadError(_first_line(text))
    return links


def _kernel_log(run: Run) -> str:
    """Return the kernel's messages, with the seconds since the node's start."""
    why = []
    for command in ("dmesg",), ("journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager"):
        try:
            text = run(*command)
        except _NotReadError as error:
            why.append(f"{command[0]}: {error}")
            continue
        if re.search(r"^\[\s*\d+\.\d+\]", text, re.MULTILINE):
            return text
        why.append(f"{command[0]}: {_first_line(text)}")
    raise _NotReadError("; ".join(why))


def _xids(text: str, now: float) -> list[str]:
    """Return the serious Xid errors of the last hour in words, each once."""
    found = {(gpu, int(xid)) for at, gpu, xid in _XID_LINE.findall(text) if now - float(at) < XID_WITHIN_S}
    return [
        f"GPU at {gpu}: Xid {xid} in the last hour: {_XIDS[xid]}; reset it or reboot the node"
        for gpu, xid in sorted(found)
        if xid in _XIDS
    ]


def _diagnosed(text: str) -> list[str]:
    """Return the failures of the hardware in the output of `dcgmi diag -j`, of DCGM 3 or 4."""
    try:
        document = json.loads(text[text.index("{") : text.rindex("}") + 1])
        document = document.get("DCGM Diagnostic") or document.get("DCGM GPU Diagnostic")
        tests = [test for category in document["test_categories"] for test in category["tests"] if test]
        return [
            f"GPU {result.get('gpu_ids', result.get('entity_id'))}: dcgmi diag: {test['name']} failed: {warning}"
            for test in tests
            for result in test["results"]
            if result["status"].lower() == "fail"
            for warning in _serious(test["name"], result.get("warnings", []))
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _NotReadError(_first_line(text)) from error


def _serious(test: str, warnings: Any) -> Iterator[str]:
    for each in [warnings] if isinstance(warnings, str) else warnings:
        if isinstance(each, str):
            each = {"warning": each, "error_severity": _TO_ISOLATE[0] if test in _OF_HARDWARE else None}
        if each.get("error_severity") in _TO_ISOLATE:
            yield each["warning"]
