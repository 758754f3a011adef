"""Write the pages of the options: python -m torchtitan_graph.config docs/reference/options."""

import argparse
from pathlib import Path

from torchtitan_graph.config.manual import options_pages

parser = argparse.ArgumentParser("python -m torchtitan_graph.config", description="Write the pages of the options.")
parser.add_argument("folder", type=Path, help="an existing folder, such as docs/reference/options")
folder = parser.parse_args().folder
for name, text in options_pages().items():
    (folder / name).write_text(text, encoding="utf-8")
