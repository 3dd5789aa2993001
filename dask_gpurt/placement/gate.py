"""Root tasks go where there is room: who has none is left out of the workers that Dask's queue fills."""

from __future__ import annotations

from itertools import islice
from typing import Any

from dask_gpurt.placement.candidates import Chooser

#: Workers without room that are offered a root task at a time when nobody has room.
RESERVE = 8
#: Idle workers without room that are looked at again when the queue moves: room may come unannounced.
LOOKED_AT = 4


class Gate:
    """Keeps ``idle_task_count`` of Dask's scheduler to workers with room.

    While no running worker has room, idle ones are let in, one task each: so the queue always moves.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    chooser
        It knows who has room.
    """

    def __init__(self, state: Any, chooser: Chooser):
        self._state = state
        self._chooser = chooser
        # Idle workers without room, and those of them that are let in, by address.
        self._waiting: dict[str, Any] = {}
        self._let_in: dict[str, Any] = {}
        #: Who got a slot last: the only one with any, most of the time when there is a queue.
        self._opened: Any = None

    def check(self, ws: Any) -> None:
        """Dask has just judged a worker by its tasks: judge it by its room."""
        address = ws.address
        if self._waiting or self._let_in:
            self.forget(address)
        if ws not in self._state.running:
            return
        if self._chooser.look_at(ws):
            if self._let_in:
                self._let_nobody_in()
            if ws in self._state.idle_task_count:
                self._opened = ws
            return
        self._state.idle_task_count.discard(ws)
        if not ws.processing:
            self._waiting[address] = ws
        self.let_in()

    def slot(self) -> Any | None:
        """Of the workers that take root tasks one with little to do; None if many others have less.

        To iterate over a set that has had many takes long, so the only one in it is remembered. While some
        workers are paused the chooser is asked all the same: it leaves those out from then on.
        """
        state, idle = self._state, self._state.idle_task_count
        if len(idle) == 1 and len(state.running) == len(state.workers) and self._opened in idle:
            return self._opened
        return self._chooser.least_loaded_of(idle)

    def look_again(self) -> list[Any]:
        """Some of the workers that were left out, for another check."""
        if not self._waiting:
            return []
        return [ws for ws in islice(self._waiting.values(), LOOKED_AT) if ws in self._state.running]

    def let_in(self) -> None:
        """See to it that the queue moves when nobody has room."""
        if not self._waiting or self._chooser.anyone_has_room():
            return
        for address in list(islice(self._waiting, RESERVE - len(self._let_in))):
            ws = self._waiting.pop(address)
            if ws in self._state.running:
                self._let_in[address] = ws
                self._state.idle_task_count.add(ws)

    def _let_nobody_in(self) -> None:
        self._state.idle_task_count.difference_update(self._let_in.values())
        self._waiting.update(self._let_in)
        self._let_in.clear()

    def forget(self, worker: str) -> None:
        """Leave a worker out of account: Dask has removed it, or it is judged anew."""
        self._waiting.pop(worker, None)
        self._let_in.pop(worker, None)
