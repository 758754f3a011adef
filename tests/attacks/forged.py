"""Forge small files of every kind that is read here, and read each: the answer is what it holds or a clear refusal.

    python tests/attacks/forged.py --number 10000 --seed 0

Each file is read in a forked process, within 10 seconds of a processor and 1 GiB. A fault is a file whose reader takes
longer or more, raises anything but a UserError, shows more than a screen of what the file says, or executes any of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import pickle
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import forge
import numpy as np
import torch
from torch import nn

from torchtitan_graph.analysis.flops import Flops
from torchtitan_graph.analysis.measured import measured
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.checkpoint import Checkpointer, best_checkpoint
from torchtitan_graph.checkpoint.folder import MANIFEST, checksum
from torchtitan_graph.checkpoint.metadata import METADATA
from torchtitan_graph.config import dump_toml, job, load
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.shards import INDEX as SHARDS_INDEX
from torchtitan_graph.data.shards import write_shards
from torchtitan_graph.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.evaluate.choices import read_questions
from torchtitan_graph.explorer.run import run_data
from torchtitan_graph.metrics.jsonl import append, begin
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import from_hf, to_hf
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.parallel.schedule import read_csv
from torchtitan_graph.plan.expert_loads import read_loads
from torchtitan_graph.rates import read_rates
from torchtitan_graph.run import lock as lock_module
from torchtitan_graph.run.drift import check_drift
from torchtitan_graph.run.failure import RESERVE, read_failures, write_failure
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.lock import Lock
from torchtitan_graph.run.status import FINISHED, Status
from torchtitan_graph.steps.precompiled import INDEX, Rewritten, Writer, open_precompiled, steps_to_data

REPOSITORY = Path(__file__).parents[2]
SECONDS, BYTES, SHOWN = 10, 2**30, 4000  # of a processor, of memory, of letters in a message
STALLED = 60  # seconds of the clock, on a busy machine


class Kind(NamedTuple):
    """A kind of file: how a sound one is made in a new folder, how it is changed, and how it is read."""

    make: Callable[[Path], Path]
    changes: tuple[forge.Bytes, ...]
    read: Callable[[Path], Any]
    is_small: bool = True  # else its size has no bound: text may have terabytes
    mend: Callable[[Path], None] | None = None  # sums of the folder that a forger would write again


def _text(content: str | bytes, name: str = "file") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def _read_corpus(path: Path) -> None:
    for split in ("train", "all"):
        corpus = open_corpus("", str(path), split, 0, RowFormat(ByteTokenizer()))
        for number, _ in enumerate(corpus.documents(0, 0, 0)):
            if number == 200:
                break


def _make_shards(folder: Path) -> Path:
    documents = [(i * 2**59 + 5, np.arange(3 + i, dtype=np.int64)) for i in range(12)]
    writing = write_shards(
        folder / "shards",
        lambda start: documents[start:],
        source_digest="0" * 64,
        splits=["train", "validation"],
        tokenizer=ByteTokenizer(),
    )
    for _ in writing:
        pass
    return folder / "shards"


def _in_shards(name: str) -> Callable[[Path], Path]:
    return lambda folder: _make_shards(folder) / name


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = llama3.Model(tiny_config(llama3.FLAVORS["debugmodel"]), "sdpa")
    model.init_weights() if hasattr(model, "init_weights") else None
    return model


def _checkpointer(folder: Path) -> Checkpointer:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, job.Optimizer())
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    return Checkpointer(folder, job.Checkpoint(enable=True, last_save_model_only=False), model, optimizer, scheduler)


def _make_checkpoint(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for step in (1, 2):
            _checkpointer(folder).save(step, {"step": step})
        return folder / "step-2" / name

    return make


def _read_checkpoint(path: Path) -> None:
    _checkpointer(path.parents[1]).load(10)


def _sum_again(path: Path) -> None:
    """Write the sums of a checkpoint's files as they are now."""
    manifest = path.parent / MANIFEST
    content = json.loads(manifest.read_text())
    if path.is_file() and not path.is_symlink() and path.stat().st_size < 10**8:
        content["files"][path.name], content["crc32"][path.name] = path.stat().st_size, checksum(path)
    manifest.write_text(json.dumps(content))


def _place_again(path: Path) -> None:
    """Set the length of the last tensor in a checkpoint's index to the rest of its file."""
    index = path.parent / METADATA
    with index.open("rb") as file:
        metadata = pickle.load(file)
    last = max(metadata.storage_data.values(), key=lambda info: info.offset)
    if path.is_file() and path.stat().st_size < 10**8:
        last.length = path.stat().st_size - last.offset
    with index.open("wb") as file:
        pickle.dump(metadata, file)
    _sum_again(index)
    _sum_again(path)


