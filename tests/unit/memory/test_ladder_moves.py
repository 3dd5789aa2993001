"""What happens to a key while it is on its way from tier to tier, one test for each event."""

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
from dask_gpurt.memory.serialize import raw_frames
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.memory.tiers import Limits, Tier
from tests.helpers.ladders import KIB, array, new_ladder, put
from tests.helpers.waiting import until

ALL = 1 << 30


@pytest.fixture
def ladder(tmp_path: Path) -> TieredBuffer:
    """A device of 20 KiB, above a disk."""
    return new_ladder(str(tmp_path), Limits(20 * KIB, 0, 0, None))


@pytest.fixture
def spilled(ladder: TieredBuffer) -> TieredBuffer:
    """With ``x`` in a file."""
    ladder["x"] = array(1)
    ladder.spill(ALL)
    return ladder


def on_thread(function: Callable[[], Any]) -> None:
    """Run something as another thread does, which must not have to wait for this one."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Any]], None]:
    """Have something done once: before a file is read, or after one was written."""

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
    """No file is left; the tier removes them on a thread of its own."""
    until(lambda: not files(directory), lambda: files(directory))


def test_objects_that_share_memory_make_room_together(ladder: TieredBuffer) -> None:
    whole = array(1, 30)
    ladder["a"], ladder["b"] = whole, whole[:10]
    del whole
    ladder.make_room(0)
    assert ladder.live_bytes(Tier.DEVICE) <= 20 * KIB
    assert np.array_equal(ladder["a"][:10], ladder["b"])


def test_a_small_result_pushes_nothing_down_that_was_too_large_before(ladder: TieredBuffer) -> None:
    ladder["large"] = array(1, 30)
    assert ladder.reservations.replace("task", {"small": (1, Tier.DEVICE)})
    assert not ladder.reservations.replace("task", {"other": (10 * KIB, Tier.DEVICE)})


@pytest.mark.parametrize(
    "value",
    [bytes(50 * KIB), np.zeros((100, KIB), np.uint8)[:, ::2], [str(i) for i in range(10000)]],
    ids=["bytes", "strided", "list"],
)
def test_what_is_pickled_as_a_whole_takes_room_below(tmp_path: Path, value: Any) -> None:
    ladder = new_ladder(str(tmp_path), Limits(20 * KIB, 40 * KIB, 0, None))
    ladder["b"] = value
    ladder.make_room(0)
    assert ladder.tier("b") is Tier.DISK
    assert ladder.ledger.cell(Tier.DISK, "partitions") >= 50 * KIB
    assert np.array_equal(ladder["b"], value)


def test_a_key_goes_while_it_is_read(spilled: TieredBuffer, meanwhile: Any) -> None:
    meanwhile("reading", lambda: spilled.__delitem__("x"))
    with pytest.raises(KeyError):
        spilled["x"]


def test_a_key_gets_another_value_while_it_is_read(spilled: TieredBuffer, meanwhile: Any) -> None:
    meanwhile("reading", lambda: spilled.__setitem__("x", array(2)))
    assert np.array_equal(spilled["x"], array(2))


def test_a_key_goes_while_it_is_spilled(ladder: TieredBuffer, meanwhile: Any, tmp_path: Path) -> None:
    ladder["x"] = array(1)
    meanwhile("writing", lambda: ladder.__delitem__("x"))
    ladder.spill(ALL)
    assert_gone(tmp_path)
    assert ladder.ledger.cell(Tier.DISK, "partitions") == 0


def test_a_key_goes_as_soon_as_it_has_been_spilled(ladder: TieredBuffer, tmp_path: Path) -> None:
    ladder["x"] = array(1)

    def changed() -> None:
        if "x" in ladder and ladder.tier("x") is Tier.DISK:
            del ladder["x"]

    ladder._table.changed = changed
    ladder.spill(ALL)
    assert "x" not in ladder
    assert_gone(tmp_path)


def test_a_key_goes_while_a_copy_is_made(spilled: TieredBuffer, meanwhile: Any, tmp_path: Path) -> None:
    meanwhile("reading", lambda: spilled.__delitem__("x"))
    assert np.array_equal(spilled.copies(["x"])["x"], array(1))
    assert_gone(tmp_path)
    assert spilled.ledger.cell(Tier.DISK, "partitions") == 0


def test_a_file_is_damaged_and_its_key_goes(spilled: TieredBuffer, meanwhile: Any, tmp_path: Path) -> None:
    def damage() -> None:
        [path] = files(tmp_path)
        path.write_bytes(b"zz")
        del spilled["x"]

    meanwhile("reading", damage)
    with pytest.raises(OSError, match="spilled data is lost"):
        spilled.hold(["x"])
    assert_gone(tmp_path)


def test_a_view_is_as_large_as_it_is_when_it_comes_back(tmp_path: Path) -> None:
    ladder = new_ladder(str(tmp_path), Limits(200 * KIB, 0, 0, None))
    ladder["h"] = array(1, 100)[:KIB]
    assert ladder.largest(1) == [("h", 100 * KIB)]
    ladder.spill(ALL)
    assert ladder["h"].size == KIB
    assert ladder.largest(1) == [("h", KIB)]
    assert ladder.live_bytes(Tier.DEVICE) == KIB


@pytest.mark.parametrize("read", [True, False])
def test_an_adopted_key_leaves_the_mapping_before_us(ladder: TieredBuffer, read: bool) -> None:
    before = {"x": array(1)}
    ladder.adopt("x", 0, lambda: before.pop("x"), lambda: before.pop("x", None))
    if read:
        assert np.array_equal(ladder["x"], array(1))
        assert ladder.largest(1) == [("x", 10 * KIB)]
    del ladder["x"]
    assert not before


def test_trifles_may_go_above_the_limit_until_they_are_more_than_one(tmp_path: Path) -> None:
    ladder = new_ladder(str(tmp_path), Limits(640 * KIB, 0, 0, None))  # of which a trifle is 10 KiB
    ladder["x"] = array(1, 640)
    assert not ladder.reservations.try_reserve("large", 11 * KIB, Tier.DEVICE)
    taken = [ladder.reservations.try_reserve(str(i), 3 * KIB, Tier.DEVICE) for i in range(5)]
    assert taken == [True, True, True, False, False]
    assert not ladder.reservations.overshoot(), "and nobody spills for them"
    ladder["y"] = array(2, 11)
    assert ladder.reservations.overshoot() == 11 * KIB


def test_room_is_promised_once(ladder: TieredBuffer) -> None:
    """Another promise comes between the look at the room and our own promise."""
    ladder["x"] = array(1)
    make_room, todo = (
        ladder._spiller.make_room,
        [lambda: ladder.reservations.reserve("b", 10 * KIB, Tier.DEVICE)],
    )

    def and_another(*args: Any) -> int:
        made = make_room(*args)
        if todo:
            on_thread(todo.pop())
        return made

    ladder._spiller.make_room = and_another  # type: ignore[method-assign]
    ladder.reservations.reserve("a", 10 * KIB, Tier.DEVICE)
    assert ladder.live_bytes(Tier.DEVICE) + ladder.ledger.cell(Tier.DEVICE, "reservations") <= 20 * KIB


@pytest.mark.parametrize(("reserved", "left"), [(0, []), (10, ["x"]), (6, [])])
def test_what_is_read_takes_room_that_its_reader_has_reserved(
    ladder: TieredBuffer, reserved: int, left: list[str]
) -> None:
    """10 KiB are read next to 10 KiB in ``x``, and nothing is promised twice."""
    kind, me = "shards", ("task", "me")
    ladder.store_below("shard", raw_frames([array(2)]), kind, home=Tier.DEVICE)
    ladder["x"] = array(1)
    ladder.reservations.reserve(me, reserved * KIB, Tier.DEVICE)
    ladder.reservations.reserve("else", (10 - reserved) * KIB if reserved < 10 else 0, Tier.DEVICE)
    with ladder.reading([("shard", 0)], me) as found:
        assert np.array_equal(found["shard", 0][0], array(2))
        assert [key for key, _ in ladder.largest(1)] == left
    assert ladder.ledger.cell(Tier.DEVICE, "reservations") == 10 * KIB


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_the_second_of_two_copies_fails(tmp_path: Path, monkeypatch: Any, error: type[Exception]) -> None:
    ladder = new_ladder(str(tmp_path), Limits(100 * KIB, 0, 0, None))
    ladder["x"], ladder["y"] = array(1), array(2)
    real, calls = DiskTier.__setitem__, list[str]()

    def put(self: DiskTier, name: str, frames: Any) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise error
        real(self, name, frames)

    monkeypatch.setattr(DiskTier, "__setitem__", put)
    if error is MemoryError:
        assert ladder.spill(ALL) == 10 * KIB
    else:
        with pytest.raises(error):
            ladder.spill(ALL)
    on_thread(lambda: ladder.spill(ALL))
    on_thread(lambda: ladder.hold(["x", "y"]))
    assert np.array_equal(ladder["x"], array(1))
    assert np.array_equal(ladder["y"], array(2))


def test_it_is_closed_while_it_spills(ladder: TieredBuffer, monkeypatch: Any, tmp_path: Path) -> None:
    ladder["x"] = array(1)
    closing = threading.Thread(target=ladder.close)
    real = DiskTier.__setitem__

    def put(self: DiskTier, name: str, frames: Any) -> None:
        closing.start()
        closing.join(0.2)  # it waits for this very move
        assert closing.is_alive()
        real(self, name, frames)

    monkeypatch.setattr(DiskTier, "__setitem__", put)
    on_thread(lambda: ladder.spill(ALL))
    closing.join(20)
    assert not closing.is_alive()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("needed", [False, True])
def test_what_comes_up_for_later_does_not_take_the_room_of_what_is_needed_now(
    needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = new_ladder(str(tmp_path), Limits(100 * KIB, 0, 0, None))
    for key in "xy":
        put(ladder, key, array(ord(key), 60))
    ladder.spill(ALL)
    begun, go_on, read = threading.Event(), threading.Event(), ladder._reader.read

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return read(*args)

    monkeypatch.setattr(ladder._reader, "read", slowly)
    with ThreadPoolExecutor() as threads:
        bringing = threads.submit(ladder.prefetch, ["x"])
        assert begun.wait(10)
        monkeypatch.setattr(ladder._reader, "read", read)
        ladder.hold(["y"])
        holding = threads.submit(ladder.hold, ["x"] if needed else [])
        while needed and not ladder._table.by_key["x"].holders:
            time.sleep(0.001)
        go_on.set()
        bringing.result(10)
        holding.result(10)
    assert ladder.not_live("xy") == ([] if needed else ["x"])
    assert ladder.live_bytes(Tier.DEVICE) == (120 if needed else 60) * KIB
    assert not ladder.ledger.cell(Tier.DEVICE, "reservations")
    assert np.array_equal(ladder["x"], array(ord("x"), 60))
