"""Uneven loads of experts: the rows of the busiest rank, and their cost.

Note [Busiest rank]
Each rank of ep holds as many experts, in their order. A rank's rows are those sent to its experts: with even loads,
equally many on each, as a forecast assumes. All ranks wait for the one with most rows, at the exchange that brings
results home and in backward again. So the time of an experts' layer, with its exchanges, is multiplied by the busiest
rank's rows over the mean, layer by layer; and so is that rank's memory of these rows. Of an exchange by machine the hop
between machines is too, though a machine's ranks even out. Without expert parallelism a rank has all experts, and the
same number of rows for any loads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.liveness import held_memory, size_of
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.collectives import with_dynamic_rows
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.moe import MoE
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.small_files import ANY_SIZE, MAX_BYTES, BadFile, open_small, parse_json, read_small

ALL_LAYERS = ""
_MOST = 1e200  # limit of a load: the sum of all is a float too


class Busiest(NamedTuple):
    """The busiest rank of ep in a layer: its index, and its rows over the ranks' mean."""

    rank: int
    over_mean: float


def read_loads(path: Path) -> dict[str, list[float]]:
    """Return the experts' loads by layer, read from a file.

    JSON: a list with a number for each expert, for every layer (then under `ALL_LAYERS`), or lists by the layers'
    names, as {"layers.1": [...]}. Or the metrics.jsonl of a run with metrics.log_expert_loads: its last record that has
    them. Only their proportions count.

    Raises:
        UserError: it can't be read, or is none of these; names the file, and what is wrong.
    """
    where = f"--expert_load {str(path)!r}"
    try:
        found = _last_record(path, where) if path.suffix == ".jsonl" else _read_json(path, where)
    except OSError as error:
        raise UserError(f"{where}: can't be read ({error})") from error
    except BadFile as error:  # its text begins with the path, or with `where`
        raise UserError(f"{where}: {str(error).removeprefix(where + ': ')}") from error
    by_layer = found if isinstance(found, dict) else {ALL_LAYERS: found}
    for layer, loads in by_layer.items():
        if not _are_loads(loads):
            of = f" of {layer!r:.80}" if layer else ""
            raise UserError(
                f"{where}: the loads{of} must be a list, for each expert a number from 0 to {_MOST:g}, not all 0"
            )
    if not by_layer:
        raise UserError(f"{where}: has no layer")
    return {layer: [float(x) for x in loads] for layer, loads in by_layer.items()}


def _last_record(path: Path, where: str) -> Any:
    """Return the loads in the last record with any, of a file's last 64 MiB: a long run has very many earlier ones."""
    with open_small(path, ANY_SIZE) as file:
        begin = max(0, file.seek(0, os.SEEK_END) - MAX_BYTES)
        file.seek(begin)
        lines = file.read(MAX_BYTES).split(b"\n")
    for line in reversed(lines):
        if b'"expert_loads"' in line:
            with contextlib.suppress(BadFile):  # a line may be torn, or being written
                if "expert_loads" in (record := parse_json(line, dict[str, Any], where)):
                    return record["expert_loads"]
    of = f" of its last {MAX_BYTES // 2**20} MiB, which are read," if begin else ""
    raise UserError(f"{where}: no record{of} has expert_loads; train with metrics.log_expert_loads = true")


