"""Comparison of runs: configurations, curves, and the first step whose bits differ."""
