"""Validation says the loss of its whole split, however many ranks share it, and leaves the training alone."""

import json
from pathlib import Path

import pytest
from runs import EAGER, evaluate, numbers, records, saved, saved_steps, train


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_a_run_is_bitwise_the_same_with_and_without_it(mode: str, tmp_path: Path) -> None:
    for name, options in {"with": ["--validation.enable", "--validation.freq", "1"], "without": []}.items():
        options += ["--compile.mode", mode, "--training.steps", "3"]
        code, output = train("--job.dump_folder", str(tmp_path / name), *options)
        assert code == 0, output
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert saved(tmp_path / "with", 3) == saved(tmp_path / "without", 3)
    assert len(records(tmp_path / "with")) == 6  # a validation after every step


def test_its_corpus_is_opened_before_any_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, output = train(
        "--job.dump_folder", str(folder), "--validation.enable", "--validation.dataset_path", "nowhere"
    )
    assert code == 2, output
    assert "validation.dataset_path = 'nowhere': there is no such file or folder" in output
    assert not (folder / "metrics.jsonl").exists() and not (folder / "checkpoint").exists()


def test_a_set_without_anything_to_learn_ends_the_run_before_any_step(tmp_path: Path) -> None:
    for name, length in {"short": 8, "long": 80}.items():
        row = json.dumps({"prompt": "a" * length, "completion": "b" * length})
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * 20)
    sets = [f'{{name="{name}", dataset_path="{tmp_path / name}.jsonl"}}' for name in ("short", "long")]
    words = ["--validation.enable", "--validation.sets", f"[{','.join(sets)}]", "--training.too_long", "drop", *EAGER]
    code, output = train("--job.dump_folder", str(tmp_path / "run"), *words)
    assert code == 2, output
    assert (
        "validation.sets, entry 2: there is no target in the first 2 microbatches, in rows of validation.seq_len = 64"
        in output
    )
    assert "dropped, as longer than it: " in output and not (tmp_path / "run" / "metrics.jsonl").exists()
    assert (
        f"validation data: {tmp_path / 'short.jsonl'}; 1 file; 20 documents, all of them; completion of the" in output
    )
    assert "training data: stdlib, the embedded corpus: this Python's own sources; " in output


