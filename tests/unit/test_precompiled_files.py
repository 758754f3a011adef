"""A folder of graphs: whose it is, and what is said of one that is broken."""

import gzip
import hashlib
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_graph.analysis.flops import Flops
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.config import JobConfig, load
from torchtitan_graph.device import Target
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import llama3
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.passes.tag_budget import Curve, Point
from torchtitan_graph.steps import step_options
from torchtitan_graph.steps.fingerprint import fingerprint
from torchtitan_graph.steps.precompiled import INDEX, Rewritten, Writer, open_precompiled, steps_to_data

CPU, X = torch.device("cpu"), torch.ones(3)
LAYOUT: Any = SimpleNamespace(rank=lambda axis: 0, groups_by_place={})
JOB = {"torch": "2.13", "training.seq_len": "64"}
AGAIN = "run this"
CURVE = Curve([Point(3, 4, 0), Point(1, 2, 5)], Point(2, 3, 2), 100)


def written(folder: Path) -> Path:
    step = minimal_fx_tracer(lambda x: x.relu().sum())(X)
    step.gm.meta["curve"] = CURVE
    writer = Writer(folder, JOB)
    writer.add((0, 0), steps_to_data({0: Rewritten(step, None, Flops(7, {"layers.0": 2}))}, LAYOUT, {}, CPU))
    writer.finish()
    return folder


def taken(folder: Path) -> Rewritten:
    return open_precompiled(folder, JOB, AGAIN).load({0: ((X,), None)}, LAYOUT, {}, CPU)[0]


def graph_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json.gz")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / f"{'0' * 64}.json.gz").write_text("of a job before")
    found = taken(written(tmp_path))
    assert found.flops == Flops(7, {"layers.0": 2}) and found.evaluate is None
    assert found.train.gm.meta["curve"] == CURVE, "it can be told and drawn"
    assert found.train.gm(X)[0] == 3 and graph_file(tmp_path).exists()


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (JOB | {"torch": "2.15"}, "torch is 2.15, was 2.13. Make them again: run this"),
        (JOB | {"training.seq_len": "128"}, "training.seq_len is 128, was 64"),
        (JOB | {"training.new": "1"}, "training.new is 1, was not there"),
        ({"torch": "2.13"}, "training.seq_len is not there, was 64"),
        ({str(i): "" for i in range(20)}, "and 14 more"),
    ],
)
def test_what_was_made_for_another_job_is_refused(tmp_path: Path, job: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_precompiled(written(tmp_path), job, AGAIN)


def test_a_folder_without_graphs_says_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="index.json is not there. Make it: run this"):
        taken(tmp_path)
    graph_file(written(tmp_path)).unlink()
    with pytest.raises(UserError, match="json.gz is not there. Make it: run this"):
        taken(tmp_path)


def test_a_place_that_can_t_be_written_is_refused_before_anything_is_traced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="can't be written: .* name another"):
            Writer(folder, JOB)


def test_a_folder_that_is_written_anew_is_none_until_it_is_done(tmp_path: Path) -> None:
    Writer(written(tmp_path), JOB)
    with pytest.raises(UserError, match="index.json is not there"):
        taken(tmp_path)


def test_a_folder_that_is_someone_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(UserError, match="its index.json is not of graphs, and would be lost; name another folder"):
        written(tmp_path)
    assert (tmp_path / INDEX).read_text() == "{}"
    with pytest.raises(UserError, match="can't be written: .*; name another folder"):
        written(tmp_path / INDEX)


@pytest.mark.parametrize("which", ["graphs", "index"])
def test_broken_bytes_are_refused(tmp_path: Path, which: str) -> None:
    """A byte of the graphs is another, or the file ends early; the index may be anything."""
    path = {"graphs": graph_file(written(tmp_path)), "index": tmp_path / INDEX}[which]
    whole, chance, refused = path.read_bytes(), random.Random(0), 0
    header = 10 if which == "graphs" else 0  # what gzip does not check
    for _ in range(60):
        place = chance.randrange(header, len(whole) - 1)
        other = bytes([whole[place] ^ chance.randrange(1, 256)])
        path.write_bytes(whole[:place] if chance.random() < 0.3 else whole[:place] + other + whole[place + 1 :])
        try:
            taken(tmp_path)
        except UserError as error:
            assert AGAIN in str(error)
            refused += 1
    assert refused == 60 if which == "graphs" else refused > 40


def test_a_file_that_someone_else_wrote_is_refused(tmp_path: Path) -> None:
    """With a hash that is right."""
    folder = written(tmp_path)
    data = json.loads(gzip.decompress(graph_file(folder).read_bytes()))
    data[0][1]["targets"].append("os::system")
    text = json.dumps(data).encode()
    digest = hashlib.sha256(text).hexdigest()
    (folder / f"{digest}.json.gz").write_bytes(gzip.compress(text))
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"graphs": {"0,0": digest}}))
    with pytest.raises(UserError, match="not what was written .Malformed: the operator 'os::system'.*run this"):
        taken(folder)
    (folder / INDEX).write_text(json.dumps(index | {"graphs": {"0,0": "../../etc/passwd"}}))
    with pytest.raises(UserError, match="the hash '../../etc/passwd'"):
        taken(folder)


