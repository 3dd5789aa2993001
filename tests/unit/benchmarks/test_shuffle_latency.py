"""Derive the latency of a shuffle from the timestamps of its tasks."""

from __future__ import annotations

from benchmarks.shuffle.latency import Latency


def test_moments_of_several_workers_are_told_apart() -> None:
    moments = [
        ("begin", "transfer", 1000.0),
        ("end", "transfer", 2000.0),
        ("end", "transfer", 2500.0),  # the last, on the other worker
        ("begin", "barrier", 2562.5),
        ("end", "barrier", 2625.0),
        ("begin", "output", 2875.0),
        ("begin", "output", 2750.0),
        ("end", "output", 3000.0),
    ]
    assert Latency.between(moments) == Latency(to_barrier=62.5, barrier=62.5, to_output=125.0, total=250.0)
