"""A job's steps in a folder, traced and rewritten beforehand: `python -m torchtitan_graph.precompile` writes it, and
training with `compile.precompiled` reads it.

    index.json             what the graphs were made for, and which rank has which
    HASH.json.gz           a rank's steps as data, by their SHA-256; ranks that have the same share a file

Nothing that these files say is run when they are read: see formats/as_data.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from torchtitan_graph.analysis.flops import Flops
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.as_data import NotStored, traced_from_data, traced_to_data
from torchtitan_graph.formats.malformed import Malformed
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.layout import PP, TP, Layout, ParallelDims
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.passes.tag_budget import Curve, Point
from torchtitan_graph.patience import why_unwritable
from torchtitan_graph.small_files import gunzip, parse_json, read_json, read_small, write_bytes
from torchtitan_graph.transient import is_transient

# Ranks with equal places on these axes have equal graphs: tests/numerics/test_precompiled.py traces all of them. A
# pipeline's rank has stages of its own. Along tp each has its own shard of the vocabulary, with another first row.
AXES = (PP, TP)

INDEX = "index.json"
_FORMAT = 3
# Limits of unpacked graphs. Those of 405B take 21 MB and 4 million values, which are 115 bytes and 21 values a node.
_MOST_BYTES, _MOST_VALUES = 128 * 2**20, 10_000_000
_MOST_BYTES_OF_INDEX = 4 * 2**20  # 80 bytes for a rank


class _Index(TypedDict):
    format: int
    fingerprint: dict[str, str]
    axes: list[str]
    graphs: dict[str, str]


class Rewritten(NamedTuple):
    """A model's steps, or those of one pipeline stage, after all passes but those that generate code."""

    train: TracedResult
    evaluate: TracedResult | None
    flops: Flops


def ranks_to_trace(dims: ParallelDims) -> dict[tuple[int, ...], int]:
    """Return one rank for each place on `AXES`, the first with it."""
    below = dims.dp_replicate * dims.fsdp * dims.tp  # ranks of a stage
    return {(p, t): p * below + t for p, t in itertools.product(range(dims.pp), range(dims.tp))}


def steps_to_data(
    steps: Mapping[int, Rewritten], layout: Layout, storages: Mapping[str, Storage], device: torch.device
) -> bytes:
    """Return a rank's steps, those of its stages by number, as a file's content.

    Raises:
        UserError: a graph holds something that can't be stored.
    """
    groups = {name: place for place, name in reversed(layout.groups_by_place.items())}

    def data(step: TracedResult) -> Any:
        try:
            if step.options or step.autocast:
                raise NotStored("a step under torch.autocast, or with an optimizer in it, can't be stored")
            return traced_to_data(step, groups, device, storages)
        except NotStored as error:
            raise UserError(
                f"compile.precompiled: {error}; train without it, then every rank traces for itself"
            ) from error

    stages = [
        [
            number,
            data(each.train),
            each.evaluate and data(each.evaluate),
            [each.flops.matmul, each.flops.attention],
            _curve_to_data(each.train.gm.meta.get("curve")),
        ]
        for number, each in steps.items()
    ]
    return json.dumps(stages, separators=(",", ":")).encode()


def _curve_to_data(curve: Curve | None) -> Any:
    return curve and [curve.points, curve.chosen, curve.flops]


def _curve_from_data(data: Any) -> Curve:
    points, chosen, flops = data
    return Curve([Point(*map(int, each)) for each in points], Point(*map(int, chosen)), int(flops))


