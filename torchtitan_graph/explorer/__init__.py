"""One HTML page that shows a step's graphs: what each scope costs, what is held when, what is sent, what passes did."""

from torchtitan_graph.explorer.data import Strings, graph_data
from torchtitan_graph.explorer.page import page
from torchtitan_graph.explorer.run import run_data
from torchtitan_graph.explorer.watch import PassWatch, Watched

__all__ = ["PassWatch", "Strings", "Watched", "graph_data", "page", "run_data"]
