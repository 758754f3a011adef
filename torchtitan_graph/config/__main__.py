"""Write docs/02_options.md to standard output."""

from torchtitan_graph.config.manual import options_page

print(options_page(), end="")
