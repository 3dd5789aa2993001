"""Wait in line: in order, without lost wake-ups, until it is cancelled or the line is closed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.waits import Line, LineClosed, WaitLine
from tests.helpers.waiting import LIMIT_S, on_a_loop, until

steps = st.lists(st.tuples(st.sampled_from(["join", "ahead", "leave"]), st.integers(0, 5)), max_size=40)


@given(steps)
def test_a_line_keeps_the_order_and_knows_since_when_the_first_is_first(steps: Any) -> None:
    line, model, since = Line[int](), list[int](), 0
    for now, (what, who) in enumerate(steps, 1):
        before = model[:1]
        if what == "leave":
            line.leave(who, now)
            model = [each for each in model if each != who]
        elif who not in model:
            line.join(who, now, ahead=what == "ahead")
            model = [who, *model] if what == "ahead" else [*model, who]
        since = now if model[:1] != before else since
        assert line.waiting == tuple(model)
        assert line.first == next(iter(model), None)
        assert not model or line.first_since == since


class Room:
    """Hand out units in order of arrival, or whenever they fit, with an attempt that takes a moment."""

    def __init__(self, units: int, fair: bool):
        self.free, self.fair = units, fair
        self.line: WaitLine[int] = WaitLine("units", set())
        self.admitted: list[int] = []

    async def take(self, who: int, units: int, pauses: int) -> None:
        async def attempt() -> bool:
            fits = units <= self.free and not (self.fair and self.line.first not in (None, who))
            self.free -= units if fits else 0
            for _ in range(0 if fits else pauses):  # as one that spills; meanwhile others give back, and wake
                await asyncio.sleep(0)
            return fits

        await self.line.reserve_or_wait_async(who, attempt)
        self.admitted.append(who)

    def give_back(self, units: int) -> None:
        self.free += units
        self.line.wake_first()


async def _settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


requests = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=8)
events = st.lists(st.tuples(st.sampled_from(["end", "cancel", "pass"]), st.integers(0, 7)), max_size=12)


@given(requests, events, st.booleans())
@on_a_loop
async def test_nothing_waits_while_there_is_room_whatever_ends_or_gives_up(
    wanted: Any, events: Any, fair: bool
) -> None:
    """There are no retries, so that a lost wake-up would hang."""
    room = Room(4, fair)
    tasks = [asyncio.create_task(room.take(who, *request)) for who, request in enumerate(wanted)]
    given_back = set[int]()
    for what, which in [*events, *[("settle", 0), ("end", 0)] * len(wanted)]:
        running = [who for who in room.admitted if who not in given_back]
        waiting = [who for who, task in enumerate(tasks) if not task.done()]
        if what == "end" and running:
            given_back.add(who := running[which % len(running)])
            room.give_back(wanted[who][0])
        elif what == "cancel" and waiting and (who := waiting[which % len(waiting)]) in room.line.waiting:
            tasks[who].cancel()
        elif what == "pass":
            await asyncio.sleep(0)
        else:
            await _settle()
            first = room.line.first
            assert first is None or wanted[first][0] > room.free, "there is room for the first"
    await _settle()
    assert all(task.done() for task in tasks)
    if fair and not any(task.cancelled() for task in tasks) and not any(pauses for _, pauses in wanted):
        assert room.admitted == sorted(room.admitted)


def test_a_wake_up_between_an_attempt_and_the_wait_is_not_lost() -> None:
    line: WaitLine[str] = WaitLine("units", set())
    seen, asked = line.wakes, list[int]()
    line.wake()
    line.wait("a", seen, 3600, lambda: asked.append(1))
    assert not asked
    assert line.waiting == ()


def test_threads_and_coroutines_end_when_the_line_is_closed_and_say_what_they_waited_for() -> None:
    lines = set[Any]()
    line: WaitLine[str] = WaitLine("units", lines)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(line.reserve_or_wait, name, lambda: False, 3600) for name in "ab"]
        until(lambda: len(line.waiting) == 2)
        (said,) = map(repr, lines)
        assert "WaitLine for units: [" in said
        assert "the first for" in said
        line.close()
        for future in waiting:
            with pytest.raises(LineClosed, match="was waiting for units"):
                future.result(LIMIT_S)
    assert line.waiting == ()

    async def refuse() -> bool:
        return False

    async def run() -> None:
        with pytest.raises(LineClosed):
            await line.reserve_or_wait_async("c", refuse)

    asyncio.run(run())


def test_a_thread_goes_on_as_soon_as_it_is_woken() -> None:
    line: WaitLine[str] = WaitLine("units", set())
    free = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(line.reserve_or_wait, "a", free.is_set, 3600)
        until(lambda: line.first == "a")
        free.set()
        line.wake()
        future.result(LIMIT_S)
