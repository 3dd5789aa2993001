"""Measure the cost of observing a cluster."""
