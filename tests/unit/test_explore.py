"""What the explorer's command writes and refuses, and what is seen of passes; tests/e2e/test_explorer.py opens it."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.compiler import Inspection, Pass, run_passes
from torchtitan_graph.explore import main
from torchtitan_graph.explorer import PassWatch, run_data
from torchtitan_graph.explorer.run import MAX_POINTS, MAX_WORDS
from torchtitan_graph.explorer.watch import Change
from torchtitan_graph.graph.edit import call

REPOSITORY = Path(__file__).parents[2]
aten = torch.ops.aten


def explore(*arguments: object) -> int:
    return main(["--job.config_file", *map(str, arguments)])


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "config.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    return path


def write_profile(run: Path, num_ranks: int) -> None:
    """Write what `profiling.enable_profiling` does, of one operation."""
    args = {"graph": "training step", "node": "embedding"}
    events = [{"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1500.0, "args": args}]
    folder = run / "profile_traces" / "step-4"
    folder.mkdir(parents=True)
    for rank in range(num_ranks):
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_a_run_of_a_pipeline_is_written(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGPU", "2")
    degree, out = "--parallelism.pipeline_parallel_degree", tmp_path / "page.html"
    small = ["--training.seq_len", "64", "--training.local_batch_size", "2", "--validation.enable"]
    small += ["--validation.seq_len", "64", "--validation.local_batch_size", "1"]
    assert explore(config.parent, "-o", out, degree, 2, *small) == 0
    data = data_of(out)
    stage, evaluation = data["graphs"]
    assert evaluation["name"] == "evaluation of stage 0" and evaluation["passes"][1]["name"] == "cleanup"
    assert not evaluation["is_measured"] and {data["strings"][i] for i in evaluation["calls"]["origin"]} >= {"forward"}
    assert "backward" not in {data["strings"][i] for i in evaluation["calls"]["origin"]}
    assert not stage["is_measured"] and stage["name"] == "stage 0" and stage["passes"][1]["name"] == "cleanup"
    assert any("rope.py" in data["strings"][i] for i in stage["calls"]["source"])
    for graph in (stage, evaluation):
        rest = dict(graph["memory"]["rest"])
        assert rest.keys() == {"parameters", "optimizer state", "batch and masks"} and all(rest.values())
        assert rest["optimizer state"] == 2 * rest["parameters"]
    memory, held = evaluation["memory"], sum(evaluation["calls"]["held"])
    peak, drawn = memory["peak"], list(zip(memory["begin"], memory["end"], memory["bytes"], strict=True))
    scratch = dict(zip(memory["scratch_at"], memory["scratch"], strict=True))
    by_call = [
        sum(size for begin, end, size in drawn if begin <= i <= end) + scratch.get(i, 0)
        for i in range(len(evaluation["calls"]["name"]))
    ]
    assert by_call[peak] == max(by_call) == held
    assert sum(stage["calls"]["held"]) > 0 and not list(tmp_path.glob("*.tmp"))


def test_a_profile_of_other_ranks_is_refused(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NGPU", raising=False)
    write_profile(config.parent, num_ranks=2)
    assert explore(config.parent, "-o", tmp_path / "page.html") == 2
    assert "the run had 2 ranks, not 1; put NGPU=2 in front" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}/confg.toml"], "can't be read: No such file or directory; did you mean config.toml"),
        (["{run}/.."], "is not a run's folder, for it has no config.toml; these are runs: "),
        (["{run}", "--training.sequence_len", "64"], "is not an option; see training.seq_len"),
        (
            ["{run}", "--compile.capture", "dynamo"],
            "compile.capture = dynamo: its nodes do not know which calls made them",
        ),
        (
            ["{run}", "--compile.mode", "eager"],
            "a dry run reads what a step needs from its graph; use",
        ),
        (["{run}", "--compile.disable_passes", "bucket_collective"], "did you mean bucket_collectives?"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_any_work(
    arguments: list[str], words: str, config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    what, *options = arguments
    if what == "{run}":
        what = str(config)
    out = tmp_path / "page.html"
    assert explore(what.format(run=config.parent), *options, "-o", out) == 2
    assert words in capsys.readouterr().err and not out.exists()


def test_a_run_is_shown_with_what_can_be_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "a run #1"
    (run / "graphs").mkdir(parents=True)
    (run / "graphs" / os.fsdecode(b"\xff<b>.py")).write_text("x = 1\n")
    (run / "link.py").symlink_to("/etc/passwd")
    os.mkfifo(run / "waits")
    records = [{"step": i, "loss": 1 / (i + 1), "lr": float("nan"), "by": {"a": 1}} for i in range(5001)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in records) + '{"step": 50')
    times = {"useful": "0:00:02"}
    (run / "status.json").write_text(json.dumps({"state": "failed", "reason": "x" * 9999, "times": times, "step": 3}))
    found = run_data(run, tmp_path / "pages" / "page.html")
    json.dumps(found, allow_nan=False)
    assert found["facts"][0] == ["state", "failed"] and ["time went into", "useful 0:00:02"] in found["facts"]
    assert len(found["facts"][1][1]) == MAX_WORDS + 3 and found["curves"].keys() == {"loss"}
    loss = found["curves"]["loss"]
    assert len(loss) <= MAX_POINTS and loss[0] == (0, 1.0) and loss[-1] == (5000, 1 / 5001)
    address = "../a%20run%20%231/graphs/%FF%3Cb%3E.py"
    assert [each[1:] for each in found["files"] if each[0].startswith("graphs")] == [(address, 6)]
    assert [each[0] for each in found["files"][:2]] == ["metrics.jsonl", "status.json"] and len(found["files"]) == 3
    # Damaged, they are left out with a warning.
    (run / "metrics.jsonl").write_text("torn\n")
    (run / "status.json").write_text("[]")
    (run / "config.toml").write_bytes(b"\xff")
    left = run_data(run, tmp_path / "page.html")
    assert (left["facts"], left["curves"], left["config"]) == ([], {}, "")
    for name in ("metrics.jsonl, line 1: is not JSON", "status.json: has invalid content", "config.toml: is not UTF-8"):
        assert any(name in message and "made without it" in message for message in caplog.messages), name


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.toml", b"[model\n", "config.toml': is not valid TOML"),
        ("config.toml", b"\xff", "is not UTF-8 (invalid start byte at byte 0, in line 1)"),
        ("config.toml", None, "is not a run's folder, for it has no config.toml"),
        pytest.param(
            *("profile_traces/step-4/rank0.json.gz", b"no gzip", "rank0.json.gz: is "), marks=pytest.mark.slow
        ),
        pytest.param(
            "profile_traces/step-4/rank0.json.gz",
            gzip.compress(b'{"traceEvents": [', mtime=0)[:-9],
            "rank0.json.gz: is ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_damaged_run_is_one_line(
    name: str, content: bytes | None, words: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(config.parent, num_ranks=1)
    path = config.parent / name
    path.unlink()
    os.mkfifo(path) if content is None else path.write_bytes(content)
    assert explore(config.parent, "-o", tmp_path / "page.html", "--training.seq_len", "64") == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and not (tmp_path / "page.html").exists()


def test_a_page_is_not_written_where_there_is_no_folder(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explore(config, "-o", tmp_path / "nowhere" / "page.html") == 2
    assert "nowhere; name a file in one that is there" in capsys.readouterr().err
    assert explore(config, "-o", tmp_path) == 2
    assert "is a folder; name a file" in capsys.readouterr().err


def test_a_page_is_made_whatever_the_locale() -> None:
    """Its template has letters that ASCII has not."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = "import runpy, sys; runpy.run_path(sys.argv[1])['page']({'title': ''})"
    file = REPOSITORY / "torchtitan_graph" / "explorer" / "page.py"
    subprocess.run([sys.executable, "-c", program, str(file)], env={**os.environ, **locale}, check=True)


