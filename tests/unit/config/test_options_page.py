"""docs/reference/options is what the code would write today."""

from pathlib import Path

from torchtitan_graph.config.manual import options_pages

FOLDER = Path(__file__).parents[3] / "docs" / "reference" / "options"


def test_the_pages_are_current() -> None:
    hint = "out of date: python -m torchtitan_graph.config docs/reference/options"
    assert {page.name: page.read_text(encoding="utf-8") for page in FOLDER.iterdir()} == options_pages(), hint
