"""The mesh, the plan, the one `parallelize`, and data parallelism at rest."""
