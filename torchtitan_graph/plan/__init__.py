"""Forecast of a run on any number of devices, computed on one machine."""
