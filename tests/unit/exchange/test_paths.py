"""Choose the path of shards: the fastest available one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.config import PATHS
from dask_gpurt.exchange.paths import Between, Path, least, possible
from dask_gpurt.topology import SHIPPED, Link, Speed
from tests.helpers.far_device import Accelerator

ALL = frozenset(PATHS)


def best(between: Between, nbytes: int, *, mapped: bool = True, **speeds: Speed) -> str:
    """Return the path between two accelerators."""
    known = {**SHIPPED, **{Link[name.upper()]: speed for name, speed in speeds.items()}}
    found = possible(Accelerator(2**30), {"mapped": mapped}, ALL, between)
    return least(found, nbytes, known.__getitem__).name


STAGING: Any = object()


@pytest.mark.parametrize("nbytes", [1, 2**16, 2**30])
@pytest.mark.parametrize(
    ("between", "mapped", "path"),
    [
        (Between(Link.NVLINK, STAGING), True, "cuda-ipc"),
        (Between(Link.PCIE, STAGING), True, "cuda-ipc"),
        (Between(None, STAGING), True, "cuda-ipc"),
        (Between(Link.SHARED_MEMORY, STAGING), False, "through-host"),
        (Between(Link.SHARED_MEMORY, None), False, "comms"),
        (Between(Link.RDMA, None, carried=True), False, "comms"),
        (Between(Link.TCP, None), False, "comms"),
    ],
)
def test_a_person_would_take_the_same(between: Between, mapped: bool, path: str, nbytes: int) -> None:
    assert best(between, nbytes, mapped=mapped) == path


def test_where_peer_copies_are_slow_large_shards_go_through_the_host() -> None:
    slow = Speed(1e9, 20e-6)
    assert best(Between(Link.PCIE, STAGING), 2**30, pcie=slow) == "through-host"
    assert best(Between(Link.PCIE, STAGING), 2**10, pcie=slow) == "cuda-ipc"


@pytest.mark.parametrize(
    ("ticket", "allowed", "reason"),
    [
        ({}, ALL, "no peer access"),
        ({"mapped": True}, frozenset({"comms"}), "gpurt.exchange.paths excludes cuda-ipc"),
        (None, ALL, "one of the two workers has no such device"),
    ],
)
def test_the_reason_is_told(ticket: Any, allowed: frozenset[str], reason: str) -> None:
    (path,) = possible(Accelerator(2**30), ticket, allowed, Between())
    assert path.describe() == {"path": "comms", "reason": reason}


SPEEDS = st.builds(Speed, st.floats(1e6, 1e12), st.floats(0, 1e-2))


LINKS = st.fixed_dictionaries({link: SPEEDS for link in Link})


SIZES = st.integers(0, 2**40)


WAYS = st.lists(
    st.builds(
        Path,
        st.sampled_from(["cuda-ipc", "through-host", "comms"]),
        st.none(),
        st.booleans(),
        steps=st.lists(st.sampled_from(Link), max_size=3).map(tuple),
        message=st.floats(0, 1e-2),
    ),
    min_size=1,
)


@given(WAYS, SIZES, LINKS)
def test_no_path_takes_less(ways: list[Path], nbytes: int, speeds: dict[Link, Speed]) -> None:
    taken = least(ways, nbytes, speeds.__getitem__)
    assert taken in ways
    assert taken.seconds(nbytes, speeds.__getitem__) == min(
        way.seconds(nbytes, speeds.__getitem__) for way in ways
    )


@given(WAYS, SIZES, SIZES, LINKS)
def test_more_bytes_never_take_less(
    ways: list[Path], one: int, other: int, speeds: dict[Link, Speed]
) -> None:
    fewer, more = (
        least(ways, nbytes, speeds.__getitem__).seconds(nbytes, speeds.__getitem__)
        for nbytes in sorted((one, other))
    )
    assert fewer <= more
