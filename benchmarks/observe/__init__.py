"""Measure what it costs to watch a cluster."""
