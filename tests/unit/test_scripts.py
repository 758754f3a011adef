"""What the scripts find by themselves, and what they say in one line."""

import functools
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_graph import compiler
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.formats.show import dump
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.spec import family_names
from torchtitan_graph.parallel.recompute import Budget, Recompute

REPOSITORY = Path(__file__).parents[2]
TOKENIZER = REPOSITORY / "tests" / "assets" / "tokenizer"


def run_script(name: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    folder = "scripts" if (REPOSITORY / "scripts" / name).is_file() else "torchtitan_graph"
    runpy.run_path(str(REPOSITORY / folder / name), run_name="__main__")


def refusal(name: str, *arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """Return the last line of a script that refuses."""
    with pytest.raises(SystemExit) as end:
        run_script(name, *arguments, monkeypatch=monkeypatch)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    if isinstance(end.value.code, str):
        return end.value.code
    assert end.value.code == 2
    return error.splitlines()[-1]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published: config.json, weights, tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "hf"
    torch.manual_seed(0)
    to_hf(llama3.Model(llama3.Config(32, 1, 2, 2, 64, vocab_size=2048, rope_scaling=None)), folder, assets=TOKENIZER)
    return folder


def test_a_second_run_of_the_same_command_overwrites_nothing(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text("the cat sat on the mat\n" * 5)
    out = tmp_path / "out"
    commands: list[tuple[str, list[object], str]] = [
        ("train_tokenizer.py", ["--dataset_path", texts, "--vocab_size", 270, "--out", out], "tokenizer.json is there"),
        ("pretokenize.py", ["--dataset_path", texts, "--out", out / "tokens"], "is there already"),
        ("convert_from_hf.py", [published, out / "converted"], "tokenizer_config.json already: name a new folder"),
        ("convert_to_hf.py", [out / "converted" / "step-0", out / "hf"], "hf is there already: name a new folder"),
    ]
    for name, arguments, words in commands:
        with pytest.raises(SystemExit, match="^0$"):
            run_script(name, *arguments, monkeypatch=monkeypatch)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert words in refusal(name, *arguments, monkeypatch=monkeypatch, capsys=capsys), name
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    words = [out / "converted" / "step-0", tmp_path / "average", "--average"]
    said = refusal("convert_to_hf.py", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert "has no average of the weights" in said


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("convert_to_hf.py", ["nowhere", "out"], "nowhere: there is no such folder"),
        ("convert_from_hf.py", ["nowhere", "out"], "nowhere"),
        ("pretokenize.py", ["--dataset_path", "nowhere", "--out", "out"], "'nowhere': there is no such file or folder"),
        ("pretokenize.py", ["--out", "out", "--tokens_per_shard", 0], "--tokens_per_shard 0: must be at least 1"),
        ("pretokenize.py", ["--out", "out", "--format", "preference"], "shards of token ids hold no pairs of answers"),
        ("pretokenize.py", ["--out", "out", "--num_workers", -1], "--num_workers -1: must be at least 0"),
        ("pretokenize.py", ["--out", "/dev/null/out", "--num_documents", 1], "/dev/null/out"),
        ("train_tokenizer.py", ["--out", "out", "--num_documents", 0], "--num_documents 0: must be at least 1"),
        (
            "train_tokenizer.py",
            ["--out", "/dev/null", "--num_documents", 1],
            "--out /dev/null: can't be written",
        ),
        ("train_tokenizer.py", ["--dataset_path", "nowhere", "--out", "out"], "there is no such file or folder"),
        ("benchmark.py", ["--rows", 0], "--rows 0: must be at least 1"),
        ("benchmark.py", ["--dtypes", "float3"], "--dtypes float3: legal are float32, bfloat16"),
        ("benchmark.py", ["--models", "llama3:nope"], "--models llama3:nope: legal for llama3 are small, mid, large,"),
        (
            "benchmark.py",
            ["--modes", "eager,rope+nope"],
            "--modes rope+nope: legal are eager, compile, compile_whole,",
        ),
        ("benchmark.py", ["--layouts", "hsdp2"], "--layouts hsdp2: legal are fsdp1,"),
        ("benchmark.py", ["--disable", "nope"], "'nope': legal are"),
        ("benchmark.py", ["--json", "nowhere/x.jsonl"], "--json nowhere/x.jsonl: there is no folder for it"),
        ("benchmark_checkpoint.py", ["--ranks", 0], "--ranks 0: must be at least 1"),
        ("benchmark_checkpoint.py", ["--flavor", "nope"], "llama3:nope: legal for llama3 are small, mid, large,"),
        ("benchmark_checkpoint.py", ["--mode", "nope"], "invalid choice: 'nope'"),
        ("benchmark_checkpoint.py", ["--folder", "nowhere"], "--folder nowhere: there is no such folder"),
        ("roofline.py", ["--devcie", "h100"], "--devcie is not an option; did you mean --device?"),
        ("roofline.py", ["--jsn=x.json"], "--jsn is not an option; did you mean --json?"),
        ("explore.py", ["--ouptut", "x.html"], "--ouptut is not an option; did you mean --output?"),
        ("show_graph.py", ["--atfer", "cleanup"], "--atfer is not an option; did you mean --after?"),
        ("compare_captures.py", ["--vales"], "--vales is not an option; did you mean --values?"),
        ("check_first_run.py", [], "usage: python scripts/check_first_run.py DUMP_FOLDER"),
    ],
)
def test_mistakes_are_one_line(
    name: str,
    arguments: list[object],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(name, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert not list(tmp_path.iterdir())


def test_a_benchmark_measures_a_mode_with_and_without_a_policy() -> None:
    recompute_of = runpy.run_path(str(REPOSITORY / "scripts" / "benchmark.py"))["recompute_of"]
    assert {policy: recompute_of(policy) for policy in ("", "full", "selective", "50")} == {
        "": Recompute(),
        "full": Recompute(every=1),
        "selective": Recompute(by_op=True),
        "50": Recompute(budget=Budget(0.5)),
    }


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ('{"step": 1, "validation_loss": 3.0}\n', "config.toml': can't be read"),
        ("torn\n", "metrics.jsonl, line 1: is not JSON"),
        ('{"step": 1}\n{"step": 2, "validation_loss": "3"}\n', "line 2: has invalid content: validation_loss:"),
        ("[1]\n", "metrics.jsonl, line 1: has invalid content"),
        ("[" * 5000 + "\n", "line 1: has lists or objects more than 100 deep"),
        ('{"step": ' + "1" * 5000 + "}\n", "line 1: is not JSON: a number of 5,000 digits"),
        ("\udcff\n", "line 1: is not JSON"),
        (None, "metrics.jsonl: is not a regular file, but a FIFO"),
    ],
)
def test_a_folder_that_is_no_run_s_can_not_be_checked(
    metrics: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path) if metrics is None else path.write_text(metrics, errors="surrogateescape")
    assert words in refusal("check_first_run.py", tmp_path, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\xff", "is not UTF-8"),
        (None, "is not a regular file, but a FIFO"),
        (b"    a = aten.mm.default(b)  # float32[2] forward | 1.2.3 MiB\n", "is no graph that debug.dump_graphs wrote"),
        (b"    a = aten.mm.default(b)  # " + b"  # float32 " * 50_000 + b"| 1.000 MiB\n", "is no graph that"),
    ],
)
def test_a_graph_that_nobody_dumped_is_refused(
    text: bytes | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "00_traced.py"
    os.mkfifo(path) if text is None else path.write_bytes(text)
    assert words in refusal("show_graph.py", "--graphs", tmp_path, monkeypatch=monkeypatch, capsys=capsys)


def test_numbers_of_a_foreign_graph_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shapes = [f"float32[{'9' * 5000}]", "no_dtype[3]", f"float32[{', '.join(['9' * 15] * 16)}]", "float32[256, 1024]"]
    lines = [f"    x = aten.odd{i}.name(y)  # {shape} forward 0 | 1.000 MiB\n" for i, shape in enumerate(shapes)]
    (tmp_path / "00_traced.py").write_text("".join(lines))
    with pytest.raises(SystemExit) as end:
        run_script("show_graph.py", "--graphs", tmp_path, "--statistics", monkeypatch=monkeypatch)
    assert end.value.code == 0
    assert (
        "aten.odd3.name                                                     1           1.000"
        in capsys.readouterr().out
    )


def test_a_place_that_can_not_be_written_to_is_one_line(
    published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = refusal("convert_from_hf.py", published, "/dev/null/out", monkeypatch=monkeypatch, capsys=capsys)
    assert "/dev/null/out: can't be written" in words


@pytest.mark.parametrize("name", ["convert_to_hf.py", "convert_from_hf.py", "pretokenize.py"])
def test_what_is_wrong_with_data_is_told_without_the_usage(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = {"pretokenize.py": ["--dataset_path", "nowhere", "--out"]}.get(name, ["nowhere"])
    with pytest.raises(SystemExit) as end:
        run_script(name, *words, tmp_path / "out", monkeypatch=monkeypatch)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in line or "out: there is no such folder" in line


def test_show_graph_filters_counts_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "graphs"

    def shown(*arguments: object) -> list[str]:
        with pytest.raises(SystemExit) as end:
            run_script("show_graph.py", "--graphs", folder, *arguments, monkeypatch=monkeypatch)
        assert end.value.code == 0
        return capsys.readouterr().out.splitlines()

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    nested = nn.Sequential(model, nn.Tanh())
    dump(minimal_fx_tracer(lambda x: nested(x).sum(), module=nested)(torch.ones(2, 4)).gm, tmp_path / "nested", 0, "in")
    of_nested = functools.partial(shown, "--graphs", tmp_path / "nested", "--phase", "forward", "--op", "aten.tanh.*")
    assert [" forward 0.1 | " in x for x in of_nested("--module", "0")] == [True]  # as model.freeze: and what is inside
    assert len(of_nested("--module", "?")) == 2 and len(of_nested("--module", "1")) == 1
    gm = minimal_fx_tracer(lambda x: model(x).sum(), module=model)(torch.ones(2**17, 4)).gm
    dump(gm, folder, 0, "traced")
    (tanh,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    tanh.target = torch.ops.aten.sin.default
    dump(gm, folder, 1, "spoiled")
    (line,) = shown("--module", "1", "--phase", "forward", "--op", "aten.s*")
    assert line.startswith("tanh = aten.sin.default(addmm)  # float32[131072, 8] forward 1 | ")
    assert [x.split(" = ")[0] for x in shown("--after", "traced", "--op", "aten.tanh.*")] == ["tanh"]
    changed = [x for x in shown("--diff", "traced", "spoiled") if x[:2] in ("- ", "+ ")]
    assert [x.split("(")[0].split()[-1] for x in changed] == ["aten.tanh.default", "aten.sin.default"]
    assert "aten.sin.default                                                   1           4.000" in shown(
        "--statistics"
    )
    views = shown("--after", "traced", "--op", "aten.t.*", "--statistics")  # of weights: they lie where those do
    assert views[1].split() == ["aten.t.default", "1", "0.000"]
    shown("--timeline", tmp_path / "held.svg")
    assert "8.000 MiB at its peak, tanh = aten.sin.default(addmm) in 1" in (tmp_path / "held.svg").read_text()
    words = refusal("show_graph.py", "--graphs", folder, "--after", "spoilt", monkeypatch=monkeypatch, capsys=capsys)
    assert "spoilt: legal are traced, spoiled; did you mean spoiled?" in words
    for arguments, said in {
        ("--module", "layers.*"): "no node is of --module 'layers.*', --op '*'",
        ("--stage", 3): "--stage 3: these graphs are not of a pipeline's stages",
        ("--timeline", tmp_path / "no" / "held.svg"): f"there is no folder {tmp_path / 'no'}",
        ("--diff", "traced", "spoiled", "--statistics"): "--diff: looks at whole graphs; leave out --statistics",
        ("--graphs", tmp_path / "no"): f"--graphs {tmp_path / 'no'}: there is no such folder",
        ("--graphs", tmp_path): f"--graphs {tmp_path}: has no graphs",
    }.items():
        assert said in refusal("show_graph.py", "--graphs", folder, *arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_show_graph_builds_any_rank_of_any_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("NGPU", "64")
    written: list[str] = []
    monkeypatch.setattr(compiler, "dump", lambda *given: written.append(given[-1]) or dump(*given))
    options = ["--training.seq_len", 64, "--training.local_batch_size", 1, "--parallelism.tensor_parallel_degree", 2]
    with pytest.raises(SystemExit) as end:
        run_script("show_graph.py", *options, "--op", "_c10d*", monkeypatch=monkeypatch)
    assert end.value.code == 0
    assert written == ["compile_regions"], "no graph is written that nobody asked for"
    lines = [line for line in capsys.readouterr().out.splitlines() if " = _c10d_functional." in line]
    assert any("'ranks 0 1'" in line for line in lines) and any("'ranks 0 2 4 6" in line for line in lines)
    assert all(
        line.rpartition(" | ")[0].count(" at ") == 1 for line in lines if "layers.0" in line and "role" not in line
    )


def test_show_graph_tells_what_modules_cost_in_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("NGPU", "2")
    options = ["--training.seq_len", 64, "--training.local_batch_size", 2]
    options += ["--parallelism.pipeline_parallel_degree", 2, "--compile.codegen", "blocks"]
    options += ["--activation_checkpoint.mode", "none"]
    options += ["--compile.precompiled", tmp_path / "none"]  # made again, whatever it holds
    with pytest.raises(SystemExit) as end:
        run_script("show_graph.py", *options, "--by", "module", "--depth", 2, monkeypatch=monkeypatch)
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    (title,) = (i for i, line in enumerate(lines) if line.startswith("stage 0, a microbatch with what is done once"))
    rows = [line.split() for line in lines[title + 3 :] if line]
    assert [row[0] for row in rows] == ["all", ":Model", "tok_embeddings:Embedding", "0:Block", "1:Block", "2:Block"]
    assert "held" not in lines[title + 1]
    forward, backward = (float(rows[0][i]) for i in (3, 4))
    assert backward == pytest.approx(2 * forward, rel=0.01), "of products, and of none that is lost in a region"
    for arguments, said in {
        ("--by", "layer"): "invalid choice: 'layer'",
        ("--by", "module", "--depth", -1): "--depth -1: must be at least 0",
        ("--by", "module", "--phase", "forward", "--statistics"): "leave out --phase, --statistics",
        ("--depth", 2): "--depth and --profile are of the table that --by asks for",
    }.items():
        assert said in refusal("show_graph.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    with pytest.raises(SystemExit) as end:
        run_script("show_graph.py", "--by", "module", "--profile", tmp_path, monkeypatch=monkeypatch)
    assert end.value.code == 2
    assert "is not a run's folder, for it has no config.toml" in capsys.readouterr().err


@pytest.mark.skipif(torch.__version__ < "2.13", reason="a graph for several lengths needs torch 2.13")
@pytest.mark.slow
def test_compare_captures_compares_graphs_for_several_lengths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        run_script(
            "compare_captures.py", "--training.seq_len", 64, "--training.dynamic_seq_len", monkeypatch=monkeypatch
        )
    assert end.value.code == 0
    assert "the same, " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo captures steps from torch 2.13 on")
@pytest.mark.parametrize("counts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compare_captures_tells_by_its_exit_code(
    counts: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    forward = llama3.Model.forward

    def counting(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model.calls = 1
        try:
            return forward(model, *args, **kwargs)
        finally:
            del model.calls  # as it was, so that only Dynamo refuses it

    monkeypatch.setenv("NGPU", "2")
    if counts:
        monkeypatch.setattr(llama3.Model, "forward", counting)
    with pytest.raises(SystemExit) as end:
        run_script("compare_captures.py", "--training.seq_len", 64, "--values", monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert end.value.code == int(counts)
    if counts:
        assert "graph 1 of 1: dynamo does not take it" in said and "changes model.calls (test_scripts.py:" in said
    else:
        assert "graph 1 of 1: the same" in said and "\n  depends on model.config.dim == 256 (" in said


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
@pytest.mark.parametrize("name", ["check_gpu.py", "check_cuda_without_gpu.py"])
def test_a_torch_without_cuda_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(name, monkeypatch=monkeypatch, capsys=capsys)
    assert f"torch {torch.__version__} has no CUDA; " in said


@pytest.mark.parametrize("minutes", ["0", "nan", "inf", "1e9"])
def test_a_check_of_a_gpu_ends(
    minutes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    said = refusal(
        "check_gpu.py", f"--minutes={minutes}", f"--folder={tmp_path}", monkeypatch=monkeypatch, capsys=capsys
    )
    assert said.startswith("check_gpu: --minutes") and said.endswith("must be above 0 and at most 1440, a day")


def test_a_check_of_an_h100_takes_less_than_ten_minutes_and_leaves_nothing_out() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "check_gpu.py"))
    parts = script["all_parts"](Path())
    assert script["seconds_of"](parts, num_at_once=4) <= 9.5 * 60  # as where there are 16 CPUs
    bits = {(part.model.split()[0], part.mode) for part in parts if part.name == "bits"}
    every = {(family, attn) for family in script["FAMILIES"] for attn in ("sdpa", "flex", "varlen")}
    assert {*script["FAMILIES"]} == {*family_names()} - {"transformers"}
    assert every - bits == {("gpt_oss", "varlen")}, "which has sinks and windows"
    timed = [part for part in parts if part.name == "speed"]
    assert {part.mode for part in timed} == set(script["MODES"])
    assert {part.model for part in timed if part.mode == script["DETERMINISTIC"]} == set(script["MODELS"])
    assert {part.name for part in parts} == {"bits", "numbers", "speed", "profile"}


def _one_row() -> Iterator[dict[str, Any]]:
    yield {"result": "equal"}


def _stop_and_sleep() -> Iterator[dict[str, Any]]:
    time.sleep(1)  # until it is waited for
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
    yield {}


def test_check_gpu_tells_what_is_done_when_it_is_stopped(tmp_path: Path) -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "check_gpu.py"))
    parts = [
        script["Part"]("bits", "", make.__name__, make, (), 1, True) for make in (_one_row, _stop_and_sleep, _one_row)
    ]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        rows = script["run_parts"](parts, 600, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [(row["result"], row.get("note")) for row in rows] == [
        ("equal", None),
        ("not run", "stopped"),
        ("not run", "cut off: stopped"),
    ]


@pytest.mark.slow
def test_a_timeline_has_a_lane_for_each_axis_and_refuses_a_part_that_is_none(tmp_path: Path, capsys) -> None:
    main = runpy.run_path(str(REPOSITORY / "scripts" / "draw_timeline.py"))["main"]
    words = "--world 2 --device h100 --model.name llama3 --training.seq_len 64 --parallelism.tensor_parallel_degree 2"
    drawn = tmp_path / "step.svg"
    assert main([*words.split(), "--out", str(drawn)]) == 0
    assert all(f">{lane}</text>" in drawn.read_text() for lane in ("kernels", "tp"))
    assert drawn.read_text().count("<rect") > 20
    assert main([*words.split(), "--out", str(drawn), "--part", "stepp"]) == 2
    assert "--part stepp: no such graph of this step; did you mean step?" in capsys.readouterr().err
    assert main([*words.split(), "--out", str(drawn), "--begin_ms", "5", "--end_ms", "1"]) == 2
    assert "--begin_ms 5: must be at least 0, and before --end_ms 1" in capsys.readouterr().err
    assert main([*words.split(), "--out", str(drawn), "--begin_ms", "1e6"]) == 2
    assert "and before " in (text := capsys.readouterr().err) and "the end of step" in text
