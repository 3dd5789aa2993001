"""Let requests for room on a worker wait, and tell them when to ask again. On the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from dask_gpurt.memory.admission import ADMISSION_PATIENCE_S, FETCH, SEND, TASK, Admission, Holder
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Metrics

#: Seconds after which a request asks again: room may have come from elsewhere, or its time has run out.
LOOK_AGAIN = 0.5
#: What falls back, for counting.
OVERDUE = "tasks and fetches begin without room for them"


class Turns:
    """The :class:`Admission` of a worker, with those that wait for it.

    Parameters
    ----------
    worker
        The Dask worker.
    ladder
        Where room has been promised to whoever asks.
    """

    def __init__(self, worker: Any, ladder: TieredBuffer, metrics: Metrics):
        self._worker = worker
        self._ladder = ladder
        self._metrics = metrics
        self._admission = Admission(ADMISSION_PATIENCE_S)
        self._numbers = itertools.count()
        self._told: dict[Holder, asyncio.Event] = {}

    @property
    def short(self) -> bool:
        """Whether peers are to ask later."""
        return self._admission.short

    async def wait(self, who: Holder, reserve: Callable[[Holder], Awaitable[bool]]) -> None:
        """Wait until a request is admitted.

        Parameters
        ----------
        reserve
            Promises it room if there is some, and says whether there is.
        """
        while True:
            fits = await reserve(who)
            self._let_seceded_go()
            if self._is_admitted(who, fits):
                self._tell(self._admission.first)  # there may be room for more
                return
            self._ladder.reservations.cancel(who)
            self._metrics.add("memory.waits")
            turn = self._told.setdefault(who, asyncio.Event())
            turn.clear()
            with contextlib.suppress(TimeoutError):  # room may have come from elsewhere
                await asyncio.wait_for(turn.wait(), LOOK_AGAIN)

    def _is_admitted(self, who: Holder, fits: bool) -> bool:
        before = self._admission.overdue
        admitted = self._admission.ask(who, fits, time.monotonic())
        if self._admission.overdue != before:
            self._metrics.add("memory.waits.overdue")
            self._metrics.fallback(
                OVERDUE,
                f"{who.kind} {who.key!r} had been the first to wait for {ADMISSION_PATIENCE_S} s: tasks wait "
                "for each other, or take longer than that while memory is short",
            )
        return admitted

    def waiting(self) -> dict[str, list[str]]:
        """Name what goes on and what waits, for whoever looks into a cluster that stands still."""
        return {
            "running": sorted(map(str, self._admission.running)),
            "waiting": list(map(str, self._admission.waiting)),
        }

    def leave(self, who: Holder) -> None:
        """Give back the room of something that is done, or of a request that is withdrawn."""
        self._ladder.reservations.cancel(who)
        self._told.pop(who, None)
        self._tell(self._admission.leave(who, time.monotonic()))

    @contextlib.asynccontextmanager
    async def receiving(self, reserve: Callable[[Holder], Awaitable[bool]]) -> AsyncIterator[Holder]:
        """While something comes from a peer, for which there was room, or nobody to wait for; who has it."""
        who = Holder(FETCH, next(self._numbers))
        try:
            await self.wait(who, reserve)
            yield who
        finally:
            self.leave(who)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """While something goes to a peer, which keeps it from going down."""
        who = Holder(SEND, next(self._numbers))
        self._admission.ask(who, True, time.monotonic())
        try:
            yield
        finally:
            self.leave(who)

    def _tell(self, who: Holder | None) -> None:
        if who in self._told:
            self._told[who].set()

    def _let_seceded_go(self) -> None:
        for who in self._admission.running:
            task = self._worker.state.tasks.get(who.key) if who.kind == TASK else None
            if who.kind == TASK and (task is None or task.state == "long-running"):
                self.leave(who)