def forged(folder: Path, text: bytes) -> None:
    """Let a folder's index name these bytes."""
    digest = hashlib.sha256(text).hexdigest()
    (folder / f"{digest}.json.gz").write_bytes(gzip.compress(text))
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"graphs": {"0,0": digest}}))


def of_table(name: str, row: Any, number: int) -> Any:
    def change(data: Any) -> None:
        data[0][1][name] = [row] * number

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: b"[" + b"[]," * 5_000_000 + b"[]]", "more than 10,000,000 values"),
        (lambda data: b"[" * 10_000, "deep"),
        (lambda data: b"[" + b"9" * 5_000 + b"]", "a number of 5,000 digits"),
        (of_table("targets", "aten::relu.default", 20_000), "too many values"),
        (of_table("tensors", [[], [], 0, "float32", "own", 4], 30_000), "too many values"),
        (lambda data: data[0][1]["graph"].update(nodes=[0] * 300_000), "too many nodes"),
        (lambda data: data.append(data[0]), "a stage that is there twice"),
        (lambda data: data[0][1]["targets"].append("x" * 100_000), "the operator"),
    ],
)
def test_graphs_that_would_fill_the_memory_are_refused(tmp_path: Path, change: Any, why: str) -> None:
    data = json.loads(gzip.decompress(graph_file(written(tmp_path)).read_bytes()))
    forged(tmp_path, change(data) or json.dumps(data).encode())
    with pytest.raises(UserError, match=f"not what was written .*{why}.*Make it again: run this") as error:
        taken(tmp_path)
    assert len(str(error.value)) < 1000


def test_gzip_of_zeros_is_not_unpacked(tmp_path: Path) -> None:
    """400 KB of it may be 400 MB of text."""
    path = graph_file(written(tmp_path))
    path.write_bytes(gzip.compress(bytes(2**28), compresslevel=1))
    with pytest.raises(UserError, match="has more than 134,217,728 bytes once unpacked"):
        taken(tmp_path)


