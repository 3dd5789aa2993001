"""Compute how many blocks an SM holds, and set caps."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.overlap.interposer import CapError, Caps, DeviceLimits, Residency
from tests.helpers.interposer.sm_model import residency, shared_for
from tests.helpers.interposers import H200, SMALL, Launches


@pytest.mark.parametrize(
    ("cap", "shared"), [(8, 24960), (6, 32384), (5, 38016), (4, 45696), (3, 57472), (2, 76928), (1, 115840)]
)
def test_known_amounts_on_an_h200(cap: int, shared: int) -> None:
    assert shared_for(H200, cap) == shared
    assert residency(H200, 32, 16, shared) == cap


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (32, 16, 0, 32),  # blocks
        (1024, 32, 0, 2),  # threads
        (256, 40, 0, 6),  # registers
        (256, 255, 0, 1),
        (128, 0, 48 * 1024, 4),  # shared memory
        (640, 96, 120_000, 1),  # a ring kernel of NCCL
        (33, 32, 0, 32),  # one warp more than fits by threads
    ],
)
def test_known_residencies_on_an_h200(threads: int, registers: int, shared: int, blocks: int) -> None:
    assert residency(H200, threads, registers, shared) == blocks


@given(
    limits=st.sampled_from([H200, SMALL]),
    cap=st.integers(1, 32),
    threads=st.integers(1, 1024),
    registers=st.integers(0, 255),
)
def test_shared_memory_for_a_cap_gives_that_cap_where_more_would_fit(
    limits: DeviceLimits, cap: int, threads: int, registers: int
) -> None:
    if cap > limits.blocks:
        with pytest.raises(CapError, match=f"at most the {limits.blocks} that an SM of this device holds"):
            shared_for(limits, cap)
        return
    shared = shared_for(limits, cap)
    natural = residency(limits, threads, registers, 0)
    assert residency(limits, threads, registers, shared) == min(cap, natural)
    # It is the minimum: with one unit less, one more block fits.
    assert limits.shared // (shared + limits.reserved - 128) > cap
    assert shared <= limits.opt_in


def test_caps_are_written_once_and_then_only_switched() -> None:
    launches = Launches()
    actuator = Residency(launches)
    for _ in range(3):
        actuator.apply(Caps(4, {"join": None, "sum": 2}))
        assert launches.on
        actuator.clear()
        assert not launches.on
    assert launches.written == [(4, {"join": 0, "sum": 2})]
    actuator.apply(Caps(4))
    assert launches.written[1:] == [(4, {})]


def test_a_cap_changed_after_it_was_applied_is_written_again() -> None:
    launches, kernels = Launches(), {"sum": 2}
    actuator = Residency(launches)
    actuator.apply(Caps(None, kernels))
    kernels["sum"] = 3
    actuator.apply(Caps(None, kernels))
    assert launches.written == [(0, {"sum": 2}), (0, {"sum": 3})]


@pytest.mark.parametrize("caps", [Caps(0), Caps(33), Caps(-1), Caps(4, {"sum": 0}), Caps(4, {"sum": 40})])
def test_a_cap_that_can_not_be_changes_nothing(caps: Caps) -> None:
    launches = Launches()
    actuator = Residency(launches)
    actuator.apply(Caps(4))
    with pytest.raises(CapError, match="expected at least 1, and at most the 32 that an SM of this device"):
        actuator.apply(caps)
    assert launches.on
    assert launches.written == [(4, {})]


def test_before_the_driver_says_what_there_is_any_cap_above_0_goes() -> None:
    actuator = Residency(Launches(None))
    actuator.apply(Caps(33))
    for cap in (0, 256):
        with pytest.raises(CapError, match="at most the 255 that can be asked for"):
            actuator.apply(Caps(cap))


def test_so_many_kernels_can_be_named() -> None:
    actuator = Residency(Launches())
    actuator.apply(Caps(None, {str(i): 4 for i in range(1024)}))
    with pytest.raises(CapError, match="caps for 1025 kernels: expected at most 1024"):
        actuator.apply(Caps(None, {str(i): 4 for i in range(1025)}))


def test_threads_write_one_after_the_other() -> None:
    class Slow(Launches):
        inside = 0

        def write(self, default: int, kernels: Mapping[str | int, int]) -> None:
            self.inside += 1
            assert self.inside == 1
            super().write(default, kernels)
            self.inside -= 1

    actuator = Residency(launches := Slow())
    threads = [
        threading.Thread(target=lambda i=i: [actuator.apply(Caps(1 + (i + n) % 8)) for n in range(200)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launches.inside == 0
    assert launches.written


def test_caps_are_resumed_as_they_were() -> None:
    launches = Launches()
    actuator = Residency(launches)
    actuator.apply(Caps(6, {"add": 4, 11: 8}))
    actuator.clear()
    assert not launches.on
    actuator.resume()
    assert launches.on
    assert launches.written == [(6, {"add": 4, 11: 8})]
