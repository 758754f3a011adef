"""Files of a checkpoint, a release, precompiled graphs or a profile, forged: each is taken or refused, no more.

They are changed by grammar (a value of a JSON text is another) and by bytes. A checkpoint's index has tests of its own.
"""

import copy
import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.checkpoint.folder import MANIFEST, TRAIN_STATE
from torchtitan_graph.checkpoint.stored_part import read_stored
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.flops import Flops
from torchtitan_graph.graph.measured import measured
from torchtitan_graph.graph.trace import minimal_fx_tracer
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import from_hf, to_hf
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.steps.precompiled import INDEX, Rewritten, Writer, open_precompiled, steps_to_data

NUM_FORGED = 300  # of each kind
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    2**80,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "3",
    "../x",
    "/x",
]
ODD += ["x" * 300, "\0", "\udcff", [], {}, [[]], [-1], {"x": 1}, {"": []}, 10**290, [0] * 1000]


def places(data: Any) -> list[tuple[Any, Any]]:
    """Give every (container, key) in a tree."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else []
    return [place for key in keys for place in ((data, key), *places(data[key]))]


def forged_json(content: bytes, chance: random.Random) -> bytes:
    """Change one to three values, or take them away, or change bytes."""
    if chance.random() < 0.3:
        return forged_bytes(content, chance)
    data = copy.deepcopy(json.loads(content))
    for _ in range(chance.choice([1, 1, 2, 3])):
        if there := places(data):
            container, key = chance.choice(there)
            if chance.random() < 0.2:
                del container[key]
            else:
                container[key] = copy.deepcopy(chance.choice(ODD))
    return json.dumps(data).encode()


def forged_bytes(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice([1, 2, 8])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.2 else changed)


def end(attempt: Callable[[], Any], *others: type[Exception]) -> str:
    try:
        attempt()
    except (UserError, *others) as error:
        assert len(str(error)) < 5000
        return "refused"
    return "taken"


# Each gives the file to forge, how it is forged, and what opens it.
Case = tuple[Path, Callable[[bytes, random.Random], bytes], Callable[[], Any]]


def of_checkpoint(name: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        def run() -> Checkpointer:
            model = nn.Linear(2, 2)
            optimizer = build_optimizer(model, job.Optimizer())
            schedule = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
            return Checkpointer(folder, job.Checkpoint(enable=True), model, optimizer, schedule)

        progress = {"step": 2, "tokens_seen": 8, "tokens_by_source": {"a": 3}, "rng": "00ff"}
        position = {"rows": 1, "lanes": [[1, 0, 0, 0]], "mixture": {"weights": [1.0], "since": 0}}
        position["mixture"] |= {"given_before": [0], "given": [1]}  # type: ignore[operator]
        run().save(2, {**progress, "data": position})
        manifest = folder / "step-2" / MANIFEST
        sizes = json.loads(manifest.read_text())["files"]

        def load() -> None:
            if name != MANIFEST:
                now = {each: (folder / "step-2" / each).stat().st_size for each in sizes}
                manifest.write_text(json.dumps({"files": now}))  # as one who means harm would
            run().load()

        return folder / "step-2" / name, forged_json, load

    return make


def of_precompiled(folder: Path) -> tuple[Path, Path, Callable[[], Any]]:
    x, layout = torch.ones(3), SimpleNamespace(rank=lambda axis: 0, groups_by_place={})
    step, device = minimal_fx_tracer(lambda x: x.relu().sum())(x), torch.device("cpu")
    writer = Writer(folder, {"torch": "2.13"})
    writer.add((0, 0), steps_to_data({0: Rewritten(step, None, Flops(7, {"layers.0": 2}))}, layout, {}, device))  # type: ignore[arg-type]
    writer.finish()
    (graphs,) = folder.glob("*.json.gz")

    def take() -> None:
        open_precompiled(folder, {"torch": "2.13"}, "this").load({0: ((x,), None)}, layout, {}, device)  # type: ignore[arg-type]

    return folder / INDEX, graphs, take


def index_of_graphs(folder: Path) -> Case:
    index, _, take = of_precompiled(folder)
    return index, forged_json, take


def graphs(folder: Path) -> Case:
    index, graphs, take = of_precompiled(folder)

    def with_its_hash() -> None:
        text = gzip.decompress(graphs.read_bytes())
        digest = hashlib.sha256(text).hexdigest()
        (folder / f"{digest}.json.gz").write_bytes(gzip.compress(text))
        index.write_text(json.dumps(json.loads(index.read_text()) | {"graphs": {"0,0": digest}}))
        take()

    return graphs, lambda content, chance: gzip.compress(forged_json(gzip.decompress(content), chance)), with_its_hash


def packed_graphs(folder: Path) -> Case:
    _, graphs, take = of_precompiled(folder)
    return graphs, forged_bytes, take


def of_release(name: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        model = llama3.Model(tiny_config(llama3.FLAVORS["debugmodel"], vocab_size=32, num_layers=1))
        initialize(model, 0)
        to_hf(model, folder / "hf")
        if name.endswith(".index.json"):
            names = [*json_header(folder / "hf" / "model.safetensors")]
            (folder / "hf" / "model.safetensors").rename(folder / "hf" / "a.safetensors")
            index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
            (folder / "hf" / name).write_text(json.dumps(index))
        forge = forged_header if name.endswith(".safetensors") else forged_json
        return folder / "hf" / name, forge, lambda: from_hf(folder / "hf")

    return make


def json_header(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return {key: x for key, x in json.loads(content[8 : 8 + size]).items() if key != "__metadata__"}


def forged_header(content: bytes, chance: random.Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = forged_json(content[8 : 8 + size], chance)
    said = len(header) if chance.random() < 0.9 else chance.choice([0, 1, 2**40, 2**63])
    return said.to_bytes(8, "little") + header + content[8 + size :]


def quantized(folder: Path) -> Case:
    case = of_release("model.safetensors")(folder)
    extra = {"lm_head.weight_scale_inv": torch.ones(1, 1), "x_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)}
    save_file(extra | {"x_scales": torch.zeros(1, 2, 3, dtype=torch.uint8)}, case[0])
    return case[0], forged_header, lambda: from_hf(folder / "hf", quantized=True)


def trace(folder: Path) -> Case:
    call = {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 1}
    call["args"] = {"node": "mm", "graph": "step", "value": "float32[3]"}
    launch = call | {"cat": "cuda_runtime", "args": {"correlation": 3}}
    kernel = call | {"cat": "kernel", "args": {"correlation": 3}}
    file = folder / "rank0.json"
    file.write_text(json.dumps({"traceEvents": [call, launch, kernel, {"ph": "M"}]}))
    return file, forged_json, lambda: measured(file)


def stored_part(folder: Path) -> Case:
    file = folder / "__0_0.distcp"
    torch.save(torch.arange(6.0), file)

    def read() -> None:
        content = file.read_bytes()
        found = read_stored(io.BytesIO(content), 0, len(content), torch.Size([6]), torch.float32)
        assert found.shape == (6,) and found.untyped_storage().nbytes() <= len(content)

    return file, forged_bytes, read


CASES: dict[str, Callable[[Path], Case]] = {
    "train state": of_checkpoint(TRAIN_STATE),
    "manifest": of_checkpoint(MANIFEST),
    "part of a tensor": stored_part,
    "index of graphs": index_of_graphs,
    "graphs": graphs,
    "packed graphs": packed_graphs,
    "config.json": of_release("config.json"),
    "safetensors": of_release("model.safetensors"),
    "index of safetensors": of_release("model.safetensors.index.json"),
    "quantized": quantized,
    "trace": trace,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_a_forged_file_is_what_it_was_or_refused(what: str, tmp_path: Path) -> None:
    file, forge, attempt = CASES[what](tmp_path)
    whole, chance, outcomes = file.read_bytes(), random.Random(what), []
    # A part of a tensor is opened by a reader that takes any error for damage.
    others = (Exception,) if what == "part of a tensor" else ()
    for _ in range(NUM_FORGED):
        file.write_bytes(forge(whole, chance))
        outcomes.append(end(attempt, *others))
    assert outcomes.count("refused") > NUM_FORGED // 10, outcomes
