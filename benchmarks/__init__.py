"""Measure the runtime: ``python -m benchmarks.TOPIC`` from the root of a checkout."""
