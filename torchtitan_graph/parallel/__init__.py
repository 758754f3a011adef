"""Meshes, the compute plan, `parallelize`, and the storage layout of data parallelism."""
