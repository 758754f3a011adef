"""The worker processes of several ranks, under the name that tests import."""

from torchtitan_graph.check.pool import PoolFailed, mesh, run_on

__all__ = ["PoolFailed", "mesh", "run_on"]
