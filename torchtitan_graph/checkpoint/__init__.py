"""Save a run and go on from it: on another number of ranks, in another layout, after a kill at any moment."""

from torchtitan_graph.checkpoint.checkpointer import SAVE_POINTS, Checkpointer, load_model, save_model

__all__ = ["SAVE_POINTS", "Checkpointer", "load_model", "save_model"]
