"""Choose the path of shards: the best that is possible."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt.config import PATHS
from dask_gpurt.exchange.paths import choose
from dask_gpurt.topology import Link
from tests.helpers.far_device import Accelerator

ALL = frozenset(PATHS)
STAGING: Any = object()


@pytest.mark.parametrize(
    ("link", "staging", "mapped", "path"),
    [
        (Link.NVLINK, STAGING, True, "cuda-ipc"),
        (None, STAGING, True, "cuda-ipc"),
        (Link.SHARED_MEMORY, STAGING, False, "through-host"),
        (Link.SHARED_MEMORY, None, False, "comms"),
        (Link.TCP, None, False, "comms"),
    ],
)
def test_what_can_be_mapped_comes_before_host_memory_and_that_before_comms(
    link: Link | None, staging: Any, mapped: bool, path: str
) -> None:
    chosen = choose(Accelerator(2**30), {"mapped": mapped}, ALL, link, staging)
    assert (chosen.name, chosen.in_place) == (path, False)


def test_shards_on_the_same_device_are_read_in_place() -> None:
    assert choose(Accelerator(2**30), {"mapped": True}, ALL, Link.SAME_DEVICE).in_place


@pytest.mark.parametrize(
    ("ticket", "allowed", "reason"),
    [
        ({}, ALL, "no peer access"),
        ({"mapped": True}, frozenset({"comms"}), "gpurt.exchange.paths excludes cuda-ipc"),
        (None, ALL, "one of the two workers has no such device"),
    ],
)
def test_the_reason_is_told(ticket: Any, allowed: frozenset[str], reason: str) -> None:
    path = choose(Accelerator(2**30), ticket, allowed)
    assert path.describe() == {"path": "comms", "reason": reason}
