"""The worker processes of several ranks, under the name that tests import."""

from torchtitan_graph.check.pool import RanksFailed, mesh, run_on

__all__ = ["RanksFailed", "mesh", "run_on"]
