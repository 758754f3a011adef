"""Replica groups that outlive each other: who lives, the sum of their gradients, the vote, and healing.

torchft, an optional package, is imported by `manager`, `replicas` and `transport` alone.
"""
