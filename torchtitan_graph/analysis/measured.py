"""Measured seconds of graphs' nodes, by name, from a profile of real steps."""

from __future__ import annotations

import bisect
import collections
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from torch.fx import GraphModule

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.edit import shape_of
from torchtitan_graph.small_files import BadFile, gunzip, parse_json, read_small

_FOLDER = "**/step-*"  # of a step's traces, in profile_traces; earlier releases could name another folder
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# Unpacked; a step of 405B has 40,000 nodes, each with six events of 400 bytes and 40 values.
_MOST_BYTES, _MOST_VALUES = 256 * 2**20, 12_000_000
_MOST = 1e20  # microseconds: more than any clock's time

Event = Mapping[str, Any]


class _Trace(TypedDict):
    traceEvents: list[dict[str, Any]]


def has_traces(path: Path) -> bool:
    """Return whether a run's folder has any trace."""
    return any(path.glob(f"{_FOLDER}/rank*.json.gz"))


def find_trace(path: Path, rank: int, world_size: int) -> Path:
    """Return a rank's newest trace in the folder of a run of so many ranks; a file is returned as it is.

    Raises:
        UserError: there is none, or the run had another number of ranks.
    """
    if os.path.isfile(path):  # whatever its name
        return path
    traces_there = path.glob(f"{_FOLDER}/rank{rank}.json.gz") if os.path.isdir(path) else ()
    found = [(p.parent.name.removeprefix("step-"), p) for p in traces_there]
    traces = {int(step): trace for step, trace in found if step.isdecimal()}
    if not traces:
        raise UserError(
            f"{path}: is not a trace, and no run's folder with one of rank {rank}; a run with "
            "profiling.enable_profiling = true writes them"
        )
    trace = traces[max(traces)]
    if (num_ranks := len(list(trace.parent.glob("rank*.json.gz")))) != world_size:
        raise UserError(f"{trace}: the run had {num_ranks} ranks, not {world_size}; put NGPU={num_ranks} in front")
    return trace


def measured(trace: Path, gms: Sequence[GraphModule] = ()) -> dict[str, dict[str, float]]:
    """Return each node's seconds in a trace, by the graph's `meta["name"]`, then by the node's name: the mean over the
    recorded runs.

    On a CPU that is the time of the node's call, in which a `wait_tensor` waits for other ranks. Where anything ran on
    a GPU it is the sum of the kernels and copies that the call launched, which may run concurrently with those of other
    nodes.

    Args:
        trace: a file that `profiling.enable_profiling` wrote.
        gms: the graphs that were profiled, to be checked.

    Raises:
        UserError: the file is not a trace, has no events of nodes, or is of other graphs: a node was not measured,
            or had another shape.
    """
    events = _read(trace)
    calls = [event for event in events if {"node", "graph"} <= event["args"].keys()]
    if not calls:
        raise UserError(
            f"{trace}: no event names its node; profile with profiling.enable_profiling = true, "
            "compile.mode = 'graph' and compile.cuda_graphs = false"
        )
    on_gpu: dict[int, float] = collections.defaultdict(float)  # microseconds, by the number of their launch
    for event in events:
        if event.get("cat") in _ON_GPU and "correlation" in event["args"]:
            on_gpu[event["args"]["correlation"]] += event["dur"]
    took = _of_launches(calls, events, on_gpu) if on_gpu else [call["dur"] for call in calls]
    runs: dict[str, dict[str, list[float]]] = {}
    for call, microseconds in zip(calls, took, strict=True):
        runs.setdefault(call["args"]["graph"], {}).setdefault(call["args"]["node"], []).append(microseconds)
    values = {(call["args"]["graph"], call["args"]["node"]): call["args"].get("value") for call in calls}
    for gm in gms:
        _check_is_of(gm, values)
    return {graph: {node: sum(each) / len(each) / 1e6 for node, each in nodes.items()} for graph, nodes in runs.items()}


def _check_is_of(gm: GraphModule, values: Mapping[tuple[str, str], str | None]) -> None:
    """Raise a UserError for a profile of another graph of the same name. `values` are shapes by graph and node; parts
    of tuples are not measured."""
    name = gm.meta["name"]
    other = (
        "it is of another graph. Give the run's folder alone, whose config.toml says what was chosen where it ran: "
        "torchtitan_graph.show_graph --by scope --profile RUN, or torchtitan_graph.explore RUN; or profile"
        " a run of this configuration"
    )
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    if missing := [node for node in calls if (name, node.name) not in values]:
        graphs = ", ".join(sorted({graph for graph, _ in values}))
        raise UserError(
            f"the profile, of {graphs}, has nothing of {len(missing)} of the {len(calls)} nodes of {name}, such as "
            f"{missing[0]}: {other}"
        )
    for node in calls:
        was, now = values[name, node.name], shape_of(node.meta.get("val"))
        if was is not None and was != now:
            raise UserError(f"the profile's {node} of {name} is {was!s:.200}, and would be {now}: {other}")


def _read(trace: Path) -> list[Event]:
    """Return the events of a trace that have a duration, each with its `args`."""
    try:
        content = read_small(trace, _MOST_BYTES)
        text = gunzip(content, trace, _MOST_BYTES) if trace.suffix == ".gz" else content
        events = parse_json(text, _Trace, trace, _MOST_VALUES)["traceEvents"]
    except FileNotFoundError as error:
        raise UserError(f"{trace}: is not there") from error
    except (OSError, BadFile) as error:
        raise UserError(f"{trace}: is not a trace of torch's profiler ({error})") from error
    found: list[Event] = [{"args": {}, **event} for event in events if event.get("ph") == "X"]
    if strange := next((event for event in found if not _is_sound(event)), None):
        raise UserError(f"{trace}: is not a trace of torch's profiler (an event is {strange!r:.200})")
    return found


def _is_sound(event: Event) -> bool:
    """Return whether an event's fields are valid: times in microseconds, a thread, names, a launch's number."""
    args: Any = event["args"]
    times: list[Any] = [event.get("ts"), event.get("dur")]
    return (
        all(type(each) in (int, float) and 0 <= each < _MOST for each in times)
        and isinstance(args, dict)
        and all(isinstance(args[key], str) for key in ("node", "graph") if key in args)
        and all(isinstance(event.get(key), (int, str)) for key in ("pid", "tid"))
        and isinstance(args.get("correlation", 0), int)
    )


def _of_launches(calls: Iterable[Event], events: Iterable[Event], on_gpu: Mapping[int, float]) -> list[float]:
    """Return each call's microseconds on a GPU: of the kernels and copies launched while it ran, by its thread."""
    launches: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)  # by thread: when, microseconds
    for event in events:
        if event.get("cat") in _LAUNCHES and (number := event["args"].get("correlation")) in on_gpu:
            launches[event["pid"], event["tid"]].append((event["ts"], on_gpu[number]))
    for each in launches.values():
        each.sort()
    took = []
    for call in calls:
        of_thread = launches[call["pid"], call["tid"]]
        begin, end = (bisect.bisect_left(of_thread, (at,)) for at in (call["ts"], call["ts"] + call["dur"]))
        took.append(sum(microseconds for _, microseconds in of_thread[begin:end]))
    return took
