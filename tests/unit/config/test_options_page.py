"""docs/02_options.md is what the code would write today."""

from pathlib import Path

from torchtitan_graph.config.manual import options_page

PAGE = Path(__file__).parents[3] / "docs" / "02_options.md"


def test_the_page_is_current() -> None:
    hint = "out of date: python -m torchtitan_graph.config > docs/02_options.md"
    assert PAGE.read_text(encoding="utf-8") == options_page(), hint
