"""Measure where the time of queries goes on a cluster."""
