"""docs/passes is what scripts/draw_passes.py writes."""

import runpy
from pathlib import Path

import pytest
import torch

from torchtitan_graph import compiler

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "docs" / "passes"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return runpy.run_path(str(REPOSITORY / "scripts" / "draw_passes.py"))["pages"]()


def without_drawings(text: str) -> str:
    """Leave out what another release of torch traces otherwise."""
    return text.partition("\nBefore\n")[0]


def test_the_pages_are_what_the_script_writes(pages: dict[str, str]) -> None:
    kept = str if torch.__version__.startswith("2.13.") else without_drawings
    found = {path.name: kept(path.read_text()) for path in FOLDER.glob("*.md")}
    assert found == {name: kept(text) for name, text in pages.items()}, "run python scripts/draw_passes.py"


def test_every_pass_has_a_page_with_a_drawing(pages: dict[str, str]) -> None:
    names = [each.name for each in compiler.passes(compiler.PassPlan({}, (), ()))]
    assert [f"{name}.md" for name in names] == list(pages)[1:]
    undrawn = [name for name in names if "```mermaid" not in pages[f"{name}.md"]]
    asked = ["rest_on_host", "tag_budget", "tag_offload", "offload_activations", "overlap_copies", "compile_regions"]
    assert undrawn == asked, "only where asked to"


def test_a_drawing_shows_what_changed(pages: dict[str, str]) -> None:
    before, after = pages["shard_params.md"].split("\nAfter\n")
    assert "all_gather_into_tensor" not in before.split("\nBefore\n")[1]
    assert "all_gather_into_tensor" in after and "wait_tensor" in after
