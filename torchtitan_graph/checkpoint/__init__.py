"""Save and resume a run: on another number of ranks, in another layout, after a kill at any moment."""

from torchtitan_graph.checkpoint.best import Best, best_checkpoint, best_of, find_best, is_used_up
from torchtitan_graph.checkpoint.checkpointer import Checkpointer, check_loadable, load_model, save_model, tensors_of
from torchtitan_graph.checkpoint.choose import check_choice, find_likely, find_train_state, is_new_run
from torchtitan_graph.checkpoint.folder import newest_below
from torchtitan_graph.checkpoint.save import SAVE_POINTS, SaveError

__all__ = [
    "SAVE_POINTS",
    "Best",
    "Checkpointer",
    "SaveError",
    "best_checkpoint",
    "best_of",
    "find_best",
    "is_new_run",
    "is_used_up",
    "check_choice",
    "check_loadable",
    "find_likely",
    "find_train_state",
    "load_model",
    "newest_below",
    "save_model",
    "tensors_of",
]
