"""Describe and edit FX graphs. Knows FX; knows no model."""
