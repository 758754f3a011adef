"""Forecast a run of any number of devices on one machine, before it is paid for."""
