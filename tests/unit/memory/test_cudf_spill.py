"""Account for buffers that cudf itself spills: they count where they are, and are left there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, wait

import dask_gpurt
from dask_gpurt.device.libraries import spilled_by_libraries
from dask_gpurt.memory.accounting import owned
from dask_gpurt.memory.ledger import Limits, Tier
from dask_gpurt.memory.store import TieredBuffer
from tests.helpers.clusters import cluster
from tests.helpers.tiered_buffers import KIB, array, new_tiered_buffer
from tests.helpers.waiting import until

MIB = 2**20


class Spillable:
    """Fake cudf's owner of a buffer, which stays the same object wherever its bytes are."""

    def __init__(self, nbytes: int):
        self.size = nbytes
        self.is_spilled = False

    @property
    def ptr(self) -> int:
        raise AssertionError("this would bring it back, for ever")


class Column:
    """Fake pylibcudf's column and cudf's column around it."""

    dtype = np.dtype(np.uint8)

    def __init__(self, data: Spillable | None, children: Sequence[Column] = ()):
        self.plc_column = self
        self._data = data
        self._children = list(children)

    def data(self) -> Any:
        return self._data and SimpleNamespace(owner=self._data)

    def null_mask(self) -> None:
        return None

    def children(self) -> list[Column]:
        return self._children


class Frame:
    """Fake a frame of cudf."""

    __module__ = "cudf.of.this.test"

    def __init__(self, *buffers: Spillable):
        self._buffers = buffers

    @property
    def _columns(self) -> tuple[Column, ...]:
        return tuple(Column(None, [Column(buffer)]) for buffer in self._buffers)


class Manager:
    def __init__(self, *owners: Spillable):
        self.owners = owners

    def buffers(self) -> tuple[Spillable, ...]:
        return self.owners


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[Spillable]:
    """Return three buffers of 10 KiB that a spill manager tracks."""
    made = [Spillable(10 * KIB) for _ in range(3)]
    module = SimpleNamespace(get_global_manager=lambda: Manager(*made))
    monkeypatch.setitem(sys.modules, "cudf.core.buffer.spill_manager", module)
    return made


@pytest.fixture
def tiered_buffer(tmp_path: Path) -> Iterator[TieredBuffer]:
    made = new_tiered_buffer(str(tmp_path), Limits(100 * KIB, 0, 0, None))
    yield made
    made.close()


def test_without_cudf_there_is_no_manager() -> None:
    if "cudf" not in sys.modules:
        assert spilled_by_libraries() is None


@pytest.mark.parametrize("spilled", [[], [0], [0, 1]])
def test_memory_is_the_same_wherever_it_lies(buffers: list[Spillable], spilled: list[int]) -> None:
    a, b, _ = buffers
    frame = Frame(a, a, b)
    for number in spilled:
        buffers[number].is_spilled = True
    assert owned(frame) == {id(a): a.size, id(b): b.size}
    assert spilled_by_libraries() == {id(buffers[n]): 10 * KIB for n in spilled}


def look(tiered_buffer: TieredBuffer) -> None:
    tiered_buffer.set_elsewhere(spilled_by_libraries())


def test_bytes_that_cudf_spills_leave_the_account_of_the_device(
    buffers: list[Spillable], tiered_buffer: TieredBuffer
) -> None:
    a, b, c = buffers
    tiered_buffer["x"], tiered_buffer["y"] = Frame(a, b), Frame(b, c)
    assert tiered_buffer.live_bytes(Tier.DEVICE) == 30 * KIB
    b.is_spilled = True
    look(tiered_buffer)
    assert (
        tiered_buffer.live_bytes(Tier.DEVICE)
        == tiered_buffer.ledger.cell(Tier.DEVICE, "partitions")
        == 20 * KIB
    )
    assert tiered_buffer.reservations.has_room(80 * KIB, Tier.DEVICE)
    del tiered_buffer["x"]
    assert tiered_buffer.ledger.prefixes(Tier.DEVICE) == {"y": 10 * KIB}
    b.is_spilled = False
    look(tiered_buffer)
    assert tiered_buffer.live_bytes(Tier.DEVICE) == 20 * KIB
    del tiered_buffer["y"]
    assert tiered_buffer.ledger.cell(Tier.DEVICE, "partitions") == 0


