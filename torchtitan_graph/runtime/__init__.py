"""Run a graph: with a profiler or stopwatch, as CUDA graphs, or partitioned for a pipeline."""
