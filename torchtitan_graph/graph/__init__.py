"""Trace a function into one FX graph, describe it, edit it, show it. Knows FX; knows no model."""
