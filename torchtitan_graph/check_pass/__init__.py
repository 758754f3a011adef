"""Check a pass of one's own on the graphs of every family, in many layouts. See docs/03_graph.md."""
