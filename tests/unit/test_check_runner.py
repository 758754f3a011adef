"""The commands that check can run one check again, and say how."""

import argparse

import pytest

from torchtitan_graph.check.family import check_keys
from torchtitan_graph.check.matrix import Cell
from torchtitan_graph.check.runner import Check, Failed, Skipped, parse, report
from torchtitan_graph.models import llama3


def fail() -> None:
    raise Failed("because")


CHECKS = [Check("first, fp32", lambda: None), Check("second, bf16", fail, needs="first, fp32"), Check("third", fail)]


def run(*words: str) -> int:
    options, _ = parse(argparse.ArgumentParser(), list(words))
    return report("mine", CHECKS, options)


def test_a_failed_check_is_run_again_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 1
    output = capsys.readouterr().out
    assert "to run one again: --only 'second, bf16'\n" in output and "mine: 1 passed, 2 failed, 0 skipped" in output
    assert run("--only", "second, bf16") == 1
    output = capsys.readouterr().out
    assert "mine: 0 passed, 1 failed, 0 skipped" in output and "again" not in output
    assert run("--only", "fp32") == 0


def test_a_title_of_no_check_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "fourth") == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["  first, fp32", "  second, bf16", "  third"]


def test_a_family_without_keys_of_hugging_face_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    check_keys(Cell())
    monkeypatch.setattr(llama3, "HF_KEYS", {})
    with pytest.raises(Skipped, match="HF_KEYS is empty: it is needed for Hugging Face's files alone"):
        check_keys(Cell())
