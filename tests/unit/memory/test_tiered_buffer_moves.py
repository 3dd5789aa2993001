"""Interrupt the move of a key between tiers by each possible event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.ledger import Limits, Tier
from dask_gpurt.memory.serialize import raw_frames
from dask_gpurt.memory.store import TieredBuffer
from tests.helpers.tiered_buffers import KIB, array, new_tiered_buffer, put
from tests.helpers.waiting import on_thread, until

ALL = 1 << 30


@pytest.fixture
def tiered_buffer(tmp_path: Path) -> TieredBuffer:
    """Return a tiered buffer with a device of 20 KiB above a disk."""
    return new_tiered_buffer(str(tmp_path), Limits(20 * KIB, 0, 0, None))


@pytest.fixture
def spilled(tiered_buffer: TieredBuffer) -> TieredBuffer:
    """Return the tiered buffer with ``x`` in a file."""
    tiered_buffer["x"] = array(1)
    tiered_buffer.spill(ALL)
    return tiered_buffer


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Any]], None]:
    """Run a function once: before a file is read, or after a file was written."""

    def do(when: str, function: Callable[[], Any]) -> None:
        todo, name = [function], "__getitem__" if when == "reading" else "__setitem__"
        real = getattr(DiskTier, name)

        def replaced(self: DiskTier, *args: Any) -> Any:
            if when == "reading" and todo:
                on_thread(todo.pop())
            result = real(self, *args)
            if todo:
                on_thread(todo.pop())
            return result

        monkeypatch.setattr(DiskTier, name, replaced)

    return do


def files(directory: Path) -> list[Path]:
    return list(directory.glob("*/*"))


def assert_gone(directory: Path) -> None:
    """Assert that no file is left; the tier removes files on its own thread."""
    until(lambda: not files(directory), lambda: files(directory))


def test_a_small_result_pushes_nothing_down_that_was_too_large_before(tiered_buffer: TieredBuffer) -> None:
    tiered_buffer["large"] = array(1, 30)
    assert tiered_buffer.reservations.replace("task", {"small": (1, Tier.DEVICE)})
    assert not tiered_buffer.reservations.replace("task", {"other": (10 * KIB, Tier.DEVICE)})


@pytest.mark.parametrize(
    "value",
    [bytes(50 * KIB), np.zeros((100, KIB), np.uint8)[:, ::2], [str(i) for i in range(10000)]],
    ids=["bytes", "strided", "list"],
)
def test_an_object_pickled_as_a_whole_takes_room_in_the_lower_tier(tmp_path: Path, value: Any) -> None:
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(20 * KIB, 40 * KIB, 0, None))
    tiered_buffer["b"] = value
    tiered_buffer.make_room(0)
    assert tiered_buffer.tier("b") is Tier.DISK
    assert tiered_buffer.ledger.cell(Tier.DISK, "partitions") >= 50 * KIB
    assert np.array_equal(tiered_buffer["b"], value)


def test_a_file_is_damaged_and_its_key_goes(spilled: TieredBuffer, meanwhile: Any, tmp_path: Path) -> None:
    def damage() -> None:
        [path] = files(tmp_path)
        path.write_bytes(b"zz")
        del spilled["x"]

    meanwhile("reading", damage)
    with pytest.raises(OSError, match="spilled data is lost"):
        spilled.hold(["x"])
    assert_gone(tmp_path)


@pytest.mark.parametrize("read", [True, False])
def test_an_adopted_key_leaves_the_mapping_before_us(tiered_buffer: TieredBuffer, read: bool) -> None:
    before = {"x": array(1)}
    tiered_buffer.adopt_external("x", 0, lambda: before.pop("x"), lambda: before.pop("x", None))
    if read:
        assert np.array_equal(tiered_buffer["x"], array(1))
        assert tiered_buffer.largest(1) == [("x", 10 * KIB)]
    del tiered_buffer["x"]
    assert not before


def test_trifles_may_go_above_the_limit_until_they_are_more_than_one(tmp_path: Path) -> None:
    tiered_buffer = new_tiered_buffer(
        str(tmp_path), Limits(640 * KIB, 0, 0, None)
    )  # of which 10 KiB are within the slack
    tiered_buffer["x"] = array(1, 640)
    assert not tiered_buffer.reservations.try_reserve("large", 11 * KIB, Tier.DEVICE)
    taken = [tiered_buffer.reservations.try_reserve(str(i), 3 * KIB, Tier.DEVICE) for i in range(5)]
    assert taken == [True, True, True, False, False]
    assert not tiered_buffer.reservations.overshoot(), "and nothing is spilled for them"
    tiered_buffer["y"] = array(2, 11)
    assert tiered_buffer.reservations.overshoot() == 11 * KIB


def test_room_is_promised_once(tiered_buffer: TieredBuffer) -> None:
    """Another reservation comes between making room and reserving it."""
    tiered_buffer["x"] = array(1)
    make_room, todo = (
        tiered_buffer._spiller.make_room,
        [lambda: tiered_buffer.reservations.reserve("b", 10 * KIB, Tier.DEVICE)],
    )

    def and_another(*args: Any) -> int:
        made = make_room(*args)
        if todo:
            on_thread(todo.pop())
        return made

    tiered_buffer._spiller.make_room = and_another  # type: ignore[method-assign]
    tiered_buffer.reservations.reserve("a", 10 * KIB, Tier.DEVICE)
    assert (
        tiered_buffer.live_bytes(Tier.DEVICE) + tiered_buffer.ledger.cell(Tier.DEVICE, "reservations")
        <= 20 * KIB
    )


@pytest.mark.parametrize(("reserved", "left"), [(0, []), (10, ["x"]), (6, [])])
def test_an_unspilled_key_uses_the_reservation_of_its_reader(
    tiered_buffer: TieredBuffer, reserved: int, left: list[str]
) -> None:
    """10 KiB are read next to 10 KiB in ``x``, and no byte is reserved twice."""
    kind, me = "shards", ("task", "me")
    tiered_buffer.store_below("shard", raw_frames([array(2)]), kind, home=Tier.DEVICE)
    tiered_buffer["x"] = array(1)
    tiered_buffer.reservations.reserve(me, reserved * KIB, Tier.DEVICE)
    tiered_buffer.reservations.reserve("else", (10 - reserved) * KIB if reserved < 10 else 0, Tier.DEVICE)
    with tiered_buffer.reading([("shard", 0)], me) as found:
        assert np.array_equal(found["shard", 0][0], array(2))
        assert [key for key, _ in tiered_buffer.largest(1)] == left
    assert tiered_buffer.ledger.cell(Tier.DEVICE, "reservations") == 10 * KIB


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_the_second_of_two_copies_fails(tmp_path: Path, monkeypatch: Any, error: type[Exception]) -> None:
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(100 * KIB, 0, 0, None))
    tiered_buffer["x"], tiered_buffer["y"] = array(1), array(2)
    real, calls = DiskTier.__setitem__, list[str]()

    def put(self: DiskTier, name: str, frames: Any) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise error
        real(self, name, frames)

    monkeypatch.setattr(DiskTier, "__setitem__", put)
    if error is MemoryError:
        assert tiered_buffer.spill(ALL) == 10 * KIB
    else:
        with pytest.raises(error):
            tiered_buffer.spill(ALL)
    on_thread(lambda: tiered_buffer.spill(ALL))
    on_thread(lambda: tiered_buffer.hold(["x", "y"]))
    assert np.array_equal(tiered_buffer["x"], array(1))
    assert np.array_equal(tiered_buffer["y"], array(2))


def test_it_is_closed_while_it_spills(tiered_buffer: TieredBuffer, monkeypatch: Any, tmp_path: Path) -> None:
    tiered_buffer["x"] = array(1)
    closing = threading.Thread(target=tiered_buffer.close)
    real = DiskTier.__setitem__

    def put(self: DiskTier, name: str, frames: Any) -> None:
        closing.start()
        closing.join(0.2)  # it waits for this move
        assert closing.is_alive()
        real(self, name, frames)

    monkeypatch.setattr(DiskTier, "__setitem__", put)
    on_thread(lambda: tiered_buffer.spill(ALL))
    closing.join(20)
    assert not closing.is_alive()
    assert not list(tmp_path.iterdir())


def test_a_key_goes_while_it_is_spilled_and_all_is_closed_meanwhile(
    tiered_buffer: TieredBuffer, meanwhile: Any, tmp_path: Path
) -> None:
    """The spilling thread finds its copy gone, which is not an error."""
    tiered_buffer["x"] = array(1)

    def ends() -> None:
        del tiered_buffer["x"]
        tiered_buffer.close()

    meanwhile("writing", ends)
    tiered_buffer.spill(ALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("needed", [False, True])
def test_a_prefetch_does_not_take_the_room_of_inputs_needed_now(
    needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(100 * KIB, 0, 0, None))
    for key in "xy":
        put(tiered_buffer, key, array(ord(key), 60))
    tiered_buffer.spill(ALL)
    begun, go_on, read = threading.Event(), threading.Event(), tiered_buffer._reader.read

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return read(*args)

    monkeypatch.setattr(tiered_buffer._reader, "read", slowly)
    with ThreadPoolExecutor() as threads:
        bringing = threads.submit(tiered_buffer.prefetch, ["x"])
        assert begun.wait(10)
        monkeypatch.setattr(tiered_buffer._reader, "read", read)
        tiered_buffer.hold(["y"])
        holding = threads.submit(tiered_buffer.hold, ["x"] if needed else [])
        while needed and not tiered_buffer._table.by_key["x"].holders:
            time.sleep(0.001)
        go_on.set()
        bringing.result(10)
        holding.result(10)
    assert tiered_buffer.not_live("xy") == ([] if needed else ["x"])
    assert tiered_buffer.live_bytes(Tier.DEVICE) == (120 if needed else 60) * KIB
    assert not tiered_buffer.ledger.cell(Tier.DEVICE, "reservations")
    assert np.array_equal(tiered_buffer["x"], array(ord("x"), 60))
