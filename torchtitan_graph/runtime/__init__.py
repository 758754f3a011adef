"""How a graph runs: watched, in pieces that a GPU records, cut for a pipeline."""