def test_memory_that_cudf_copies_as_it_is_read_counts(
    buffers: list[Spillable], tiered_buffer: TieredBuffer
) -> None:
    """Two frames share a buffer; cudf gives the frame that is read its own buffer."""
    a, b, _ = buffers
    tiered_buffer["x"], tiered_buffer["y"] = Frame(a), Frame(a)
    held = tiered_buffer.hold(["x"])
    held[0].value._buffers = (b,)
    tiered_buffer.release(held)
    assert tiered_buffer.live_bytes(Tier.DEVICE) == 20 * KIB
    assert tiered_buffer.ledger.prefixes(Tier.DEVICE) == {"x": 10 * KIB, "y": 10 * KIB}
    del tiered_buffer["x"]
    assert tiered_buffer.ledger.prefixes(Tier.DEVICE) == {"y": 10 * KIB}


def test_objects_off_the_device_are_not_spilled(
    buffers: list[Spillable], tiered_buffer: TieredBuffer
) -> None:
    frame = Frame(buffers[0])
    tiered_buffer["x"], tiered_buffer["other"] = frame, array(1)
    buffers[0].is_spilled = True
    look(tiered_buffer)
    tiered_buffer.spill(1 << 30)
    assert tiered_buffer.tier("other") is Tier.DISK
    assert tiered_buffer.tier("x") is Tier.DEVICE
    assert tiered_buffer["x"] is frame


@pytest.mark.gpu
def test_the_account_agrees_with_cudf() -> None:
    """Objects that cudf has spilled count as host memory, survive our own spills, and stay unchanged."""
    sizes = {"memory__device": 64 * MIB, "memory__pinned": 64 * MIB, "memory__host": 64 * MIB}

    def spill_half() -> int:
        from cudf.core.buffer.spill_manager import get_global_manager

        return int(get_global_manager().spill_device_memory(16 * MIB))

    def told(client: Client, tier: str, kind: str, nbytes: int) -> None:
        def said() -> int:
            return int(
                dask_gpurt.memory_usage(client).to_pandas(names="metrics").set_index("tier").loc[tier, kind]
            )

        until(
            lambda: said() == nbytes, lambda: f"{said()} bytes of {kind} in the {tier} tier, truly {nbytes}"
        )

    with cluster("cudf", workers=1, memory__tiers=True, **sizes) as client:
        client.run(enable_cudf_spill)
        made = client.map(make_frame, range(4), pure=False)
        wait(made)
        told(client, "device", "partitions", 4 * 8 * MIB)
        [spilled] = client.run(spill_half).values()
        assert spilled >= 16 * MIB
        # cudf may also spill small buffers that belong to no result.
        moved = spilled - spilled % (8 * MIB)
        told(client, "host", "cudf", moved)
        told(client, "device", "partitions", 4 * 8 * MIB - moved)
        client.run(lambda dask_worker: dask_worker.data.spill(1 << 40))
        assert client.gather(client.map(check_frame, made, range(4), pure=False)) == [True] * 4


def enable_cudf_spill() -> None:
    import cudf
    from cudf.core.buffer import spill_manager

    cudf.set_option("spill", True)
    cudf.set_option("spill_on_demand", False)
    spill_manager._global_manager_uninitialized = True


def make_frame(i: int) -> Any:
    import cudf
    import cupy

    return cudf.DataFrame({"a": cupy.arange(MIB, dtype="i8") + i})


def check_frame(frame: Any, i: int) -> bool:
    return bool((frame.a.to_numpy() == np.arange(MIB) + i).all())
