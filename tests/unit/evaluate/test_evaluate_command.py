"""What can't be evaluated is refused before any process joins another."""

from pathlib import Path

import pytest

from torchtitan_graph.evaluate.__main__ import main, table
from torchtitan_graph.evaluate.source import name_sets, open_source

TEXT, QUESTION = "some text\n", '{"question": "a", "choices": ["b", "c"], "answer": 0}\n'


@pytest.mark.parametrize(
    "words, expected",
    [
        ("nowhere", "nowhere: there is no such folder"),
        (". --set a=text.txt", ".: holds neither a run, with its config.toml"),
        ("hf", "hf: say what to evaluate it on: --set NAME=PATH"),
        ("hf --set a", "--set a: must be NAME=PATH"),
        ("hf --set a/b=text.txt", "--set: entry 1: name = 'a/b' must be 1 to 100 ASCII letters"),
        ("hf --set a=text.txt --step best", "--step best: hf is a Hugging Face folder, which has no checkpoints"),
        ("hf --set a=text.txt --parallelism.pipeline_parallel_degree 2", "an evaluation has no pipeline"),
        ("hf --set a=text.txt --validation.seq_le 2", "is not an option; did you mean validation.seq_len?"),
        ("hf --choices a", "--choices a: must be NAME=PATH"),
        ("hf --choices a=s3://b/c", "s3://b/c: is an address, and this must be a path of this machine"),
        ("hf --choices a=text.txt", "text.txt, line 1: is not JSON"),
        ("hf --choices a=none.jsonl", "--choices none.jsonl: there is no such file"),
        ("hf --choices a=q.jsonl --choices a=q.jsonl", "--choices: several have the same name"),
        ("run --step best", "best.json: there is no such file; a run with checkpoint.keep_best = true writes it"),
        ("run --step 7", "--step 7: there is no run/checkpoint/step-7"),
        ("run --step last", "--step last: must be newest, best or a number"),
    ],
)
def test_what_can_not_be_evaluated_is_refused(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    Path("run/checkpoint").mkdir(parents=True)
    Path("run/config.toml").write_text("")
    Path("text.txt").write_text(TEXT)
    Path("q.jsonl").write_text(QUESTION)
    assert main(words.split()) == 2
    assert expected in capsys.readouterr().err


def test_a_table_has_its_names_on_the_left_and_its_numbers_on_the_right() -> None:
    assert table(["sets", "loss"], [["a", "1.5"], ["long", "12.25"]]) == "sets   loss\na       1.5\nlong  12.25"


def test_a_missing_set_is_refused_before_anything_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "held_out.jsonl").write_text('{"text": "a"}\n')
    assert main([str(tmp_path), "--set", f"x={tmp_path / 'heldout.jsonl'}"]) == 2
    said = capsys.readouterr().err
    assert f"--set x={tmp_path / 'heldout.jsonl'}: there is no such file or folder; did you mean" in said
    assert f"{tmp_path / 'held_out.jsonl'}?" in said


def test_a_missing_set_at_an_address_is_refused_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path), "--set", "x=memory://nothing/here.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "--set x = 'memory://nothing/here.jsonl': there is no such file or folder" in said


@pytest.mark.parametrize(("words", "steps"), [([], -1), (["--validation.steps", "3"], None)])
def test_a_set_is_read_as_a_whole_unless_a_number_of_steps_is_given(
    words: list[str], steps: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text(TEXT)
    config = open_source(tmp_path, "newest", [f"a={tmp_path / 'text.txt'}"], words).config
    assert [each.steps for each in config.validation.sets] == [steps]


def test_a_set_is_called_as_it_was_given() -> None:
    sets = ["x=a.jsonl", "y=b.jsonl"]
    given = "validation.sets, entry 2: validation.dataset_path = 'b.jsonl': holds no documents"
    assert name_sets(given, sets) == "--set y=b.jsonl: holds no documents"
    assert name_sets("validation.sets, entry 1: holds none", sets) == "--set x=a.jsonl: holds none"
    assert name_sets(given, []) == given
