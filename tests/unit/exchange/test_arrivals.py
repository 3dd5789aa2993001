"""Estimate how fast bytes arrive at a worker from its transfers."""

from __future__ import annotations

import pytest

from dask_gpurt.exchange.links import MIN_ARRIVALS, ArrivalRate

MB = 10**6


def test_a_link_is_as_fast_as_all_that_comes_at_a_time() -> None:
    """Twelve concurrent shards over a link of 2 MB/s."""
    rate = ArrivalRate()
    for _ in range(12):
        rate.observe(250_000, 10.0, 11.5)
    assert rate.since(10.0) == pytest.approx(2 * MB)


def test_a_link_is_not_slow_for_the_links_of_others() -> None:
    """Half of the bytes come from a worker with a slow link, and arrive long after the other half."""
    rate = ArrivalRate()
    for at in range(8):
        rate.observe(250_000, 10 + at / 50, 10 + (at + 1) / 50)
    for _ in range(8):
        rate.observe(250_000, 10.0, 14.0)
    assert rate.since(10.0) >= 12 * MB


def test_a_small_shard_among_large_ones_does_not_count_for_them() -> None:
    rate = ArrivalRate()
    for _ in range(12):
        rate.observe(250_000, 10.0, 11.5)
    rate.observe(1_000, 11.49, 11.5)
    assert rate.since(10.0) < 2.2 * MB


def test_only_what_a_run_has_seen_counts_and_no_little() -> None:
    rate = ArrivalRate()
    for _ in range(MIN_ARRIVALS):
        rate.observe(MB, 1.0, 2.0)
    assert rate.since(1.0)
    assert rate.since(1.5) == 0
    for _ in range(MIN_ARRIVALS - 1):
        rate.observe(MB, 2.0, 2.1)
    assert rate.since(1.5) == 0