def split_loss(folder: Path, num_ranks: int, corpus: Path, *options: str) -> float:
    """Validate the untrained model, to the end of a split unless options say otherwise."""
    what = ["--training.steps", "1", "--optimizer.lr", "0", "--checkpoint.no-enable", "--validation.enable"]
    what += ["--validation.steps", "-1", "--training.mixed_precision_param", "float32"]
    what += ["--validation.dataset_path", str(corpus), "--validation.local_batch_size", "2", *options]
    code, output = train("--job.dump_folder", str(folder), *what, ranks=num_ranks)
    assert code == 0, output
    return records(folder)[-1]["validation_loss"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Few documents of very different lengths: the last rows are one rank's alone."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(["a short one", "import os\n" * 90, "x = {}\n" * 31, "", "def f(): return 1\n" * 7]):
        (folder / f"{number}.py").write_text(text)
    return folder


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_the_loss_is_that_of_the_split_on_any_number_of_ranks(mode: str, corpus: Path, tmp_path: Path) -> None:
    alone = split_loss(tmp_path / "alone", 1, corpus)
    assert split_loss(tmp_path / "shared", 2, corpus, "--compile.mode", mode) == pytest.approx(alone, rel=1e-6)
    assert split_loss(tmp_path / "part", 1, corpus, "--validation.steps", "1", *EAGER) != pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
def test_the_loss_is_that_of_the_split_by_other_rows_and_on_parts_of_rows(corpus: Path, tmp_path: Path) -> None:
    alone = split_loss(tmp_path / "alone", 1, corpus)
    assert split_loss(tmp_path / "other rows", 1, corpus, "--validation.local_batch_size", "1") == pytest.approx(
        alone, rel=1e-6
    )
    context = ("--parallelism.context_parallel_degree", "2")
    assert split_loss(tmp_path / "context", 2, corpus, *context) == pytest.approx(alone, rel=1e-6)
    assert numbers(tmp_path / "context")[1] == pytest.approx(numbers(tmp_path / "alone")[1], rel=1e-6)  # of training


def test_each_set_has_the_loss_of_a_run_that_validates_on_it_alone(corpus: Path, tmp_path: Path) -> None:
    sets = f"[{{name = 'files', dataset_path = '{corpus}', steps = -1}}, {{name = 'held_out'}}]"
    what = ["--training.steps", "1", "--checkpoint.no-enable", "--validation.enable"]
    for name, options in {
        "sets": ["--validation.sets", sets],
        "files": ["--validation.dataset_path", str(corpus), "--validation.steps", "-1"],
        "held_out": [],
    }.items():
        code, output = train("--job.dump_folder", str(tmp_path / name), *what, *options, *EAGER)
        assert code == 0, output
    found = records(tmp_path / "sets")[-1]
    alone = {name: records(tmp_path / name)[-1]["validation_loss"] for name in ("files", "held_out")}
    assert found == {"step": 1, **{f"validation_loss/{name}": loss for name, loss in alone.items()}}


@pytest.mark.slow
def test_a_set_has_a_format_and_columns_of_its_own(tmp_path: Path) -> None:
    """While training reads text: as in a run that reads both alike, and as `evaluate` reads it."""
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(40)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = "{prompt = 'question', completion = 'answer'}"
    qa = f"name = 'qa', dataset_path = '{tmp_path / 'qa.jsonl'}', steps = -1"
    what = ["--training.steps", "1", "--optimizer.lr", "0", "--validation.enable"]
    for name, options in {
        "sets": ["--validation.sets", f"[{{{qa}, format = 'completion', columns = {columns}}}, {{name = 'held_out'}}]"],
        "alone": ["--validation.dataset_path", str(tmp_path / "qa.jsonl"), "--validation.columns", columns],
        "as training": ["--training.columns", columns, "--training.dataset_path", str(tmp_path / "qa.jsonl")]
        + ["--validation.sets", f"[{{{qa}}}]"],
    }.items():
        code, output = train("--job.dump_folder", str(tmp_path / name), *what, "--validation.steps", "-1", *options)
        assert code == 0, output
    found = records(tmp_path / "sets")[-1]["validation_loss/qa"]
    assert found == records(tmp_path / "alone")[-1]["validation_loss"]
    named = ["--set", f"qa={tmp_path / 'qa.jsonl'}", "--validation.columns", columns]
    evaluated = evaluate(str(tmp_path / "sets"), "--json", *named)
    code, output = evaluated
    assert code == 0, output
    assert json.loads(output.splitlines()[-1])["sets"]["qa"]["loss"] == pytest.approx(found, rel=1e-5)


PATIENT = [  # with lr = 0 no validation is better than the first
    *["--optimizer.lr", "0", "--validation.enable", "--validation.freq", "1", "--validation.patience", "3"],
    *["--checkpoint.keep_best", "--checkpoint.keep_latest_k", "2", "--checkpoint.interval", "1"],
    *["--lr_scheduler.total_steps", "9", *EAGER],
]


def test_a_run_without_improvement_ends_and_keeps_its_best_also_when_it_is_resumed(tmp_path: Path) -> None:
    for name, parts in {"whole": ["9"], "parts": ["2", "9"]}.items():
        for steps in parts:
            code, output = train("--job.dump_folder", str(tmp_path / name), *PATIENT, "--training.steps", steps)
            assert code == 0, output
        assert "3 validations in a row found no validation_loss below" in output
        assert saved_steps(tmp_path / name) == [1, 3, 4]
        assert json.loads((tmp_path / name / "status.json").read_text())["state"] == "finished"
    assert saved(tmp_path / "parts", 4) == saved(tmp_path / "whole", 4)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    best = json.loads((tmp_path / "parts" / "checkpoint" / "best.json").read_text())
    assert best == {"metric": "validation_loss", "step": 1, "value": records(tmp_path / "whole")[1]["validation_loss"]}


@pytest.mark.slow
def test_a_run_that_has_ended_for_want_of_patience_does_nothing_when_started_again(tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), *PATIENT, "--training.steps", "9"]
    options += ["--checkpoint.last_save_model_only"]  # from that alone training couldn't go on
    for _ in range(2):
        code, output = train(*options)
        assert code == 0, output
    assert "validation.patience = 3: it is used up, so there is no step left to do" in output
    assert max(numbers(tmp_path)) == 4
    code, output = train(*options, "--validation.patience", "4")  # and with more of it goes on
    assert code == 0, output
    assert max(numbers(tmp_path)) == 5