def _read_json(path: Path, where: str) -> Any:
    """Return parsed JSON in which no object has a key twice."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise UserError(f"{where}: {twice!r:.80} is there twice")
        return dict(pairs)

    content = read_small(path)
    parse_json(content, Any, where)  # type: ignore[arg-type]
    return json.loads(content, object_pairs_hook=table)


def _are_loads(loads: object) -> bool:
    return (
        isinstance(loads, list)
        and all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x <= _MOST for x in loads)
        and any(loads)
    )


def busiest(loads_E: Sequence[float], ep: int) -> Busiest:
    """Return the rank of ep that gets most rows. See Note [Busiest rank]."""
    each = len(loads_E) // ep
    rows = [sum(loads_E[rank * each : (rank + 1) * each]) for rank in range(ep)]
    rank = max(range(ep), key=rows.__getitem__)
    return Busiest(rank, rows[rank] * ep / sum(rows))


def experts_of(model: Decoder) -> dict[str, int]:
    """Return the number of experts of each layer that has any, by name."""
    modules = dict(model.named_modules())
    ours = {name.removesuffix(".moe"): m.config.num_experts for name, m in modules.items() if isinstance(m, MoE)}
    return ours | {name: m.all_experts for name, m in modules.items() if hasattr(m, "all_experts")}  # type: ignore


def busiest_by_layer(loads: Mapping[str, Sequence[float]], layers: Mapping[str, int], ep: int) -> dict[str, Busiest]:
    """Return the busiest rank of each layer.

    Args:
        loads: result of `read_loads`.
        layers: the number of experts of each layer that has any, by name.

    Raises:
        UserError: a layer's loads are missing, are of other experts, or of a layer that has none.
    """
    if not layers:
        raise UserError("--expert_load: this model has no experts; leave it out")
    if unknown := next((name for name in loads if name not in (ALL_LAYERS, *layers)), None):
        raise UserError(f"--expert_load: {unknown} has no experts; layers that do are {', '.join(layers)}")
    found = {}
    for name, num_experts in layers.items():
        of_layer = loads.get(name, loads.get(ALL_LAYERS))
        if of_layer is None:
            raise UserError(f"--expert_load: no loads of {name}; layers with experts are {', '.join(layers)}")
        if len(of_layer) != num_experts:
            raise UserError(f"--expert_load: {len(of_layer)} loads of {name}, which has {num_experts} experts")
        found[name] = busiest(of_layer, ep)
    return found


def layer_of(node: Node, layers: Iterable[str]) -> str | None:
    """Return the one of these layers whose experts a node belongs to, or whose exchange; None outside of experts."""
    name = f"{meta.module(node)}."
    if ".experts." not in name and node not in _of_exchanges(node.graph):
        return None
    return next((layer for layer in layers if name.startswith(f"{layer}.")), None)


@functools.lru_cache(maxsize=8)
def _of_exchanges(graph: Graph) -> frozenset[Node]:
    """Return the nodes of a finished graph whose rows depend on data, and the exchanges of such rows."""
    return frozenset(with_dynamic_rows(graph.nodes)) | {n for n in graph.nodes if exchanges_rows(n)}


def exchanges_rows(node: Node) -> bool:
    """Return whether a node is a collective of which the host reads how many rows it sends."""
    op = operator_of(node.target)
    return op.collective is not None and op.host_reads is not None


def uneven(even: Costs, found: Mapping[str, Busiest]) -> Costs:
    """Return the cost model on the busiest rank of each layer, given that of even loads. Gathers of weights and
    reductions of their gradients are unchanged."""
    return replace(even, factor=lambda node: _over_mean(node, found) if meta.role(node) is None else 1.0)


def rows_sent(gm: GraphModule) -> int:
    """Return the rows that a graph sends to experts in one exchange, which are a rank's rows with even loads; 0 without
    an exchange."""
    rows = with_dynamic_rows(gm.graph.nodes)
    return next((node.meta["val"].shape[0] for node in gm.graph.nodes if node in rows), 0)


def peak_with_loads(gm: GraphModule, found: Mapping[str, Busiest]) -> int:
    """Return a graph's peak memory in bytes on the busiest rank."""

    rows = with_dynamic_rows(gm.graph.nodes)

    def size(node: Node) -> int:
        return math.ceil(size_of(node) * (_over_mean(node, found) if node in rows else 1.0))

    return max(held_memory(gm, size).values())


def _over_mean(node: Node, found: Mapping[str, Busiest]) -> float:
    layer = layer_of(node, found)
    return 1.0 if layer is None else found[layer].over_mean
