"""Choose the path of shards: the best that is possible."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt.config import PATHS
from dask_gpurt.exchange.paths import PeerClass, choose, peer_class
from tests.helpers.far_device import Accelerator

ALL = frozenset(PATHS)


@pytest.mark.parametrize(("mapped", "path"), [(True, "cuda-ipc"), (False, "comms")])
def test_what_can_be_mapped_comes_before_comms(mapped: bool, path: str) -> None:
    chosen = choose(Accelerator(2**30), {"mapped": mapped, "device": "other"}, ALL)
    assert (chosen.name, chosen.in_place) == (path, False)


def test_shards_on_the_same_device_are_read_in_place() -> None:
    assert choose(Accelerator(2**30), {"mapped": True, "device": "this"}, ALL).in_place


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


@pytest.mark.parametrize(
    ("me", "peer", "expected"),
    [
        ("tcp://10.0.0.1:40000", "tcp://10.0.0.1:40000", PeerClass.SAME_WORKER),
        ("tcp://10.0.0.1:40000", "tcp://10.0.0.1:40001", PeerClass.SAME_HOST),
        ("ucx://10.0.0.1:40000", "ucx://10.0.0.2:40000", PeerClass.OTHER_HOST),
        ("tcp://[fe80::1]:40000", "tcp://[fe80::1]:40001", PeerClass.SAME_HOST),
        ("tcp://[fe80::1]:40000", "tcp://[fe80::2]:40000", PeerClass.OTHER_HOST),
        ("inproc://10.0.0.1/7/1", "inproc://10.0.0.1/7/2", PeerClass.SAME_HOST),
    ],
)
def test_addresses_tell_how_far_a_peer_is(me: str, peer: str, expected: PeerClass) -> None:
    assert peer_class(me, peer) is expected
