"""Comparison of runs: what it says of known metrics, and of folders that are none or are damaged."""

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from torchtitan_graph.compare.__main__ import main
from torchtitan_graph.compare.report import bits, report
from torchtitan_graph.compare.runs import read_runs
from torchtitan_graph.errors import UserError


def make(folder: Path, records: list[dict[str, Any]], config: str = "", end: str = "") -> str:
    folder.mkdir()
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return str(folder)


def steps(*losses: float, every: int = 1, **others: Any) -> list[dict[str, Any]]:
    return [{"step": (i + 1) * every, "loss": loss, "grad_norm": 0.5, **others} for i, loss in enumerate(losses)]


def last_of_bits(tmp_path: Path, one: list[dict[str, Any]], two: list[dict[str, Any]], end: str = "") -> str:
    return bits(*read_runs([Path(make(tmp_path / "a", one)), Path(make(tmp_path / "b", two, end=end))]))


def test_the_first_step_with_another_bit_is_found(tmp_path: Path) -> None:
    near = 3.0 * (1 + 2**-52)
    said = last_of_bits(tmp_path, steps(5.0, 4.0, 3.0, 2.0), steps(5.0, 4.0, near, 1.0))
    assert said == f"bits: a and b differ first at step 3 (equal up to step 2): loss 3.0 and {near}"


def test_speed_and_memory_are_no_bits_and_lengths_may_differ(tmp_path: Path) -> None:
    one, two = steps(5.0, 4.0, mfu=0.1, memory_gib=1.0), steps(5.0, 4.0, 3.0, mfu=0.2, memory_gib=2.0)
    said = last_of_bits(tmp_path, one, two, end='{"step": 4, "lo')  # being written
    assert said == "bits: a and b are equal in all 2 steps that both logged, up to step 2"


def test_steps_of_other_frequencies_are_compared_where_both_logged(tmp_path: Path) -> None:
    said = last_of_bits(tmp_path, steps(9.0, 8.0, 7.0, 6.0), steps(8.0, 6.5, every=2))
    assert said.startswith("bits: a and b differ first at step 4 (equal up to step 2): loss 6.0 and 6.5")


@pytest.mark.parametrize(
    ("one", "two"), [(0.0, -0.0), (float("nan"), float("inf")), (1.0, 1)], ids=["signs of zero", "not finite", "type"]
)
def test_the_sign_of_a_zero_and_what_is_not_finite_are_bits(tmp_path: Path, one: float, two: float) -> None:
    said = last_of_bits(tmp_path, steps(one), steps(two))
    assert "differ first at step 1 (the first that both logged)" in said


def test_equal_numbers_that_are_not_finite_are_equal(tmp_path: Path) -> None:
    assert "equal in all 1 steps" in last_of_bits(tmp_path, steps(float("nan")), steps(float("nan")))


def test_validations_and_terms_of_the_loss_are_compared_too(tmp_path: Path) -> None:
    one = [*steps(5.0, loss_terms={"z": 0.25}), {"step": 1, "validation_loss": 4.0}]
    two = [*steps(5.0, loss_terms={"z": 0.5}), {"step": 1, "validation_loss": 4.5}]
    said = last_of_bits(tmp_path, one, two)
    assert "loss_terms {'z': 0.25} and {'z': 0.5}, validation_loss 4.0 and 4.5" in said


def test_the_report_has_configurations_curves_and_the_last_common_step(tmp_path: Path) -> None:
    one = make(tmp_path / "a", steps(5.0, 4.0), "[optimizer]\nlr = 1e-3\n[job]\ndump_folder = 'a'")
    two = make(tmp_path / "b", steps(5.0, 3.5, 3.0), "[optimizer]\nlr = 2e-3\n[job]\ndump_folder = 'b'")
    text = report(read_runs([Path(one), Path(two)]))
    assert re.search(r"^optimizer.lr +0.001  0.002$", text, re.MULTILINE) and "dump_folder" not in text
    assert re.search(r"^loss +2 +4 +3.5 \(-0.5\)$", text, re.MULTILINE)
    assert re.search(r"^a +█ +▅$", text, re.MULTILINE)


def test_the_picture_is_one_whole_file_with_each_run_in_each_chart(tmp_path: Path) -> None:
    a = make(tmp_path / "a<&", steps(5.0, 4.0, lr=1e-3))
    b = make(tmp_path / "b", steps(5.0, float("nan"), lr=1e-3))
    assert main([a, b, "--picture", str(tmp_path / "c.svg")]) == 0
    root = xml.etree.ElementTree.parse(tmp_path / "c.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert "a<&" in "".join(root.itertext())
    curves = [path for path in root.iter(f"{name}path") if path.get("fill") == "none"]
    assert len(curves) == 2 * len(root.findall(f"{name}g")) == 6
    assert "http" not in (tmp_path / "c.svg").read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", r"metrics.jsonl, line 3: is not JSON"),
        ('{"loss": 1.0}', r"line 3: step = None is not a number of at least 2"),
        ('{"step": 1, "loss": 1.0}', r"line 3: step = 1 is not a number of at least 2, the step before"),
        ('{"step": 2, "loss": 1.0}', r"line 3: loss of step 2 is there twice"),
        ('{"step": 3, "loss": "low"}', r"line 3: loss = 'low' is not a number"),
    ],
)
def test_an_edited_line_is_one_error(tmp_path: Path, line: str, why: str) -> None:
    a, b = make(tmp_path / "a", steps(5.0, 4.0), end=line + "\n"), make(tmp_path / "b", [])
    with pytest.raises(UserError, match=why):
        read_runs([Path(a), Path(b)])


def test_a_folder_that_is_no_run_is_refused_with_the_nearest(tmp_path: Path) -> None:
    a = make(tmp_path / "llama3_debug", steps(5.0))
    for folder, why in [
        (str(tmp_path / "lama3_debug"), f"; did you mean {a}?"),
        (str(tmp_path), f"; these are runs: {a}"),
        (str(tmp_path / "other"), "has neither metrics.jsonl nor config.toml$"),
    ]:
        with pytest.raises(UserError, match=why):
            read_runs([Path(a), Path(folder)])


def test_two_runs_are_needed_and_each_once(tmp_path: Path) -> None:
    a = make(tmp_path / "a", steps(5.0))
    with pytest.raises(UserError, match="two runs, or more"):
        read_runs([Path(a)])
    with pytest.raises(UserError, match="named twice"):
        read_runs([Path(a), Path(a)])


def test_runs_without_steps_or_a_configuration_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", []), make(tmp_path / "b", [], "[training]\nno_such = 1")
    text = report(read_runs([Path(a), Path(b)]))
    assert "configuration: not compared" in text and "no step that all runs logged" in text
    assert "bits: a and b have logged no common step" in text
