"""What a run writes can be read, and says what it should."""

import base64
import gzip
import json
import re
import zlib
from pathlib import Path

import pytest
from runs import EAGER, REPOSITORY, Result, numbers, records, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_graph import explore as explorer_page
from torchtitan_graph import show_graph
from torchtitan_graph.analysis.measured import find_trace, measured
from torchtitan_graph.compiler import PassPlan, passes, update_passes
from torchtitan_graph.config import load
from torchtitan_graph.formats.show import without_bytes

STEP_KEYS = [
    *["step", "loss", "grad_norm", "lr", "tokens_seen", "tokens_per_second", "step_time_s", "data_loading_s"],
    *["documents_per_second", "read_mb_per_second", "mfu"],
    "memory_gib",
]
RANK_KEYS = ["slowest_rank", "slowest_busy_s", "slowest_data_s", "median_busy_s"]  # not of a process' first step


def test_metrics_have_the_promised_keys(reference: tuple[Path, Result]) -> None:
    folder, _ = reference
    found = records(folder)
    steps = [record for record in found if "loss" in record]
    assert [list(record) for record in steps] == [STEP_KEYS, *[STEP_KEYS + RANK_KEYS] * 4]
    assert all(record["median_busy_s"] <= record["slowest_busy_s"] <= record["step_time_s"] for record in steps[1:])
    assert [list(record) for record in found if "loss" not in record] == [["step", "validation_loss"]] * 2
    assert [record["step"] for record in found if "validation_loss" in record] == [3, 5]
    assert all(record["memory_gib"] > 0 and record["tokens_per_second"] > 0 for record in found if "loss" in record)


def test_a_run_ends_with_the_memory_that_was_planned_and_measured(reference: tuple[Path, Result]) -> None:
    output = reference[1].output
    line = r"goodput .*; peak memory of rank 0: planned (\S+) GiB, measured (\S+) GiB of the whole process"
    planned, of_process = re.findall(line, output)[0]
    assert re.search(rf"  in all +{planned} GiB", output), "as the run said at its start"
    assert float(of_process) > float(planned) > 0


def test_other_ranks_write_their_own_metrics(reference: tuple[Path, Result]) -> None:
    lines = (reference[0] / "metrics_rank1.jsonl").read_text().splitlines()
    mine = [json.loads(line) for line in lines]
    keys = ("step", "loss", "grad_norm", "validation_loss")
    assert [[r.get(k) for k in keys] for r in mine] == [[r.get(k) for k in keys] for r in records(reference[0])]


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_files_hold_the_same_numbers(reference: tuple[Path, Result]) -> None:
    folder, _ = reference
    events = EventAccumulator(str(folder / "tb")).Reload()
    for tag, key in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("validation/loss", "validation_loss")):
        shown = {event.step: event.value for event in events.Scalars(tag)}
        assert shown == pytest.approx({r["step"]: r[key] for r in records(folder) if key in r}, rel=1e-6)
    assert b"my_models.tiny" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.parametrize(
    ("rank", "step"), [(0, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 4), (1, 2), (1, 4)))]
)
def test_profiles_hold_the_steps_operators(reference: tuple[Path, Result], step: int, rank: int) -> None:
    path = reference[0] / "profile_traces" / f"step-{step}" / f"rank{rank}.json.gz"
    names = {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "gloo:all_gather"} & names, names
    assert {"forward layers.1.attention", "backward layers.0.feed_forward.w1"} <= names
    assert find_trace(reference[0], rank, 2).parent.name == "step-4"
    seconds, step_s = measured(path)["training step"], records(reference[0])[0]["step_time_s"]
    assert any(name.startswith("wait_tensor") for name in seconds) and 0 < sum(seconds.values()) < 10 * step_s


