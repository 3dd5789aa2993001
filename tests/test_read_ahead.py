"""Sections that are read ahead of the task that wants them: taken once, where there is room, and let go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_ladder import KIB, array, new_ladder

from dask_gpurt.exchange.landing import Landing
from dask_gpurt.exchange.shard import ExchangeClosed
from dask_gpurt.memory.frames import raw_frames
from dask_gpurt.memory.ladder import Ladder
from dask_gpurt.memory.tiers import Limits, Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.ahead import ReadAhead

PARCEL = SimpleNamespace(key="shard")
SECTIONS: Any = [(PARCEL, 0), (PARCEL, 1)]


@pytest.fixture
def ladder(tmp_path: Path) -> Iterator[Ladder]:
    """Room for 160 KiB, and two sections of 20 KiB on disk."""
    made = new_ladder(str(tmp_path), Limits(160 * KIB, 0, 0, None))
    made.store_below("shard", raw_frames([array(1, 20), array(2, 20)]), "shards", home=Tier.DEVICE)
    yield made
    made.close()


@pytest.fixture
def exchange(ladder: Ladder) -> Iterator[Any]:
    """What is read ahead uses of one."""
    metrics = Metrics()
    executor = ThreadPoolExecutor(1)
    yield SimpleNamespace(landing=Landing(ladder, "host", metrics), metrics=metrics, executor=executor)
    executor.shutdown()


def settled(exchange: Any) -> None:
    """Wait for what the only thread has been given so far."""
    exchange.executor.submit(lambda: None).result()


def promised(ladder: Ladder) -> int:
    return ladder.ledger.cell(Tier.DEVICE, "reservations")


def goes_on() -> None:
    """The run is not over."""


def test_what_was_read_is_taken_once(ladder: Ladder, exchange: Any) -> None:
    ahead = ReadAhead(exchange)
    ahead.begin(7, SECTIONS)
    settled(exchange)
    assert promised(ladder) == 40 * KIB
    with ahead.taken(7, goes_on) as found:
        assert [buffer[0] for buffer, _ in found.values()] == [1, 2]
        assert set(found) == {("shard", 0), ("shard", 1)}
        assert promised(ladder) == 40 * KIB
    assert promised(ladder) == 0
    with ahead.taken(7, goes_on) as found:
        assert not found


def test_what_is_on_its_way_is_waited_for(exchange: Any) -> None:
    ahead, blocked = ReadAhead(exchange), threading.Event()
    exchange.executor.submit(blocked.wait)
    ahead.begin(7, SECTIONS)
    threading.Timer(0.05, blocked.set).start()
    with ahead.taken(7, goes_on) as found:
        assert len(found) == 2


def test_a_run_that_is_over_is_not_waited_for(ladder: Ladder, exchange: Any) -> None:
    def over() -> None:
        blocked.set()
        raise ExchangeClosed("the run is over")

    ahead, blocked = ReadAhead(exchange), threading.Event()
    exchange.executor.submit(blocked.wait)
    ahead.begin(7, SECTIONS)
    with pytest.raises(ExchangeClosed), ahead.taken(7, over):
        pytest.fail("nothing was taken")
    settled(exchange)
    assert promised(ladder) == 0


@pytest.mark.parametrize(("taken", "live", "fits"), [(20, 100, True), (120, 0, True), (121, 0, False)])
def test_room_is_made_but_not_taken_from_what_runs(
    ladder: Ladder, exchange: Any, taken: int, live: int, fits: bool
) -> None:
    ladder.promise("task", taken * KIB, Tier.DEVICE)
    ladder["x"] = array(1, live)
    ahead = ReadAhead(exchange)
    ahead.begin(7, SECTIONS)
    settled(exchange)
    assert promised(ladder) == (taken + 40 * fits) * KIB
    assert ladder.live_bytes(Tier.DEVICE) + promised(ladder) <= 160 * KIB
    with ahead.taken(7, goes_on) as found:
        assert bool(found) is fits
    assert not exchange.metrics.snapshot()["fallbacks"]


def test_what_is_large_for_the_tier_is_not_read_ahead(ladder: Ladder, exchange: Any) -> None:
    """Else what it is made into would push it down again."""
    ladder.store_below("large", raw_frames([array(1, 41)]), "shards", home=Tier.DEVICE)
    ahead = ReadAhead(exchange)
    sections: Any = [(SimpleNamespace(key="large"), 0)]
    ahead.begin(7, sections)
    with ahead.taken(7, goes_on) as found:
        assert not found


def test_what_is_live_or_gone_is_left_to_the_task(ladder: Ladder, exchange: Any) -> None:
    ahead = ReadAhead(exchange)
    ladder.release(ladder.hold(["shard"]))
    ahead.begin(7, SECTIONS)
    ladder.discard("shard")
    ahead.begin(8, SECTIONS)
    for output in (7, 8):
        with ahead.taken(output, goes_on) as found:
            assert not found


def test_what_can_not_be_read_is_left_to_the_task_and_counted(exchange: Any, monkeypatch: Any) -> None:
    @contextmanager
    def damaged(wanted: Any) -> Iterator[Any]:
        raise OSError("the disk is damaged")
        yield

    monkeypatch.setattr(exchange.landing, "reading_ahead", damaged)
    ahead = ReadAhead(exchange)
    ahead.begin(7, SECTIONS)
    with ahead.taken(7, goes_on) as found:
        assert not found
    known = exchange.metrics.snapshot()["fallbacks"]["sections are not read ahead"]
    assert known["reason"] == "the disk is damaged"


@pytest.mark.parametrize("in_flight", [True, False])
def test_what_nobody_takes_is_let_go(ladder: Ladder, exchange: Any, in_flight: bool) -> None:
    ahead, blocked = ReadAhead(exchange), threading.Event()
    exchange.executor.submit(blocked.wait)
    ahead.begin(7, SECTIONS)
    if not in_flight:
        blocked.set()
        settled(exchange)
        assert promised(ladder) == 40 * KIB
    ahead.close()
    blocked.set()
    settled(exchange)
    assert promised(ladder) == 0
    ahead.begin(8, SECTIONS)
    settled(exchange)
    assert promised(ladder) == 0


def test_an_exchange_that_has_closed_reads_nothing(exchange: Any) -> None:
    exchange.executor.shutdown()
    ahead = ReadAhead(exchange)
    ahead.begin(7, SECTIONS)
    with ahead.taken(7, goes_on) as found:
        assert not found


def test_a_section_stays_readable_though_its_shard_is_let_go(ladder: Ladder, exchange: Any) -> None:
    ahead = ReadAhead(exchange)
    ahead.begin(7, SECTIONS)
    settled(exchange)
    ladder.discard("shard")
    with ahead.taken(7, goes_on) as found:
        assert np.array_equal(found["shard", 1][0], array(2, 20))
    assert ladder.ledger.used(Tier.DISK) == 0
