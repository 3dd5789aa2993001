"""Compute the bytes that new owners of outputs have to read again, by link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.shuffle.move_cost import HostLink, reading_s

MB = 10**6
WORKERS = ["a", "b", "c", "d"]


def links(**rates: float) -> dict[str, HostLink]:
    """Return links between workers on separate hosts, each of which makes a quarter of the inputs."""
    return {worker: HostLink(f"host-{worker}", rates.get(worker, 20.0 * MB), 0.25) for worker in WORKERS}


#: Ten outputs of 1 MB for each worker.
NBYTES = dict.fromkeys(range(40), 1.0 * MB)
OWNERS = {output: WORKERS[output // 10] for output in NBYTES}


def test_a_new_owner_reads_all_that_was_cut_for_the_old_one() -> None:
    """Half of the inputs: 5 MB, of which a quarter was made at the new owner."""
    assert reading_s({0: "b"}, OWNERS, NBYTES, 0.5, links()) == pytest.approx(3.75 / 20)
    assert reading_s({0: "b", 1: "b", 2: "b"}, OWNERS, NBYTES, 0.5, links()) == pytest.approx(3.75 / 20)


def test_a_worker_with_a_slow_link_sends_its_part_to_each_of_them() -> None:
    to = {0: "b", 1: "c"}
    assert reading_s(to, OWNERS, NBYTES, 0.5, links(d=2.0 * MB)) == pytest.approx(2 * 1.25 / 2)


def test_outputs_that_move_to_a_worker_with_a_slow_link_come_over_it() -> None:
    assert reading_s({0: "d"}, OWNERS, NBYTES, 1.0, links(d=2.0 * MB)) == pytest.approx(7.5 / 2)


def test_within_a_host_and_over_links_that_are_not_known_it_takes_no_time() -> None:
    one = {worker: HostLink("host", 1.0, 0.25) for worker in WORKERS}
    assert reading_s({0: "b"}, OWNERS, NBYTES, 1.0, one) == 0
    assert reading_s({0: "b"}, OWNERS, NBYTES, 1.0, {}) == 0


@given(
    to=st.dictionaries(st.integers(0, 39), st.sampled_from(WORKERS), max_size=20),
    cut=st.floats(0, 1),
    slow=st.floats(0.1, 1),
)
def test_slower_links_later_looks_and_more_moves_cost_more(
    to: dict[int, str], cut: float, slow: float
) -> None:
    cost = reading_s(to, OWNERS, NBYTES, cut, links())
    assert reading_s(to, OWNERS, NBYTES, cut, links(d=slow * 20 * MB)) >= cost
    assert reading_s(to, OWNERS, NBYTES, cut / 2, links()) == pytest.approx(cost / 2)
    fewer = dict(list(to.items())[: len(to) // 2])
    assert reading_s(fewer, OWNERS, NBYTES, cut, links()) <= cost * (1 + 1e-9)
