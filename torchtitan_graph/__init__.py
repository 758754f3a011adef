"""Train large language models with a training step that is one graph."""

__version__ = "0.1.0"
