"""Operators of our own, and their GPU kernels. Importing this package registers all of them with torch."""

from torchtitan_graph.ops import (  # noqa: F401
    copies,
    elementwise,
    exchange,
    experts,
    flex_strips,
    float8,
    loss,
    of_torch,
    planned_norms,
    varlen,
)
