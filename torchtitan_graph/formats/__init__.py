"""Write and read a graph: as Python, as data."""
