"""Write the pages of the options: python -m torchtitan_graph.config docs/reference/options."""

import sys
from pathlib import Path

from torchtitan_graph.config.manual import options_pages

for name, text in options_pages().items():
    Path(sys.argv[1], name).write_text(text, encoding="utf-8")