def traced() -> GraphModule:
    return minimal_fx_tracer(lambda x: (x.sin() + x.cos(), x.exp() * 2))(torch.ones(2)).gm


def replaced(gm: GraphModule) -> GraphModule:
    """Compute the cosine as a sine, once more negated; the exponential first of all."""
    sin, cos = (gm.graph.find_nodes(op="call_function", target=t)[0] for t in (aten.sin.default, aten.cos.default))
    with gm.graph.inserting_after(cos):
        new = call(gm.graph, cos, aten.neg.default, sin)
    cos.replace_all_uses_with(new)
    gm.graph.erase_node(cos)
    sin.prepend(gm.graph.find_nodes(op="call_function", target=aten.exp.default)[0])
    return gm


def test_passes_are_watched() -> None:
    watch = PassWatch()
    ordered = [Pass("nothing", lambda gm: gm), Pass("replaced", replaced)]
    inspection = Inspection(look=watch.look)
    for _ in range(2):  # the second time, as while a budget is tried out, replaces the first
        gm = run_passes(traced(), ordered, (), torch.device("cpu"), inspection)
    watched = watch.graphs["training step"]
    assert watched.gm is gm
    assert [(each.name, each.num_calls, len(each.changes)) for each in watched.passes] == [
        ("traced", 6, 0),
        ("nothing", 6, 0),
        ("replaced", 6, 4),
    ]
    changes = watched.passes[-1].changes
    assert Counter(change.kind for change in changes) == Counter(["added", "removed", "changed", "moved"])
    by_kind = {change.kind: change for change in changes}
    assert by_kind["moved"].name == "exp"
    assert by_kind["added"] == Change(
        "added", "neg_default", "aten.neg.default", "", "", "aten.neg.default(sin)  # float32[2] forward"
    )
    assert by_kind["removed"].before == "aten.cos.default(detach)  # float32[2] forward"
    assert (by_kind["changed"].before, by_kind["changed"].after) == (
        "aten.add.Tensor(sin, cos)  # float32[2] forward",
        "aten.add.Tensor(sin, neg_default)  # float32[2] forward",
    )