class Writer:
    """Writer of a folder of graphs; the folder is valid once the last rank's are written.

    Raises:
        UserError: the folder is a file, or someone else's: what lies there would be lost.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, str]) -> None:
        self.folder, self._fingerprint = folder, fingerprint
        self._graphs: dict[str, str] = {}
        begin = f"compile.precompiled = {str(folder)!r}"
        try:  # now, not after minutes of tracing
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / INDEX).exists() and not any(map(_holds_graphs, folder.iterdir())):
                raise UserError(f"{begin}: its {INDEX} is not of graphs, and would be lost; name another folder")
            (folder / INDEX).unlink(missing_ok=True)
            (folder / f"{INDEX}.tmp").touch()
        except OSError as error:
            why = why_unwritable(folder, error) if error.filename == str(folder) else error
            raise UserError(f"{begin}: can't be written: {why}; name another folder") from error

    def add(self, place: tuple[int, ...], steps: bytes) -> None:
        digest = hashlib.sha256(steps).hexdigest()
        write_bytes(self.folder / f"{digest}.json.gz", gzip.compress(steps, compresslevel=6, mtime=0))
        self._graphs[_name(place)] = digest

    def finish(self) -> None:
        index = {"format": _FORMAT, "fingerprint": dict(self._fingerprint), "axes": AXES, "graphs": self._graphs}
        write_bytes(self.folder / INDEX, json.dumps(index, indent=1).encode())
        known = {f"{digest}.json.gz" for digest in self._graphs.values()}
        for path in self.folder.iterdir():  # of an earlier job
            if _holds_graphs(path) and path.name not in known:
                path.unlink()

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / f"{digest}.json.gz").stat().st_size for digest in set(self._graphs.values()))

    @property
    def num_different(self) -> int:
        return len(set(self._graphs.values()))


def _holds_graphs(path: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}\.json\.gz", path.name) is not None


def _name(place: tuple[int, ...]) -> str:
    return ",".join(map(str, place))


@dataclasses.dataclass(frozen=True)
class Precompiled:
    """A folder of graphs that was made for this job.

    again  the command that writes it again
    graphs  the hash of a rank's steps by its place on `AXES`
    """

    folder: Path
    again: str
    graphs: Mapping[str, str]

    def load(
        self, arguments: Mapping[int, Any], layout: Layout, storages: Mapping[str, Storage], device: torch.device
    ) -> dict[int, Rewritten]:
        """Return this rank's steps, read from the folder.

        Args:
            arguments: example arguments of the steps, by the stage's number: of training, of evaluation.

        Raises:
            UserError: the file is not there, or is not what `precompile` wrote.
        """
        begin = time.perf_counter()
        place = _name(tuple(layout.rank(axis) for axis in AXES))
        with _as_written(self.folder, self.again, f"the graphs of rank {place} on {', '.join(AXES)}"):
            digest = self.graphs[place]
            file = self.folder / f"{digest}.json.gz"
            text = gunzip(read_small(file), file, _MOST_BYTES)
            if hashlib.sha256(text).hexdigest() != digest:
                raise Malformed("its bytes are not those that were written")
            groups = layout.groups_by_place

            def step(data: Any, like: Any) -> TracedResult:
                return traced_from_data(data, like, {}, groups, device, storages)

            found = {}
            for number, train, evaluate, (matmul, attention), curve in parse_json(text, list[Any], file, _MOST_VALUES):
                if number in found:
                    raise Malformed("a stage that is there twice")
                like_train, like_evaluate = arguments[number]
                ready = step(evaluate, like_evaluate) if like_evaluate is not None else None
                found[number] = Rewritten(step(train, like_train), ready, Flops(matmul, attention))
                if curve is not None:
                    found[number].train.gm.meta["curve"] = _curve_from_data(curve)
            if found.keys() != arguments.keys():
                raise Malformed("other stages")
        num_nodes = sum(len(each.train.gm.graph.nodes) for each in found.values())
        logger.info(f"read from {self.folder} in {time.perf_counter() - begin:.1f} s, {num_nodes} nodes")
        return found


@contextlib.contextmanager
def _as_written(folder: Path, again: str, what: str) -> Iterator[None]:
    """Raise a UserError for an error inside, unless transient: the file is missing or altered; names the command."""
    begin = f"compile.precompiled = {str(folder)!r}: {what}"
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{begin}: {error.filename} is not there. Make it: {again}") from error
    except Exception as error:
        if is_transient(error):
            raise
        why = f"{type(error).__name__}: {error!s:.500}"
        raise UserError(f"{begin}: not what was written ({why}). Make it again: {again}") from error


def open_precompiled(folder: Path, fingerprint: Mapping[str, str], again: str) -> Precompiled:
    """Check a folder of graphs against a job's fingerprint, and return it.

    Args:
        fingerprint: the fingerprint of this run's graphs.
        again: the command that makes the folder.

    Raises:
        UserError: it is missing, is not what `precompile` wrote, or has another fingerprint; names the difference.
    """
    with _as_written(folder, again, INDEX):
        index = read_json(folder / INDEX, _Index, _MOST_BYTES_OF_INDEX)
        if index["format"] != _FORMAT or tuple(index["axes"]) != AXES:
            raise Malformed("of another release")
        made_for = index["fingerprint"]
        graphs = {place: _digest(digest) for place, digest in index["graphs"].items()}
    differ = [key for key in {**fingerprint, **made_for} if fingerprint.get(key) != made_for.get(key)]
    if differ:
        shown = [
            f"{_short(key)} is {_short(fingerprint.get(key))}, was {_short(made_for.get(key))}" for key in differ[:8]
        ]
        more = [f"and {len(differ) - 8} more"] if len(differ) > 8 else []
        raise UserError(
            f"compile.precompiled = {str(folder)!r}: its graphs were made for something else: "
            f"{'; '.join(shown + more)}. Make them again: {again}"
        )
    return Precompiled(folder, again, graphs)


def _digest(x: Any) -> str:
    if not (isinstance(x, str) and re.fullmatch(r"[0-9a-f]{64}", x)):
        raise Malformed(f"the hash {x!r:.80}")
    return x


def _short(x: str | None) -> str:
    return "not there" if x is None else x if len(x) <= 100 else f"{x[:97]}..."
