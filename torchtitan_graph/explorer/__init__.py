"""An HTML page of a step's graphs: cost of each scope, memory over time, communication, and the effect of passes."""

from torchtitan_graph.explorer.data import Strings, graph_data
from torchtitan_graph.explorer.page import page
from torchtitan_graph.explorer.run import run_data
from torchtitan_graph.explorer.watch import PassWatch, Watched

__all__ = ["PassWatch", "Strings", "Watched", "graph_data", "page", "run_data"]
