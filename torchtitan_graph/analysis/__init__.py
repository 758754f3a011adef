"""What a graph costs: memory, arithmetic, traffic, time, by scope."""
