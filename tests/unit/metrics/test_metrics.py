"""What is logged, when and where."""

import errno
import io
import json
import math
import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from disks import fill, set_read_only, small_disk
from torchtitan_graph.config import JobConfig, job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.metrics import Metrics, console, jsonl, metrics, tensorboard
from torchtitan_graph.metrics.jsonl import read_records
from torchtitan_graph.small_files import BadFile

KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens_seen", "tokens_per_second", "step_time_s", "data_loading_s",
    "documents_per_second", "read_mb_per_second", "mfu",
    "memory_gib",
]  # fmt: skip


@pytest.fixture(autouse=True)
def log_to_caplog(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO")


class Clock:
    """Stand in for the time module: seconds pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def build(folder: Path, rank: int = 0, options: dict[str, Any] | None = None, **rest: Any) -> Metrics:
    config = JobConfig(metrics=job.Metrics(**({"log_freq": 4} | (options or {}))))
    return Metrics(config, folder, rank=rank, **({"total_steps": 10} | rest))


def run(logs: Metrics, first: int, last: int, clock: Clock | None = None, loss: Any = 1.5, **others: Any) -> None:
    """Take steps of 2 s and 100 tokens, half a second of it waiting for data, with 5 s between them."""
    for step in range(first, last + 1):
        logs.start_step()
        if clock is not None:
            clock.now += 2.0
        logs.end_step(step, loss=loss, grad_norm=0.25, lr=1e-3, tokens_seen=100 * step, data_loading_s=0.5, **others)
        if clock is not None:
            clock.now += 5.0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_first_last_and_every_log_freq_step_is_logged(tmp_path: Path) -> None:
    run(build(tmp_path), 1, 10)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 4, 8, 10]


def test_a_line_has_exactly_these_keys(tmp_path: Path) -> None:
    run(build(tmp_path), 1, 1)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert list(line) == KEYS
    assert line["mfu"] is None
    assert line["memory_gib"] > 0


def test_floats_keep_all_their_digits(tmp_path: Path) -> None:
    run(build(tmp_path), 1, 1, loss=math.pi / 3)
    assert lines(tmp_path / "metrics.jsonl")[0]["loss"] == math.pi / 3


def test_times_are_means_since_the_last_log_of_the_steps_alone(tmp_path: Path, clock: Clock) -> None:
    run(build(tmp_path, peak_flops=60.0), 1, 4, clock, flops=30.0)
    for line in lines(tmp_path / "metrics.jsonl"):
        assert line["step_time_s"] == 2.0
        assert line["tokens_per_second"] == 50.0
        assert line["data_loading_s"] == 0.5
        assert line["mfu"] == 0.25


def test_what_is_read_counts_from_log_to_log(tmp_path: Path, clock: Clock) -> None:
    run(build(tmp_path), 1, 8, clock, documents=6, bytes_read=3_000_000)
    for line in lines(tmp_path / "metrics.jsonl"):
        assert (line["documents_per_second"], line["read_mb_per_second"]) == (3.0, 1.5)


def test_mfu_counts_the_flops_of_each_step(tmp_path: Path, clock: Clock) -> None:
    logs = build(tmp_path, peak_flops=10.0)
    for step, flops in ((2, 10.0), (3, 20.0), (4, 30.0)):
        run(logs, step, step, clock, flops=flops)
    assert lines(tmp_path / "metrics.jsonl")[0]["mfu"] == 1.0


def test_mfu_of_a_pipeline_is_the_mean_over_its_stages(tmp_path: Path, clock: Clock) -> None:
    def of_all_stages(state: dict[str, Any]) -> dict[str, Any]:
        return {name: x + x.new_tensor([30.0, 1.0]) for name, x in state.items()}  # another stage with 30 FLOPs

    run(build(tmp_path, peak_flops=10.0, of_all_stages=of_all_stages), 1, 1, clock, flops=10.0)
    assert lines(tmp_path / "metrics.jsonl")[0]["mfu"] == 1.0


def test_the_tokens_of_an_earlier_process_are_not_this_one_s_speed(tmp_path: Path, clock: Clock) -> None:
    run(build(tmp_path, start_step=7, tokens_seen=700), 8, 8, clock)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["tokens_per_second"], line["tokens_seen"]) == (50.0, 800)


def test_ranks_are_not_compared_in_the_first_step_of_a_process_which_warms_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    logs, watched = build(tmp_path, start_step=3), []
    for step in (4, 5, 8):
        with logs.watch_work(step):
            watched.append(logs._work is not None)
    assert watched == [False, False, True]


def test_tokens_that_are_taken_back_are_no_negative_speed(tmp_path: Path, clock: Clock) -> None:
    run(build(tmp_path, start_step=7, tokens_seen=900), 8, 8, clock)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["tokens_per_second"], line["tokens_seen"]) == (0, 800)


def test_every_dashboard_gets_the_samples(tmp_path: Path) -> None:
    logs, shown = build(tmp_path), []
    dashboard: Any = SimpleNamespace(texts=lambda step, values: shown.append((step, values)))
    logs._dashboards = [dashboard, dashboard]
    logs.log_samples(3, [("a", " b"), ("c", "")])
    assert shown == [(3, {"samples/1": "a b", "samples/2": "c"})] * 2


def test_validation_is_a_line_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = build(tmp_path)
    logs.log_validation(5, {"validation_loss": 3.25})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 5, "validation_loss": 3.25}]
    assert caplog.messages == ["step  5/10  50%  validation loss 3.2500"]


def test_console_line(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run(build(tmp_path, total_steps=4000, peak_flops=60.0), 4, 4, clock, flops=30.0)
    assert re.fullmatch(
        r"step    4/4000   0%  loss 1\.5000  grad norm 0\.2500  lr 1\.00e-03  200 tokens/s  \d+\.\d\d GiB  "
        r"MFU 25\.0%  waiting for data 25%  2:13:12 left",
        caplog.messages[-1],
    )


# Going on


def test_a_resumed_run_drops_later_and_torn_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logs = build(tmp_path)
    run(logs, 1, 4)
    logs.log_validation(4, {"validation_loss": 3.0})
    run(logs, 5, 8)
    logs.log_validation(8, {"validation_loss": 2.0})
    kept = path.read_text().splitlines(keepends=True)[:3]
    with path.open("a") as file:
        file.write('{"step": 9, "lo')
    moved = path.read_text().splitlines()[3:]
    run(build(tmp_path, start_step=5), 6, 8, loss=9.0)
    assert path.read_text().splitlines(keepends=True)[:3] == kept
    assert [(line["step"], line.get("loss", line.get("validation_loss"))) for line in lines(path)] == [
        (1, 1.5),
        (4, 1.5),
        (4, 3.0),
        (8, 9.0),
    ]
    assert (tmp_path / "metrics_dropped.jsonl").read_text().splitlines() == moved


def test_nothing_to_drop_leaves_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(build(tmp_path), 1, 4)
    monkeypatch.setattr("os.replace", None)
    build(tmp_path, start_step=4)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 4]


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    dropped = tmp_path / "metrics_dropped.jsonl"
    for _ in range(3):
        run(build(tmp_path), 1, 4)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 4]
    assert [line["step"] for line in lines(dropped)] == [1, 4, 1, 4]  # each earlier run's are kept


STEP = '{"step": %d, "loss": 1.5}\n'
ODD = [
    "",
    "{",
    "[]",
    "7",
    '{"loss": 1}',
    '{"step": "2"}',
    '{"step": 1e999}',
    '{"step": null}',
    "[" * 5000,
    "\0" * 9,
    "é",
]


@pytest.mark.parametrize("odd", ODD)
def test_odd_lines_stay_where_they_are_before_good_ones_and_go_behind(odd: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept, moved = STEP % 1 + odd + "\n" + STEP % 2, odd + "\n" + STEP % 3 + odd
    path.write_text(kept + moved)
    jsonl.begin(path, 2)
    assert path.read_text() == kept
    assert (tmp_path / "metrics_dropped.jsonl").read_text() == moved + "\n" * (not moved.endswith("\n"))


@pytest.mark.parametrize("block", [1, 2, 3, 7, 10**6])
def test_the_last_line_to_keep_is_found_from_the_end(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK", block)
    path, all_lines = tmp_path / "metrics.jsonl", [STEP % step for step in (1, 1, 20, 300)]
    for torn in ("", '{"ste'):
        for start_step, num_kept in ((0, 0), (1, 2), (19, 2), (20, 3), (400, 4)):
            path.write_text("".join(all_lines) + torn)
            jsonl.begin(path, start_step)
            assert path.read_text() == "".join(all_lines[:num_kept])


def test_a_line_that_was_torn_while_it_was_moved_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(STEP % 1 + STEP % 2)
    (tmp_path / "metrics_dropped.jsonl").write_text((STEP % 2)[:9])
    jsonl.begin(tmp_path / "metrics.jsonl", 1)
    assert (tmp_path / "metrics_dropped.jsonl").read_text() == (STEP % 2)[:9] + "\n" + STEP % 2


def test_what_is_no_file_of_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(UserError, match="metrics.jsonl: is not a regular file, but a FIFO"):
        build(tmp_path)
    path.unlink()
    path.touch()
    os.truncate(path, 2**40)
    for start_step in (0, 5):
        with pytest.raises(UserError, match="metrics.jsonl: .*move the file away"):
            build(tmp_path, start_step=start_step)
    path.write_text(STEP % 1)
    os.mkfifo(tmp_path / "metrics_dropped.jsonl")
    with pytest.raises(UserError, match="metrics_dropped.jsonl: is not a regular file"):
        build(tmp_path)
    assert path.read_text() == STEP % 1


def test_what_can_not_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "tb").touch()
    with pytest.raises(UserError, match=r"metrics.enable_tensorboard = true: .*tb can't be written"):
        build(tmp_path, options={"enable_tensorboard": True})
    with small_disk(tmp_path / "disk", "64k") as disk:
        run(build(disk), 1, 4)
        fill(disk)
        with pytest.raises(UserError, match=r"metrics.jsonl can't be written: the disk at .* is full"):
            build(disk)  # of whose lines none is lost
        assert len(lines(disk / "metrics.jsonl")) == 2
        set_read_only(disk)
        with pytest.raises(UserError, match=r"metrics.jsonl can't be written: .*Read-only file system"):
            build(disk, start_step=4)


# Ranks


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only")])
def test_training_goes_on_where_numbers_can_not_be_written(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(number, words)

    with build(tmp_path, options={"enable_tensorboard": True, "log_freq": 1}) as logs:
        run(logs, 1, 1)
        with monkeypatch.context() as patch:
            patch.setattr(metrics, "append", no_room)
            patch.setattr(tensorboard.TensorBoard, "scalars", no_room)
            run(logs, 2, 3)
        run(logs, 4, 4)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 4]
    assert caplog.text.count(words) == 1 and "training continues" in caplog.text


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    jsonl.append(path, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, limits[1]))
    try:
        with pytest.raises(OSError):
            jsonl.append(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    jsonl.append(path, {"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(OSError, match="No such device"):  # nothing waits for a reader
        jsonl.append(tmp_path / "fifo.jsonl", {"step": 4})


def test_records_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' * 3 + '{"step"')
    assert [*read_records(path)] == [{"step": 1}] * 3
    with path.open("w") as file:
        file.write('{"step": 1}\n')
        file.truncate(2**29)  # a hole: nothing that large is written or read
    with pytest.raises(BadFile, match="metrics.jsonl, line 2: has more than 16,777,216 bytes"):
        [*read_records(path)]


def test_numbers_that_are_not_finite_are_null_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = {"step": 3, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5, "metrics": {"mine": -math.inf}}
    jsonl.append(path, record)
    written = json.loads(path.read_text(), parse_constant=pytest.fail)  # a word that JSON does not have
    assert written == {
        **{"step": 3, "loss": None, "grad_norm": None, "lr": 0.5, "metrics": {"mine": None}},
        "not_finite": {"loss": "nan", "grad_norm": "inf", "metrics.mine": "-inf"},
    }
    (read,) = read_records(path)
    assert math.isnan(read["loss"]) and read["grad_norm"] == math.inf and read["lr"] == 0.5 and len(read) == 5
    path.write_text('{"step": 3, "loss": null, "not_finite": {"loss": "a word"}}\n')
    assert [*read_records(path)] == [{"step": 3, "loss": None}]


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(build(tmp_path, rank=1, options={"enable_tensorboard": True}), 1, 4)
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == []


def test_all_ranks_write_on_request_but_one_prints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"save_for_all_ranks": True, "enable_tensorboard": True}
    for rank in (0, 3):
        with build(tmp_path, rank=rank, options=options) as logs:
            run(logs, 1, 1)
    assert len(caplog.messages) == 1
    assert [len(lines(tmp_path / name)) for name in ("metrics.jsonl", "metrics_rank3.jsonl")] == [1, 1]
    assert len(list((tmp_path / "tb").glob("events*"))) == len(list((tmp_path / "tb" / "rank_3").glob("events*"))) == 1


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    with build(tmp_path, options={"enable_tensorboard": True}) as logs:
        numbers = {"replicas": 2, "redone_steps": 1, "heal_s": 0.5}
        run(logs, 1, 4, skipped_steps=1, roll_backs=1, replicas=numbers)
        logs.log_validation(4, {"validation_loss": 3.0})
    found = scalars(tmp_path / "tb")
    assert found["train/loss"] == [(1, 1.5), (4, 1.5)]
    assert found["validation/loss"] == [(4, 3.0)]
    other = {"performance/mfu", "experts/imbalance", *(tag for tag in metrics.TAGS.values() if tag[:6] == "ranks/")}
    assert set(found) == set(metrics.TAGS.values()) - other


def tensors(folder: Path, tag: str) -> list[bytes]:
    return [event.tensor_proto.string_val[0] for event in EventAccumulator(str(folder)).Reload().Tensors(tag)]


def test_tensorboard_shows_the_configuration_and_the_model(tmp_path: Path) -> None:
    build(tmp_path, options={"enable_tensorboard": True}, model_table="| module |", scope_table="all  1\n").close()
    (config,) = tensors(tmp_path / "tb", "config/text_summary")
    assert b"    [metrics]\n    log_freq = 4\n" in config
    assert tensors(tmp_path / "tb", "model/text_summary") == [b"| module |"]
    assert tensors(tmp_path / "tb", "scopes/text_summary") == [b"    all  1"]


def charts(folder: Path) -> dict[str, list[str]]:
    *_, layout = tensors(folder, "custom_scalars__config__")  # TensorBoard takes the last one
    parsed = Layout.FromString(layout)
    return {chart.title: list(chart.multiline.tag) for category in parsed.category for chart in category.chart}


def test_tensorboard_lays_out_the_charts_that_have_curves(tmp_path: Path) -> None:
    with build(tmp_path, options={"enable_tensorboard": True}) as logs:
        logs.log_validation(0, {"validation_loss": 3.0})  # before any step: what curves there will be is not known yet
        run(logs, 1, 8)
    found = charts(tmp_path / "tb")
    assert found["loss"] == ["train/loss$", "validation/loss(/.*)?$"]
    assert found.keys() == {
        *["loss", "gradient norm", "learning rate", "tokens per second", "memory, GiB"],
        "waiting for data, share of a step",
    }
    assert len(tensors(tmp_path / "tb", "custom_scalars__config__")) == 1


def test_a_chart_is_added_when_its_first_curve_comes(tmp_path: Path) -> None:
    with build(tmp_path, options={"enable_tensorboard": True}) as logs:
        run(logs, 1, 1)
        run(logs, 4, 4, state={"layers.0.moe.load": torch.tensor([6, 2])})
    assert charts(tmp_path / "tb").keys() > {"loss", "load of the busiest expert over the mean, by layer"}


def test_every_chart_shows_a_curve_that_there_is(tmp_path: Path) -> None:
    tags = [*metrics.TAGS.values(), "experts/imbalance/layers.0", "train/loss/experts", "metrics/accuracy"]
    for category in tensorboard.LAYOUT.values():
        for patterns in category.values():
            assert all(any(re.match(pattern, tag) for tag in tags) for pattern in patterns)


def test_tensorboard_hides_the_steps_that_are_done_again(tmp_path: Path) -> None:
    options = {"enable_tensorboard": True}
    with build(tmp_path, options=options) as logs:
        run(logs, 1, 8)
    with build(tmp_path, options=options, start_step=5) as logs:
        run(logs, 6, 8, loss=9.0)
    assert scalars(tmp_path / "tb")["train/loss"] == [(1, 1.5), (4, 1.5), (8, 9.0)]


def test_no_tensorboard_unless_enabled(tmp_path: Path) -> None:
    run(build(tmp_path), 1, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_step_that_nobody_expected_is_logged_once(tmp_path: Path) -> None:
    sink = build(tmp_path)
    run(sink, 1, 6)
    sink.log_pending()
    sink.log_pending()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 4, 6]


LOADS = {"layers.0.moe.load": torch.tensor([6, 2]), "layers.1.moe.load": torch.tensor([4, 4])}


def test_loads_are_those_of_all_stages_also_in_a_last_step_that_nobody_expected(tmp_path: Path) -> None:
    others = {"layers.1.moe.load": torch.tensor([4, 4])}
    sink = build(tmp_path, of_all_stages=lambda mine: mine | others)
    run(sink, 1, 6, state={"layers.0.moe.load": torch.tensor([6, 2])})
    sink.log_pending()
    assert [line["expert_imbalance"] for line in lines(tmp_path / "metrics.jsonl")] == [1.25] * 3


def test_the_balance_of_experts_is_a_key_where_there_are_experts(tmp_path: Path) -> None:
    run(build(tmp_path), 1, 1, state=LOADS)
    record = lines(tmp_path / "metrics.jsonl")[0]
    assert record["expert_imbalance"] == 1.25
    assert "expert_loads" not in record


def test_the_terms_of_a_loss_are_a_key_and_curves_where_there_are_several(tmp_path: Path) -> None:
    with build(tmp_path, options={"enable_tensorboard": True}) as logs:
        run(logs, 1, 1, loss_terms={"cross_entropy": torch.tensor(2.0), "own": torch.tensor(0.5)})
    assert lines(tmp_path / "metrics.jsonl")[0]["loss_terms"] == {"cross_entropy": 2.0, "own": 0.5}
    assert scalars(tmp_path / "tb")["train/loss/own"] == [(1, 0.5)]


def test_metrics_of_the_users_own_are_a_key_and_curves(tmp_path: Path) -> None:
    with build(tmp_path, options={"enable_tensorboard": True}) as logs:
        run(logs, 1, 1, own_metrics={"accuracy": torch.tensor(0.25)})
    record = lines(tmp_path / "metrics.jsonl")[0]
    assert record["metrics"] == {"accuracy": 0.25} and "loss_terms" not in record
    assert scalars(tmp_path / "tb")["metrics/accuracy"] == [(1, 0.25)]


def test_the_loads_of_experts_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    run(build(tmp_path, options={"log_freq": 1, "log_expert_loads": True}), 1, 1, state=LOADS)
    assert lines(tmp_path / "metrics.jsonl")[0]["expert_loads"] == {"layers.0": [6, 2], "layers.1": [4, 4]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's use of PIL
def test_tensorboard_shows_the_load_of_every_expert(tmp_path: Path) -> None:
    with build(tmp_path, options={"enable_tensorboard": True}) as logs:
        run(logs, 1, 1, state=LOADS)
    found = scalars(tmp_path / "tb")
    assert found["experts/imbalance/layers.0"] == [(1, 1.5)]
    assert found["experts/imbalance/layers.1"] == [(1, 1.0)]
    (image,) = EventAccumulator(str(tmp_path / "tb")).Reload().Images("experts/load")
    picture = PIL.Image.open(io.BytesIO(image.encoded_image_string)).convert("L")
    corners = [picture.getpixel((x * tensorboard.PIXELS, y * tensorboard.PIXELS)) for y in (0, 1) for x in (0, 1)]
    assert corners == [191, 63, 127, 127]


def test_tensorboard_s_full_disk_is_told_once_and_by_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with build(disk, options={"enable_tensorboard": True, "log_freq": 1}) as logs:
            run(logs, 1, 1)
            fill(disk)
            run(logs, 2, 50)
        assert caplog.text.count("No space left on device") == 1
        assert "Traceback" not in capfd.readouterr().err


# On a terminal


def test_a_bar_shows_every_step_that_is_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(metrics, "show_status", shown.append)
    with build(tmp_path) as logs:
        run(logs, 1, 6)
    with build(tmp_path / "other", rank=1) as logs:
        run(logs, 1, 6)
    assert [text.partition("step")[2].split("/")[0].strip() for text in shown] == ["2", "3", "5", "6", "", ""]


def test_the_bar() -> None:
    assert console.progress_bar(10, 40, 1.5) == "━━━━━───────────────  step 10/40  25%  1.50 s/step  0:00:45 left"


def test_each_set_of_a_validation_has_a_curve_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = build(tmp_path, options={"enable_tensorboard": True})
    logs.log_validation(5, {"validation_loss/wiki": 3.25, "validation_loss/code": 2.5})
    logs.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line == {"step": 5, "validation_loss/wiki": 3.25, "validation_loss/code": 2.5}
    assert caplog.messages[-1] == "step  5/10  50%  validation loss wiki 3.2500, code 2.5000"
    written = b"".join(path.read_bytes() for path in (tmp_path / "tb").rglob("events*"))
    assert b"validation/loss/wiki" in written and b"validation/loss/code" in written
