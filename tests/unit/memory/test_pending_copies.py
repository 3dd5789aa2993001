"""Move objects between tiers by copies that are pending until they are waited for, as on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_gpurt.device.base import Fence
from dask_gpurt.memory import reading, spilling
from dask_gpurt.memory.ledger import Limits, Tier
from dask_gpurt.memory.serialize import Frames, Raw, raw_frames
from dask_gpurt.memory.store import TieredBuffer
from tests.helpers.far_device import Far, FarDevice
from tests.helpers.tiered_buffers import KIB, array, new_tiered_buffer
from tests.helpers.waiting import on_thread

ALL = 1 << 30


class PendingDevice(FarDevice):
    """Fake a GPU whose copies run once they are waited for, from memory that must still be there."""

    def __init__(self) -> None:
        super().__init__()
        #: Copies to the device that fail.
        self.failing = 0

    def scatter(self, sources: Sequence[Any], into: Sequence[list[Any]], *, ordered: bool = True) -> Fence:
        freed = [weakref.ref(source) for source in sources]
        targets = list(into)

        def copied() -> None:
            there = [source() for source in freed]
            assert None not in there, "the source was freed before it was copied"
            FarDevice.scatter(self, there, targets)

        return copied

    def gather(self, pieces: list[Any]) -> tuple[Far, Fence]:
        far, _ = super().gather(pieces)

        def copied() -> None:
            if self.failing:
                self.failing -= 1
                raise RuntimeError("the copy failed")

        return far, copied


@pytest.fixture
def device() -> PendingDevice:
    return PendingDevice()


@pytest.fixture
def tiered_buffer(tmp_path: Path, device: PendingDevice, monkeypatch: pytest.MonkeyPatch) -> TieredBuffer:
    """Return a tiered buffer with the device above pinned memory."""
    monkeypatch.setattr(reading, "owned", lambda value: {id(value): 10 * KIB})
    return new_tiered_buffer(str(tmp_path), Limits(100 * KIB, 1 << 20, 0, 0), device=device)


def test_what_serialising_made_lives_until_it_is_copied(
    tiered_buffer: TieredBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudf compacts the columns of a slice as it is serialised: nothing else refers to that memory."""

    def compacted(value: Raw) -> Frames:
        return raw_frames([Far(far.memory.copy()) for far in value.buffers])

    monkeypatch.setattr(spilling, "to_frames", compacted)
    tiered_buffer["x"] = Raw([Far(array(1))])
    tiered_buffer.spill(ALL)
    assert tiered_buffer.tier("x") is Tier.PINNED
    (far,) = tiered_buffer["x"].buffers
    assert np.array_equal(far.memory, array(1))


def test_the_copy_of_one_input_fails_and_the_others_can_be_used(
    tiered_buffer: TieredBuffer, device: PendingDevice
) -> None:
    for key in "xyz":
        tiered_buffer[key] = Raw([Far(array(ord(key)))])
    tiered_buffer.spill(ALL)
    device.failing = 1
    with pytest.raises(RuntimeError, match="the copy failed"):
        tiered_buffer.hold(["x", "y", "z"])
    assert tiered_buffer.moving() == []
    on_thread(lambda: tiered_buffer.hold(["x", "y", "z"]))
    for key in "xyz":
        assert np.array_equal(tiered_buffer[key].buffers[0].memory, array(ord(key)))


@pytest.mark.parametrize("event", ["spilled", "deleted", "replaced", "discarded"])
def test_memory_is_freed_without_the_lock(tiered_buffer: TieredBuffer, event: str) -> None:
    """Freeing device memory may wait for kernels, and the event loop needs the lock."""
    freed = list[bool]()

    class Freed(Far):
        def __del__(self) -> None:
            on_thread(lambda: tiered_buffer.hold_live(["other"]))
            freed.append(True)

    events: dict[str, Callable[[], object]] = {
        "spilled": lambda: tiered_buffer.spill(ALL),
        "deleted": lambda: tiered_buffer.__delitem__("x"),
        "replaced": lambda: tiered_buffer.store("x", 1),
        "discarded": lambda: tiered_buffer.discard("x"),
    }
    tiered_buffer["other"] = 1
    tiered_buffer["x"] = Raw([Freed(array(1))])
    events[event]()
    assert freed == [True]
