"""A step's budget: what is told and drawn of it, and how a pipeline's stages share one."""

import logging
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from torchtitan_graph.device import GIB
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.passes.tag_budget import Curve, Point
from torchtitan_graph.steps.budget import draw, log_budget, share

MIB = 2**20
ALL, HALF, LEAST = Point(80 * MIB, 100 * MIB, 0), Point(40 * MIB, 60 * MIB, 100), Point(20 * MIB, 50 * MIB, 200)
CURVE = Curve([ALL, HALF, LEAST], Point(50 * MIB, 70 * MIB, 50), 1000)


def with_curve(curve: Curve | None) -> GraphModule:
    gm = GraphModule({}, Graph())
    return gm if curve is None else (gm.meta.update(curve=curve) or gm)


def test_the_curve_is_told_as_a_table(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        log_budget(with_curve(CURVE), "stage 1", None)
    title, _, *rows = caplog.messages[0].splitlines()
    assert title == "stage 1: memory budget"
    assert [row.split() for row in rows] == [
        ["80.0", "MiB", "100.0", "MiB", "+0.0%"],
        ["50.0", "MiB", "70.0", "MiB", "+5.0%", "chosen"],
        ["40.0", "MiB", "60.0", "MiB", "+10.0%"],
        ["20.0", "MiB", "50.0", "MiB", "+20.0%"],
    ]


def test_it_is_drawn_to_a_file_only_where_there_is_a_curve_and_a_file(tmp_path: Path) -> None:
    picture = tmp_path / "graphs" / "curve.svg"
    log_budget(with_curve(None), "training step", picture)
    assert not picture.parent.exists()
    log_budget(with_curve(CURVE), "training step", picture)
    assert picture.read_text() == draw(CURVE)


def test_a_picture_has_a_mark_for_each_choice_where_it_belongs() -> None:
    root = ElementTree.fromstring(draw(CURVE))
    marks = root.findall("{*}circle")
    places = [(float(mark.attrib["cx"]), float(mark.attrib["cy"])) for mark in marks]
    assert [mark.attrib["fill"] == "#d62728" for mark in marks] == [False, True, False, False], "the chosen one is red"
    assert [x for x, _ in places] == [90.0, 217.5, 345.0, 600.0], "to the right by operations"
    assert [y for _, y in places] == [30.0, 120.0, 150.0, 180.0], "down from the largest peak; 0 is at 330"
    assert "70.0 MiB, kept 50.0 MiB, +5.0% operations" in (marks[1][0].text or "")


def test_a_curve_of_one_point_can_be_drawn() -> None:
    ElementTree.fromstring(draw(Curve([ALL], ALL, 1000)))


def test_a_stage_that_multiplies_nothing_is_told_and_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        log_budget(with_curve(Curve([Point(0, 0, 0)], Point(0, 0, 0), 0)), "stage 0", tmp_path / "curve.svg")
    assert caplog.messages[0].splitlines()[2].split() == ["0.0", "MiB", "0.0", "MiB", "+0.0%", "chosen"]
    ElementTree.fromstring((tmp_path / "curve.svg").read_text())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)


def holds(part: float) -> int:
    return int((2 + 4 * part) * GIB)


@pytest.mark.parametrize(("gib", "part"), [(7.0, 1.0), (6.9, 31 / 32), (5.0, 0.5), (3.2, 1 / 32), (3.0, 0.0)])
def test_stages_keep_the_largest_part_that_fits(gib: float, part: float, alone: None) -> None:
    assert share(gib, {"parameters": GIB}, holds) == part


def test_what_no_part_fits_is_refused_with_the_least(alone: None) -> None:
    words = "memory_budget_gib = 2.5: the least that this rank can hold is 3.000 GiB: 1.000 of parameters, 2.000 of a s"
    with pytest.raises(UserError, match=words):
        share(2.5, {"parameters": GIB}, holds)


def test_what_does_not_fit_on_another_rank_is_refused_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_another(tensor: torch.Tensor, op: object) -> None:
        assert tensor <= 0, "here it fits"
        tensor.fill_(GIB // 2)

    monkeypatch.setattr(dist, "all_reduce", on_another)
    with pytest.raises(UserError, match="memory_budget_gib = 5: the least that one rank of the pipeline .* 5.500 GiB"):
        share(5.0, {"parameters": GIB}, holds)
