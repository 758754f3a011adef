"""Evaluation of a run, or of a Hugging Face folder, without training: `python -m torchtitan_graph.evaluate`."""
