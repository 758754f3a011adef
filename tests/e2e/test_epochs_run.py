"""A run of epochs has full steps to its end, spans them with its schedule, and resumes in the middle."""

import json
import re
import shutil

import pytest
from runs import EAGER, train


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * (1 + n * 7 % 23) + str(n)}) + "\n" for n in range(200)))
    return file


def records(folder) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if "lr" in record]


def options_of(texts, folder) -> list[str]:
    options = ["--training.dataset_path", str(texts), "--training.epochs", "1", "--training.steps", "1000"]
    return [*EAGER, *options, "--job.dump_folder", str(folder), "--training.mixed_precision_param", "float32"]


def test_an_epoch_ends_with_one_short_step_on_any_number_of_ranks(texts, tmp_path):
    whole = train(*options_of(texts, tmp_path / "whole"))
    assert whole.code == 0, whole.output
    one = records(tmp_path / "whole")
    steps = len(one)
    assert f"in {steps} steps of 8 (the last has " in whole.output and "one epoch: " in whole.output
    tokens = [b["tokens_seen"] - a["tokens_seen"] for a, b in zip(one, one[1:], strict=False)]
    assert min(tokens[:-1]) > 0.9 * max(tokens) and one[-1]["step"] == steps
    assert one[-1]["lr"] < one[-2]["lr"] < one[1]["lr"], "the schedule ends with the data"
    status = json.loads((tmp_path / "whole/status.json").read_text())
    assert status["step"] == status["total_steps"] == steps

    # The last, short step on two ranks, after a resume.
    last = one[-1]["step"]
    first = train(*options_of(texts, tmp_path / "two"), "--checkpoint.interval", str(last - 1), ranks=2)
    assert first.code == 0, first.output
    (tmp_path / "two/checkpoint" / f"step-{last}").rename(tmp_path / "away")
    again = train(*options_of(texts, tmp_path / "two"), "--checkpoint.interval", str(last - 1))
    assert again.code == 0 and f"resuming after step {last - 1}" in again.output, again.output
    two = records(tmp_path / "two")
    assert [record["tokens_seen"] for record in two[-1:]] == [one[-1]["tokens_seen"]]
    assert two[-1]["loss"] == pytest.approx(one[-1]["loss"], abs=1e-5)


def test_a_run_resumed_with_other_steps_ends_with_its_data(texts, tmp_path):
    """Rows read before are not counted as steps of now, and rows to come are all read."""
    first = train(*options_of(texts, tmp_path / "more"), "--training.steps", "3", "--checkpoint.interval", "3")
    assert first.code == 0 and "the run ends before its data does" in first.output, first.output
    for name in ("fewer", "again"):
        shutil.copytree(tmp_path / "more", tmp_path / name)
    changes = {
        "more": ["--training.local_batch_size", "16", "--training.global_batch_size", "16"],
        "fewer": ["--training.local_batch_size", "4", "--training.global_batch_size", "4"],
        "again": ["--checkpoint.load_step", "3", "--checkpoint.exclude_from_loading", "dataloader"],
    }
    seen = {}
    for name, size in {"more": 16, "fewer": 4, "again": 8}.items():
        run = train(*options_of(texts, tmp_path / name), *changes[name])
        rows = int(re.search(r"one epoch: ([\d,]+) rows", run.output)[1])
        left = rows if name == "again" else rows - 24
        steps = 3 + -(-left // size)
        assert run.code == 0 and f": {left} of {rows} rows are left, and {steps - 3} steps" in run.output, run.output
        found = records(tmp_path / name)
        assert found[-1]["step"] == steps and found[-1]["lr"] < found[4]["lr"]
        seen[name] = found[-1]["tokens_seen"]
    assert seen["more"] == seen["fewer"] < seen["again"]
