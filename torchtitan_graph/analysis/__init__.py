"""The costs of a graph: peak memory, FLOPs, communication, time, by scope."""