@pytest.mark.slow
def test_what_was_measured_stands_beside_the_estimates(
    reference: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By the command of the page, of the very nodes of the run's graph, which a dry run builds again; of another
    graph's it is refused."""
    main, explore = show_graph.main, explorer_page.main
    text = (REPOSITORY / "docs" / "tune" / "reading_graphs.md").read_text()
    line = r"^NGPU=2 python -m torchtitan_graph.show_graph (.*--profile) outputs/my_run "
    (shown,) = re.findall(line, text, re.MULTILINE)
    wanted = [*shown.split(), str(reference[0])]
    monkeypatch.setenv("NGPU", "2")
    assert main(wanted) == 0
    _, titles, _, whole, *rows = capsys.readouterr().out.partition("training step; ")[2].splitlines()
    assert "measured" in titles and any("attention:Attention" in row for row in rows)
    trace = find_trace(reference[0], 0, 2)
    expected = sum(measured(trace)["training step"].values())
    unit = {"us": 1e-6, "ms": 1e-3, "s": 1.0}[titles.split()[-1]]
    assert sum(float(x.replace(",", "")) for x in whole.split()[-2:]) * unit == pytest.approx(expected, rel=1e-3)
    page = tmp_path / "page.html"
    assert explore(["--job.config_file", str(reference[0]), "-o", str(page)]) == 0
    packed = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    graph, _ = json.loads(zlib.decompress(base64.b64decode(packed[1])))["graphs"]  # type: ignore[index]
    assert sum(graph["calls"]["measured"]) == pytest.approx(expected * 1e9, rel=1e-4)  # each in whole nanoseconds
    # The same nodes, in rows of another length.
    assert explore(["--job.config_file", str(reference[0]), "-o", str(page), "--training.seq_len", "32"]) == 2
    assert "it is of another graph" in capsys.readouterr().err
    monkeypatch.setenv("NGPU", "1")
    assert main(wanted) == 2 and "the run had 2 ranks, not 1; put NGPU=2 in front" in capsys.readouterr().err
    assert main([*wanted[:-1], str(trace)]) == 2
    error = capsys.readouterr().err
    assert "it is of another graph. Give the run's folder alone" in error and "--by scope --profile RUN" in error


def test_resolved_configuration_gives_the_same_run_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--optimizer.lr", "3e-3", "--debug.seed", "7", "--training.steps", "2", "--checkpoint.no-enable", *EAGER]
    code, output = train("--job.dump_folder", str(first), *options)
    assert code == 0, output
    code, output = train("--job.config_file", str(first / "config.toml"), "--job.dump_folder", str(second))
    assert code == 0, output
    assert numbers(first) == numbers(second)
    one, other = (load(["--job.config_file", str(folder / "config.toml")]) for folder in (first, second))
    one.job, other.job = other.job, one.job  # differ by dump_folder and config_file, as they should
    assert one.optimizer == other.optimizer and one.debug.seed == other.debug.seed == 7


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("inspected")
    options = ["--training.steps", "1", "--debug.dump_graphs", "--debug.verify_passes", "--checkpoint.no-enable"]
    own = ", ".join(f'{{pass = "my_passes.swap_sums", after = "{name}"}}' for name in ("mixed_precision", UPDATE[0]))
    options += ["--compile.optimizer_in_graph", "--compile.extra_passes", f"[{own}]"]
    options += ["--optimizer.implementation", "foreach"]  # its graph has numbers beside tensors
    return folder / "graphs", train("--job.dump_folder", str(folder), *options)


OWN = "my_passes.swap_sums"
UPDATE = [*(each.name for each in update_passes()), OWN]
PASSES = [each.name for each in passes(PassPlan({}, (), ()))]
PASSES.insert(PASSES.index("mixed_precision") + 1, OWN)


@pytest.mark.slow
def test_every_pass_is_verified(inspected: tuple[Path, Result]) -> None:
    code, output = inspected[1]
    assert code == 0, output
    assert [line.split()[-2] for line in output.splitlines() if line.endswith(": verified")] == [
        f"{name}:" for name in PASSES + UPDATE
    ]


@pytest.mark.slow
def test_the_log_has_a_table_of_the_passes(inspected: tuple[Path, Result]) -> None:
    output = inspected[1].output
    rows = output[output.index("training step: passes\n") :].splitlines()[1 : len(PASSES) + 4]
    assert [row.split()[0] for row in rows] == ["pass", "traced", *PASSES, "all"]


@pytest.mark.slow
def test_every_graph_is_dumped(inspected: tuple[Path, Result]) -> None:
    for folder, expected in ((inspected[0], PASSES), (inspected[0] / "optimizer", UPDATE)):
        names = [path.stem for path in sorted(folder.glob("*.py"))]
        assert names == [f"{number:02d}_{name}" for number, name in enumerate(["traced", *expected])]


def dumped(inspected: tuple[Path, Result], name: str) -> list[str]:
    (path,) = inspected[0].glob(f"*_{name}.py")
    return without_bytes(path.read_text())


def operators(lines: list[str]) -> dict[str, str]:
    """Give the operator of every value."""
    values = [line.partition("  #")[0].split(" = ", 1) for line in lines]
    return {value[0]: value[1].partition("(")[0] for value in values if len(value) == 2}


@pytest.mark.slow
def test_two_dumps_differ_by_what_the_pass_did(inspected: tuple[Path, Result]) -> None:
    before, after = (operators(dumped(inspected, name)) for name in ("shard_params", "mixed_precision"))
    assert before.items() <= after.items()
    assert {after[value] for value in after.keys() - before.keys()} == {"aten._to_copy.default"}


@pytest.mark.slow
def test_a_pass_of_ones_own_takes_its_place(inspected: tuple[Path, Result]) -> None:
    before, after = (dumped(inspected, name) for name in ("mixed_precision", "my_passes.swap_sums"))
    changed = [line for line in after if line not in before]
    assert changed and all("aten.add.Tensor(" in line for line in changed)


@pytest.mark.slow
def test_a_policy_changes_nothing_but_tags(inspected: tuple[Path, Result]) -> None:
    before, after = (dumped(inspected, name) for name in ("merge_equal", "tag_resharding"))
    assert before != after
    assert [line.partition("  #")[0] for line in before] == [line.partition("  #")[0] for line in after]


@pytest.mark.slow
def test_a_pass_with_nothing_to_do_leaves_the_dump_as_it_is(inspected: tuple[Path, Result]) -> None:
    assert dumped(inspected, "offload_activations") == dumped(
        inspected, "bucket_collectives"
    )  # one rank gathers nothing
