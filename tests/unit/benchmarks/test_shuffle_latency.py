"""The latency of a shuffle is derived from the moments of its tasks."""

from __future__ import annotations

from benchmarks.shuffle.latency import Latency


def test_moments_of_several_workers_are_told_apart() -> None:
    moments = [
        ("begin", "transfer", 1.0),
        ("end", "transfer", 2.0),
        ("end", "transfer", 2.5),  # on the other worker, and the last
        ("begin", "barrier", 2.5625),
        ("end", "barrier", 2.625),
        ("begin", "output", 2.875),
        ("begin", "output", 2.75),
        ("end", "output", 3.0),
    ]
    assert Latency.between(moments) == Latency(to_barrier=62.5, barrier=62.5, to_output=125.0, total=250.0)
