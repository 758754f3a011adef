"""A run of epochs has full steps to its end, spans them with its schedule, and resumes in the middle."""

import json

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
    assert f"in {steps} steps of 8, " in whole.output and "one epoch: " in whole.output
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
