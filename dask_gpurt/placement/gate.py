"""Root tasks go where there is room: who has none is left out of the workers that Dask's queue fills."""

from __future__ import annotations

from itertools import islice
from typing import Any

from dask_gpurt.placement.chooser import Chooser

#: Workers without room that are offered a root task at a time when nobody has room.
RESERVE = 8
#: Idle workers without room that are looked at again each time that the queue moves: room may come unannounced.
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
        # Idle workers without room, and those of them that are let in; dictionaries without values, in order.
        self._waiting: dict[Any, None] = {}
        self._let_in: dict[Any, None] = {}

    def check(self, ws: Any) -> None:
        """Dask has just judged a worker by its tasks: judge it by its room."""
        self.forget(ws)
        if ws not in self._state.running:
            return
        if self._chooser.look_at(ws):
            self._let_nobody_in()
            return
        self._state.idle_task_count.discard(ws)
        if not ws.processing:
            self._waiting[ws] = None
        self.let_in()

    def look_again(self) -> list[Any]:
        """Some of the workers that were left out, for another check."""
        return list(islice(self._waiting, LOOKED_AT))

    def let_in(self) -> None:
        """See to it that the queue moves when nobody has room."""
        if not self._waiting or self._chooser.anyone_has_room():
            return
        for ws in list(islice(self._waiting, RESERVE - len(self._let_in))):
            del self._waiting[ws]
            if ws in self._state.running:
                self._let_in[ws] = None
                self._state.idle_task_count.add(ws)

    def _let_nobody_in(self) -> None:
        for ws in self._let_in:
            self._state.idle_task_count.discard(ws)
            self._waiting[ws] = None
        self._let_in.clear()

    def forget(self, ws: Any) -> None:
        """A worker is gone, or about to be judged anew."""
        self._waiting.pop(ws, None)
        self._let_in.pop(ws, None)