@pytest.mark.parametrize("which", ["graphs", "index"])
def test_what_is_no_small_file_is_not_read(tmp_path: Path, which: str) -> None:
    path = {"graphs": graph_file(written(tmp_path)), "index": tmp_path / INDEX}[which]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="is not a regular file, but a FIFO.*Make it again: run this"):
        taken(tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(UserError, match="bytes, more than the .* that such a file may have.*Make it again: run this"):
        taken(tmp_path)
    with pytest.raises(UserError, match="File name too long.*run this"):
        open_precompiled(tmp_path / ("x" * 300), JOB, AGAIN)


@pytest.mark.parametrize(
    "change",
    [{"format": "3"}, {"axes": 3}, {"axes": None}, {"fingerprint": []}, {"graphs": {"0,0": 3}}, {"graphs": [1]}],
    ids=str,
)
def test_an_index_of_other_types_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    written(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(index | change))
    with pytest.raises(UserError, match="index.json: not what was written .*Make it again: run this"):
        taken(tmp_path)


def test_on_a_cpu_nothing_is_moved_as_in_training() -> None:
    """Though graphs are made as in a dry run, which shows what a GPU would."""
    words = ["--activation_checkpoint.offload", "layers.*", "--training.enable_cpu_offload"]
    config = load(["--comm.mode", "fake_backend", *words])
    dry, here = Blueprint(config, 1).options, Blueprint(config, 1, Target.here(runs=False)).options
    assert dry.offload and dry.cpu_offload
    assert not here.offload and not here.cpu_offload


# --- what graphs depend on ------------------------------------------------------------------------------------------


ONE_RANK = ParallelDims()


def resolved(*options: str) -> JobConfig:
    return load(["--model.elementwise", "torch", *options])


def of(*options: str, dims: ParallelDims = ONE_RANK, num_microbatches: int = 1, **sizes: Any) -> dict[str, str]:
    with torch.device("meta"):
        model = llama3.Model(tiny_config(llama3.FLAVORS["debugmodel"], **sizes), "sdpa")
    config = resolved(*options)
    return fingerprint(config, model, dims, step_options(config, model, num_microbatches, Target.here()))


def differ(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {key for key in one | other if one.get(key) != other.get(key)}


@pytest.mark.parametrize(
    ("other", "keys"),
    [
        (of("--training.seq_len", "128"), {"training.seq_len"}),
        (of("--compile.disable_passes", "merge_equal"), {"compile.disable_passes"}),
        (of(dims=ParallelDims(dp_shard=4)), {"degree of dp_shard"}),
        (of(vocab_size=99), {"the model's vocab_size", "the model's parameters"}),
        (
            of("--optimizer.lr", "1", "--training.steps", "7", "--job.dump_folder", "elsewhere", "--debug.seed", "3"),
            set(),
        ),
        (
            of(
                "--training.dataset",
                "c4",
                "--metrics.log_freq",
                "3",
                "--checkpoint.enable",
                "--compile.precompiled",
                "f",
            ),
            set(),
        ),
        # Said in other words; and what is made when the run starts.
        (of("--training.global_batch_size", "8"), set()),
        (of("--compile.codegen", "off"), set()),
        (of("--compile.codegen", "blocks", "--compile.optimizer_in_graph"), set()),
    ],
)
def test_what_matters_is_in_the_fingerprint(other: dict[str, str], keys: set[str]) -> None:
    assert differ(of(), other) == keys


def test_replica_groups_share_stored_graphs() -> None:
    enable, place = "--fault_tolerance.enable", ("--fault_tolerance.lighthouse", "auto", "--fault_tolerance.replica")
    groups = [of(enable, *place, number, num_microbatches=4) for number in ("0", "1")]
    assert groups[0] == groups[1]
    assert differ(of(num_microbatches=4), groups[0]) == {"replica groups", "sums over replica groups"}


def test_a_layer_that_compile_fusions_takes_is_no_operator_in_a_stored_graph() -> None:
    fused = ("--model.elementwise", "fused")
    assert differ(of(*fused), of(*fused, "--compile.fusions", "rope")) == {"layers that are an operator each"}


def test_options_are_shown_as_a_user_writes_them() -> None:
    entry = '{pass = "own_passes.keep", after = "cleanup", exact = true}'
    found = of("--compile.extra_passes", f"[{entry}]", "--compile.disable_passes", "merge_equal")
    assert found["compile.extra_passes"] == f"[{entry}]" and found["compile.disable_passes"] == '["merge_equal"]'
    assert found["activation_checkpoint.memory_budget_gib"] == "not set"
    assert not [key for key, text in found.items() if text in ("None", "True", "False") and "the model's" not in key]


def test_sources_of_ones_own_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass all of its package, for it may import the rest; and what it imports from beside its package."""
    package = tmp_path / "pass_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("")
    (package / "edit.py").write_text("import json, beside_mine.part\ndef run(gm):\n    return gm\n")
    (package / "scratch.py").write_text("not python")
    beside = tmp_path / "beside_mine"
    beside.mkdir()
    (beside / "part.py").write_text("from further_mine import x")
    (tmp_path / "further_mine.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("--compile.extra_passes", '[{pass = "pass_of_mine.edit.run", after = "cleanup"}]')
    before = of(*options)
    (package / "helper.py").write_text("changed = 1")
    assert differ(before, of(*options)) == {"source of pass_of_mine"}
    (tmp_path / "further_mine.py").write_text("x = 2")
    assert differ(before, of(*options)) == {"source of pass_of_mine", "source of further_mine"}
    assert {key for key in before if key.startswith("source of")} == {
        f"source of {name}" for name in ("torchtitan_graph", "pass_of_mine", "beside_mine", "further_mine")
    }
    for name in ("pass_of_mine", "pass_of_mine.edit", "beside_mine", "beside_mine.part", "further_mine"):
        monkeypatch.delitem(sys.modules, name)


def test_this_packages_sources_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = of()
    (tmp_path / "__init__.py").write_text("")
    here = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("torchtitan_graph.steps.fingerprint.torchtitan_graph", here)
    assert differ(before, of()) == {"source of torchtitan_graph"}


def test_a_frozen_parameter_matters() -> None:
    with torch.device("meta"):
        model = llama3.Model(tiny_config(llama3.FLAVORS["debugmodel"]), "sdpa")
    config = resolved()
    options = step_options(config, model, 1, Target.here())
    before = fingerprint(config, model, ONE_RANK, options)
    model.norm.weight.requires_grad_(False)
    assert differ(before, fingerprint(config, model, ONE_RANK, options)) == {"the model's parameters"}


def test_the_schedule_in_a_file_matters(tmp_path: Path) -> None:
    """Another content under the same name: other stages, or more microbatches between forward and backward."""
    csv = tmp_path / "schedule.csv"
    options = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule_csv", str(csv)]
    found = []
    for number, lines in (
        (1, ("0F0,0B0", "1F0,1B0")),
        (1, ("1F0,1B0", "0F0,0B0")),
        (2, ("0F0,0B0,0F1,0B1", "1F0,1B0,1F1,1B1")),
        (2, ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")),
    ):
        csv.write_text("\n".join(lines))
        found.append(of(*options, num_microbatches=number))
    assert differ(*found[:2]) == differ(*found[2:]) == {"the pipeline's stages"}
