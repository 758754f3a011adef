"""docs/passes is what scripts/draw_passes.py writes."""

import re
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


def test_every_pass_has_a_page() -> None:
    names = {f"{each.name}.md" for each in compiler.passes(compiler.PassPlan({}, (), ()))}
    assert names == {path.name for path in FOLDER.glob("*.md")} - {"README.md"}


def without_drawings(text: str) -> str:
    """Leave out what another release of torch traces otherwise."""
    return text.partition("\nBefore\n")[0]


@pytest.mark.slow
def test_the_pages_are_what_the_script_writes(pages: dict[str, str]) -> None:
    kept = str if torch.__version__.startswith("2.13.") else without_drawings
    found = {path.name: kept(path.read_text()) for path in FOLDER.glob("*.md")}
    assert found == {name: kept(text) for name, text in pages.items()}, "run python scripts/draw_passes.py"


@pytest.mark.slow
def test_every_pass_has_a_page_with_a_drawing(pages: dict[str, str]) -> None:
    names = [each.name for each in compiler.passes(compiler.PassPlan({}, (), ()))]
    assert [f"{name}.md" for name in names] == list(pages)[1:]
    for name in names:
        assert ("```mermaid" in pages[f"{name}.md"]) != ("nothing for it to do" in pages[f"{name}.md"])


@pytest.mark.slow
def test_nodes_are_numbered_within_a_drawing(pages: dict[str, str]) -> None:
    """Places in the graph would change twelve pages where a pass removes one node."""
    for name, text in pages.items():
        numbers = {(int(node), int(shown)) for node, shown in re.findall(r'^    n(\d+)\["(\d+) ', text, re.MULTILINE)}
        assert numbers == {(i, i) for i in range(1, len(numbers) + 1)}, name
        assert len(re.findall(r'^ +\w+\["', text, re.MULTILINE)) >= len(numbers) > 0 or "mermaid" not in text


@pytest.mark.slow
def test_a_drawing_shows_what_changed(pages: dict[str, str]) -> None:
    before, after = pages["shard_params.md"].split("\nAfter\n")
    assert "all_gather_into_tensor" not in before.split("\nBefore\n")[1]
    assert "all_gather_into_tensor" in after and "wait_tensor" in after
