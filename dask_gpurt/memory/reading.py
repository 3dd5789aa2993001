"""Read objects in the lower tiers, without making them live or to do so.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from dask.typing import Key
from distributed.protocol.serialize import Serialized

from dask_gpurt.device import Device
from dask_gpurt.device.base import Fence, wait_for_all
from dask_gpurt.device.pool import Buffer
from dask_gpurt.memory.accounting import owned
from dask_gpurt.memory.entries import Entry, EntryTable, StoredCopy
from dask_gpurt.memory.ledger import Tier
from dask_gpurt.memory.serialize import (
    Frames,
    NotMovable,
    Scattered,
    from_frames,
    joined,
    message,
    on_device,
    to_frames,
)
from dask_gpurt.memory.spilling import Reservations, Spiller

#: A buffer, and its memo, in which readers cache derived data.
BufferAndMemo = tuple[Buffer, dict[str, Any]]


class EntryReader:
    """Read the entries of a table. Thread-safe; its methods block."""

    def __init__(self, table: EntryTable, reservations: Reservations):
        self._table = table
        self._reservations = reservations

    def read(self, copy: StoredCopy, stack: ExitStack) -> Any:
        """Return an object from its copy; it is complete once ``stack`` has been closed."""
        as_it_lies = self._is_read_as_it_lies(copy)
        gather = _Gather(None if as_it_lies else self._table.device)
        stack.callback(gather.wait)
        return from_frames(self._table.lower.get(copy.tier, copy.name, to_device=not as_it_lies), gather)

    def _is_read_as_it_lies(self, copy: StoredCopy) -> bool:
        """Return whether the object is live in host memory, so that it can be read without the device."""
        return copy.entry.home in self._table.host_tiers

    def copies(self, keys: Iterable[Key]) -> tuple[dict[Key, Any], list[Key]]:
        """Return objects by key, and the keys of objects that are still in another mapping."""
        table = self._table
        found: dict[Key, Any] = {}
        foreign: list[Key] = []
        with ExitStack() as stack:
            retained = {}
            with table.lock:
                for key, entry in ((key, table.by_key[key]) for key in keys if key in table.by_key):
                    if entry.live:
                        found[key] = entry.value
                    elif entry.foreign is not None:
                        foreign.append(key)
                    else:
                        retained[key] = table.retain(entry, stack)
            found |= {key: self.read(copy, stack) for key, copy in retained.items()}
        return found, foreign

    def messages(self, keys: Iterable[Key], stack: ExitStack) -> dict[Key, Serialized]:
        """Return the Dask messages of objects in lower tiers, valid until ``stack`` is closed.

        Objects are not deserialised, and not copied to the device. Keys for which that is impossible are
        left out.
        """
        table = self._table
        with table.lock:
            known = [table.by_key[key] for key in keys if key in table.by_key]
            lower = [entry for entry in known if not entry.live and entry.foreign is None]
            retained = [table.retain(entry, stack) for entry in lower]
        found = {copy.entry.key: message(table.lower.get(copy.tier, copy.name)) for copy in retained}
        return {key: sent for key, sent in found.items() if sent is not None}

    def device_messages(self, objects: Mapping[Key, Any]) -> dict[Key, Serialized]:
        """Return the Dask messages of objects on the device, copied to host memory.

        Objects for which such a message is impossible are left out.
        """
        found = {key: self._on_host(value) for key, value in objects.items()}
        return {key: sent for key, sent in found.items() if sent is not None}

    def _on_host(self, value: Any) -> Serialized | None:
        try:
            frames = to_frames(value)
        except NotMovable:
            return None  # Dask sends the object in its own way, or fails with its own message
        there = [buffer[0] for buffer in frames.buffers if on_device(buffer)]
        copies = [np.empty(source.nbytes, np.uint8) for source in there]
        self._table.device.scatter(there, [[copy] for copy in copies])()
        copied = iter(copies)
        buffers = tuple([next(copied)] if on_device(buffer) else buffer for buffer in frames.buffers)
        return message(Frames(frames.header, buffers))

    @contextmanager
    def parts(
        self, wanted: Iterable[tuple[Key, int]], reserved: Key | None = None
    ) -> Iterator[dict[tuple[Key, int], BufferAndMemo]]:
        """Read buffers of :class:`Raw` objects, which stay valid while the body runs.

        This is for objects that are read once. They stay in their tier; buffers are copied only if the device
        needs that, with room reserved for the copies.

        ``wanted``: pairs of a key and the number of a buffer.
        ``reserved``: the key under which the reader has reserved room, which includes the copies.
        """
        table = self._table
        found: dict[tuple[Key, int], BufferAndMemo] = {}
        retained: dict[tuple[Key, int], StoredCopy] = {}
        with ExitStack() as stack:
            with table.lock:
                for key, which in wanted:
                    entry = table.by_key[key]
                    if entry.live:
                        entry.holders += 1
                        stack.callback(table.release, [entry])
                        found[key, which] = entry.value.buffers[which], entry.value.memos[which]
                    else:
                        retained[key, which] = table.retain(entry, stack)
            self._reserve_for(retained, reserved, stack)
            found |= self._read_parts(retained, stack)
            yield found

    def _read_parts(
        self, retained: dict[tuple[Key, int], StoredCopy], stack: ExitStack
    ) -> dict[tuple[Key, int], BufferAndMemo]:
        found: dict[tuple[Key, int], BufferAndMemo] = {}
        scattered: dict[tuple[Key, int], Scattered] = {}
        wanted = [
            ((copy.tier, copy.name, which), not self._is_read_as_it_lies(copy))
            for (_, which), copy in retained.items()
        ]
        read = self._table.lower.parts(wanted)
        for (at, copy), pieces in zip(retained.items(), read, strict=True):
            if on_device(pieces):
                found[at] = pieces[0], {}
            elif self._is_read_as_it_lies(copy):
                found[at] = (pieces[0] if len(pieces) == 1 else joined(pieces)), {}
            else:
                scattered[at] = pieces
        if scattered:
            buffers, complete = self._table.device.gather_all(list(scattered.values()))
            stack.callback(complete)  # on errors too, the reads end before the copies are released
            found.update((at, (buffer, {})) for at, buffer in zip(scattered, buffers, strict=True))
            complete()
        return found

    def _reserve_for(
        self, retained: dict[tuple[Key, int], StoredCopy], reserved: Key | None, stack: ExitStack
    ) -> None:
        """Reserve room for the copies beyond the reader's own reservation, until ``stack`` is closed."""
        sizes: Counter[Tier] = Counter()
        for (_, which), copy in retained.items():
            if not self._is_read_as_it_lies(copy) or copy.tier is Tier.DISK:
                sizes[copy.entry.home] += self._table.lower.part_size((copy.tier, copy.name, which))
        for home, nbytes in sizes.items():
            missing = max(0, nbytes - self._table.live.reserved(reserved, home))
            key = ("reading", id(stack), home)
            stack.callback(self._reservations.cancel, key)
            self._reservations.reserve(key, missing, home)


class _Gather:
    """Copy buffers to the device, or into new host memory without one."""

    def __init__(self, device: Device | None):
        self._device = device
        self._fences: list[Fence] = []

    def __call__(self, pieces: Scattered) -> Buffer:
        if on_device(pieces):
            return pieces[0]
        if self._device is None:
            return joined(pieces)
        buffer, fence = self._device.gather(pieces)
        self._fences.append(fence)
        return buffer

    def wait(self) -> None:
        wait_for_all(self._fences)


# ---- objects that become live again ------------------------------------------------------------------


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
