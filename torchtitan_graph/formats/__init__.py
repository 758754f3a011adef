"""A graph written and read: as Python, as data."""