def _make_hf(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        to_hf(_model(), folder / "hf")
        if name.endswith("index.json"):
            weights = folder / "hf" / "model.safetensors"
            weights.rename(weights.with_name("part.safetensors"))
            names = _names_in(weights.with_name("part.safetensors"))
            content = {"metadata": {}, "weight_map": {each: "part.safetensors" for each in names}}
            (folder / "hf" / name).write_text(json.dumps(content))
        return folder / "hf" / name

    return make


def _names_in(path: Path) -> list[str]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [name for name in header if name != "__metadata__"]


_STEP = minimal_fx_tracer(lambda x: x.relu().sum())(torch.ones(3))
_LAYOUT: Any = SimpleNamespace(rank=lambda axis: 0, groups_by_place={})
_CPU = torch.device("cpu")


def _make_graphs(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        writer = Writer(folder / "graphs", {"torch": "2.13"})
        writer.add((0, 0), steps_to_data({0: Rewritten(_STEP, None, Flops(7, {"layers.0": 2}))}, _LAYOUT, {}, _CPU))
        writer.finish()
        return next((folder / "graphs").glob(name))

    return make


def _read_graphs(path: Path) -> None:
    graphs = open_precompiled(path.parent, {"torch": "2.13"}, "again")
    graphs.load({0: ((torch.ones(3),), None)}, _LAYOUT, {}, _CPU)


def _hash_again(path: Path) -> None:
    """Name the graphs' file by what it holds now, as a forger would."""
    content = path.read_bytes() if path.is_file() and path.stat().st_size < 10**7 else b""
    try:
        digest = hashlib.sha256(gzip.decompress(content)).hexdigest()
    except Exception:
        return
    index = path.parent / INDEX
    content = json.loads(index.read_text())
    content["graphs"] = {place: digest for place in content["graphs"]}
    index.write_text(json.dumps(content))
    path.rename(path.with_name(f"{digest}.json.gz"))


_QUESTIONS = (
    '{"question": "a", "choices": ["b", "c"], "answer": 1}\n{"prompt": "d", "choices": ["e", "f"], "answer": "e"}\n'
)


def _make_best(folder: Path) -> Path:
    (folder / "step-3").mkdir()
    path = folder / "best.json"
    path.write_text('{"metric": "validation_loss", "step": 3, "value": 2.5}\n')
    return path


def _made_by_run(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder = folder / "run"
        lock = Lock(folder)
        held_before = json.loads(lock.path.read_text()) | {"pid": 2**22 + 1}  # by a process that is gone
        Status(folder, 10).write()
        for step in range(1, 6):
            append(folder / "metrics.jsonl", {"step": step, "loss": 1.0 / step, "time": 2.0})
        (folder / "config.toml").write_text(dump_toml(load([])))
        write_failure(folder, RuntimeError("gone"), 1)
        lock.release()
        (folder / RESERVE).write_text("no folder")
        if name == "run.lock":
            (folder / name).write_text(json.dumps(held_before))
        return next(folder.glob(name))

    return make


def _read_folder(path: Path) -> None:
    with patch.object(lock_module, "_changed", lambda *_: None):  # without watching for minutes that nobody has it
        RunFolder(load(["--job.dump_folder", str(path.parent)])).close(FINISHED)


_TRACE = {
    "traceEvents": [
        {
            "ph": "X",
            "name": "add",
            "ts": 1.0,
            "dur": 2.0,
            "pid": 1,
            "tid": 1,
            "args": {"node": "add", "graph": "train"},
        },
        {"ph": "X", "name": "k", "ts": 1.5, "dur": 2.0, "pid": 1, "tid": 2, "args": {"correlation": 3}},
        {"ph": "M", "name": "process_name", "pid": 1},
    ]
}
_LOADS = "\n".join(
    json.dumps({"step": i, "loss": 1.0, "expert_loads": {"layers.0.moe": [1.0, 2.0, 3.0, 4.0]}}) for i in range(3)
)
_TEXT = "Once upon a time.\n\nThere was é a graph — 🙂.\n" * 40
_JSONL = "\n".join(json.dumps({"text": f"document {i} " * 9, "id": i}) for i in range(30))
_ASSETS = REPOSITORY / "tests/assets/tokenizer"


def _make_tokenizer(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(_ASSETS, folder / "tokenizer")
        return folder / "tokenizer" / name

    return make


def _read_tokenizer(path: Path) -> None:
    load_tokenizer(str(path.parent)).encode("Once upon a time " * 100)


_BYTES, _JSON = forge.bytes_changed, forge.json_changed
_SMALL = (_BYTES, _JSON, _JSON)

KINDS: dict[str, Kind] = {
    "config.toml": Kind(
        _text((REPOSITORY / "train_configs/llama3_debug.toml").read_bytes(), "job.toml"),
        (_BYTES, forge.toml_changed, forge.toml_changed),
        lambda path: load(["--job.config_file", str(path)]),
    ),
    "a run's config.toml": Kind(
        _made_by_run("config.toml"), (_BYTES, forge.toml_changed), lambda path: check_drift(path, load([]))
    ),
    "rates": Kind(
        lambda folder: Path(shutil.copy(REPOSITORY / "torchtitan_graph/rates/h100.toml", folder)),
        (_BYTES, forge.toml_changed),
        read_rates,
    ),
    "schedule.csv": Kind(_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), (_BYTES,), lambda path: read_csv(path, 2, 2)),
    "expert loads": Kind(_text(_LOADS, "loads.jsonl"), (_BYTES, forge.lines_changed), read_loads),
    "a profile": Kind(_text(json.dumps(_TRACE), "trace.json"), _SMALL, measured),
    "a zipped profile": Kind(
        _text(gzip.compress(json.dumps(_TRACE).encode()), "trace.json.gz"),
        (forge.zipped(_BYTES), forge.zipped(_JSON)),
        measured,
    ),
    "tokenizer.json": Kind(_make_tokenizer("tokenizer.json"), _SMALL, _read_tokenizer),
    "tokenizer_config.json": Kind(_make_tokenizer("tokenizer_config.json"), _SMALL, _read_tokenizer),
    "text": Kind(_text(_TEXT, "a.txt"), (_BYTES,), _read_corpus, is_small=False),
    "JSON lines": Kind(
        _text(_JSONL, "a.jsonl"), (_BYTES, forge.lines_changed, forge.lines_changed), _read_corpus, is_small=False
    ),
    "zipped JSON lines": Kind(
        _text(gzip.compress(_JSONL.encode()), "a.jsonl.gz"),
        (forge.zipped(_BYTES), forge.zipped(forge.lines_changed)),
        _read_corpus,
        is_small=False,
    ),
    "shards' index": Kind(_in_shards(SHARDS_INDEX), _SMALL, lambda path: _read_corpus(path.parent)),
    "shards' tokens": Kind(
        _in_shards("tokens-00000.npy"), (forge.npy_changed,), lambda path: _read_corpus(path.parent)
    ),
    "shards' ends": Kind(_in_shards("ends-00000.npy"), (forge.npy_changed,), lambda path: _read_corpus(path.parent)),
    "status.json": Kind(_made_by_run("status.json"), _SMALL, _read_folder),
    "run.lock": Kind(_made_by_run("run.lock"), _SMALL, _read_folder),
    "metrics.jsonl": Kind(_made_by_run("metrics.jsonl"), (_BYTES, forge.lines_changed), lambda path: begin(path, 3)),
    "records": Kind(
        _made_by_run("metrics.jsonl"),
        (_BYTES, forge.lines_changed),
        lambda path: run_data(path.parent, path.parent / "page.html"),
    ),
    "what has the reserve's name": Kind(_made_by_run(RESERVE), (_BYTES,), _read_folder),
    "a failure": Kind(_made_by_run("failures/*.json"), _SMALL, lambda path: read_failures(path.parents[1])),
    "best.json": Kind(_make_best, _SMALL, lambda path: best_checkpoint(path.parent)),
    "questions": Kind(_text(_QUESTIONS, "q.jsonl"), (_BYTES, forge.lines_changed), read_questions),
    "train_state.json": Kind(_make_checkpoint("train_state.json"), _SMALL, _read_checkpoint, mend=_sum_again),
    "a checkpoint's manifest": Kind(_make_checkpoint(MANIFEST), _SMALL, _read_checkpoint),
    "a checkpoint's index": Kind(
        _make_checkpoint(METADATA),
        (_BYTES, forge.pickle_changed, forge.pickle_changed, lambda _, chance: forge.pickle_bombs(chance)),
        _read_checkpoint,
        mend=_sum_again,
    ),
    "a checkpoint's tensors": Kind(
        _make_checkpoint("__0_0.distcp"),
        (_BYTES, forge.archive_changed, forge.archive_changed),
        _read_checkpoint,
        mend=_place_again,
    ),
    "graphs' index": Kind(_make_graphs(INDEX), _SMALL, _read_graphs),
    "graphs": Kind(
        _make_graphs("*.json.gz"), (forge.zipped(_BYTES), forge.zipped(_JSON)), _read_graphs, mend=_hash_again
    ),
    "config.json": Kind(_make_hf("config.json"), _SMALL, lambda path: from_hf(path.parent)),
    "model.safetensors": Kind(
        _make_hf("model.safetensors"), (forge.safetensors_changed,), lambda path: from_hf(path.parent)
    ),
    "safetensors' index": Kind(_make_hf("model.safetensors.index.json"), _SMALL, lambda path: from_hf(path.parent)),
}


@dataclasses.dataclass
class Outcome:
    """How the reading of one forged file ended."""

    kind: str
    number: int
    what: str  # "read", "refused", or a fault
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.what not in ("read", "refused")


def attack(kind: str, numbers: range, seed: int = 0) -> list[Outcome]:
    """Forge the files of these numbers, and read each in a forked process."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        sound = Path(name, "sound")
        sound.mkdir()
        path = KINDS[kind].make(sound)
        KINDS[kind].read(path)  # what nobody changed is read
        shutil.rmtree(sound)
        sound.mkdir()
        path = KINDS[kind].make(sound)
        left = list(numbers)
        while left:
            ended = _read_in_fork(kind, left, seed, sound, path.relative_to(sound), Path(name))
            found += ended
            left = left[len(ended) :]
    return found


def _read_in_fork(kind: str, numbers: list[int], seed: int, sound: Path, file: Path, folder: Path) -> list[Outcome]:
    """Read files in one process until one ends or stalls it; the last outcome says so."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _child(kind, numbers, seed, sound, file, folder, writing)
        except BaseException:  # of the forger, not of a reader
            traceback.print_exc(file=sys.__stdout__)
        finally:
            os._exit(0)
    os.close(writing)
    found, text, why = [], b"", "ended the process"
    while len(found) < len(numbers):
        ready, _, _ = select.select([reading], [], [], STALLED)
        if not ready:
            why = f"took more than {STALLED} s"
            break
        if not (more := os.read(reading, 2**16)):
            break
        text += more
        *lines, text = text.split(b"\n")
        found += [Outcome(kind, *json.loads(line)) for line in lines]
    os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if len(found) < len(numbers):
        found.append(Outcome(kind, numbers[len(found)], why, f"status {status}"))
    return found


def _child(kind: str, numbers: list[int], seed: int, sound: Path, file: Path, folder: Path, pipe: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2 * BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.chdir(folder)
    for number in numbers:
        forged = folder / f"forged{number}"
        shutil.copytree(sound, forged)
        what, detail = _read(KINDS[kind], random.Random(f"{kind} {seed} {number}"), forged, forged / file)
        shutil.rmtree(forged, ignore_errors=True)
        os.write(pipe, json.dumps([number, what, detail[:3000]]).encode() + b"\n")


def _read(kind: Kind, chance: random.Random, folder: Path, path: Path) -> tuple[str, str]:
    changed = ""
    if chance.random() < 0.04 and kind.is_small:
        changed = forge.put_no_file(path, chance)
    else:
        path.write_bytes(chance.choice(kind.changes)(path.read_bytes(), chance))
    if kind.mend:
        kind.mend(path)
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = _resident("VmRSS"), time.process_time()
    try:
        kind.read(path)
        what, detail = "read", ""
    except UserError as error:
        what, detail = "refused", str(error)
        if len(detail) > SHOWN:
            what = "shows too much"
        elif any(ord(letter) < 32 and letter not in "\n\t" for letter in detail):
            what = "shows control characters"
    except BaseException:
        what, detail = "traceback", traceback.format_exc()[-2500:]
    used, took = _resident("VmHWM") - before, time.process_time() - begin
    if used > BYTES:
        what, detail = "memory", f"{used / 2**20:.0f} MiB; {what} {detail}"
    elif took > SECONDS:
        what, detail = "time", f"{took:.0f} s of a processor; {what} {detail}"
    elif list(folder.parent.glob("*canary*")):
        what = "executed"
    return what, f"{changed} {detail}".strip()


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000, help="of files in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(KINDS), nargs="*", help="only of these kinds")
    parser.add_argument("--only", type=int, nargs="*", help="only the files of these numbers")
    parser.add_argument("--shown", type=int, default=3, help="faults to show of each kind and outcome")
    arguments = parser.parse_args()
    kinds = arguments.kind or list(KINDS)
    each = -(-arguments.number // len(kinds))
    faults = 0
    for kind in kinds:
        begin = time.monotonic()
        outcomes = attack(kind, arguments.only or range(each), arguments.seed)
        counts = Counter(outcome.what for outcome in outcomes)
        print(f"{kind:28} {dict(counts.most_common())} in {time.monotonic() - begin:.0f} s", flush=True)
        shown: Counter[str] = Counter()
        for outcome in filter(lambda each: each.is_fault, outcomes):
            faults += 1
            shown[outcome.what] += 1
            if shown[outcome.what] <= arguments.shown:
                print(f"  {outcome.number}: {outcome.what}: {outcome.detail}", flush=True)
    print(f"{each * len(kinds)} files, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
