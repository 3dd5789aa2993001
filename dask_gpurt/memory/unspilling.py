"""Make objects in lower tiers live again.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from dask.typing import Key

from dask_gpurt.memory.accounting import owned
from dask_gpurt.memory.entries import Entry, EntryTable
from dask_gpurt.memory.reading import EntryReader
from dask_gpurt.memory.reservations import Reservations
from dask_gpurt.memory.spilling import Spiller


@dataclass(frozen=True)
class _Unspill:
    """Track an object that is being copied up; it is complete when ``reading`` has been closed."""

    entry: Entry
    value: Any
    reading: ExitStack
    began: float


class Unspiller:
    """Make entries of a table live. Thread-safe; its methods block."""

    def __init__(self, table: EntryTable, spiller: Spiller, reservations: Reservations, reader: EntryReader):
        self._table = table
        self._spiller = spiller
        self._reservations = reservations
        self._reader = reader

    def make_live(self, wanted: list[Entry]) -> None:
        """Make held entries live. All copies are started before the first is waited for."""
        table = self._table
        while wanted := self._not_live(wanted):
            for home in {entry.home for entry in wanted}:
                self._spiller.make_room(sum(entry.nbytes for entry in wanted if entry.home is home), home)
            # Even if one cannot be read, or its copy fails, the others are completed.
            with ExitStack() as begun:
                for entry in wanted:
                    if unspill := self._begin(entry):
                        begun.callback(self._end, unspill)
            # Other threads are moving the rest. No thread gets here with a move of its own pending, so this
            # cannot deadlock:
            #   Thread 1 wants x, y: moves x          Thread 2 wants y, x: moves y
            #   ends the move of x, waits for y       ends the move of y, and finds x live
            with table.lock:
                while (rest := self._not_live(wanted)) and all(entry.moving for entry in rest):
                    table.stopped_moving.wait()

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Make keys live, in order, while there is room without spilling; it is checked again on arrival."""
        for key in keys:
            with self._table.lock:
                entry = self._table.by_key.get(key)
            if entry is None or not self._reservations.has_room(entry.nbytes, entry.home):
                return
            try:
                if unspill := self._begin(entry):
                    self._end(unspill)
            except MemoryError:
                return  # the task that needs the key will make room

    def _not_live(self, wanted: list[Entry]) -> list[Entry]:
        with self._table.lock:
            return [entry for entry in wanted if not entry.live and self._table.is_current(entry)]

    def _begin(self, entry: Entry) -> _Unspill | None:
        """Start to copy an object up, the first step of a move; return None if there is nothing to do."""
        table = self._table
        with table.lock:
            if entry.live or entry.moving or not table.is_current(entry):
                return None
            entry.moving = True
            began, reading = perf_counter(), ExitStack()
            copy = table.retain(entry, reading)
        try:
            self._reservations.reserve(entry.key, entry.nbytes, entry.home)
            value = entry.foreign.take() if entry.foreign else self._reader.read(copy, reading)
        except BaseException:
            reading.close()
            self._give_up(entry)
            raise
        return _Unspill(entry, value, reading, began)

    def _end(self, unspill: _Unspill) -> None:
        """Put the object into the table, unless it is stale: the second step of a move.

        During the read other threads may use or delete the key::

            Thread 1 (unspills x)                     Thread 2
            _begin: x is moving, reads the copy
                                                      deletes x, or replaces its object: the entry leaves
                                                      the table. As it is moving, its copy stays
            _end: the entry is no longer current.
            Its copy is deleted, the object dropped

            _begin, by prefetch: x is moving
                                                      reserves the same room
            _end: x would exceed the limit, and has
            no holder. The object is dropped, and x
            stays in its tier
        """
        table, entry, came_from = self._table, unspill.entry, unspill.entry.tier
        try:
            unspill.reading.close()
            roots = owned(unspill.value)
        except BaseException:
            self._give_up(entry)
            raise
        with table.lock:
            if self._is_in_the_way(entry):
                self._give_up(entry)
                return
            table.live.cancel(entry.key)
            table.delete_copy(entry)
            entry.foreign = None
            if table.is_current(entry):
                entry.value, entry.live, entry.nbytes = unspill.value, True, sum(roots.values())
                entry.home = entry.tier = table.home(unspill.value)
                table.live.add(entry.key, entry.home, entry.label, roots)
            table.stop_moving(entry)
            table.account(entry.home)
        table.record_move(came_from, entry.home, entry.nbytes, perf_counter() - unspill.began)

    def _is_in_the_way(self, entry: Entry) -> bool:
        """Return whether a prefetched object would exceed the limit, as the room is needed now."""
        return not entry.holders and entry.foreign is None and self._table.excess(0, entry.home) > 0

    def _give_up(self, entry: Entry) -> None:
        """Leave an object in its tier; if its key was deleted during the move, delete its copy too."""
        table = self._table
        with table.lock:
            table.live.cancel(entry.key)
            if not table.is_current(entry):
                table.delete_copy(entry)
            table.stop_moving(entry)
            table.account()
