"""Replica groups that outlive each other: who lives, the sum of their gradients, the vote, and healing.

torchft, an optional package, is imported by `manager`, `replicas` and `transport` alone.
"""

import os

os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported, which else logs ten lines a step
