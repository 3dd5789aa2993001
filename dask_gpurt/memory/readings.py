"""What is read where it lies: it does not become live, and nobody has to wait until it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dask.typing import Key
from distributed.protocol.serialize import Serialized

from dask_gpurt.device.base import Buffer
from dask_gpurt.memory.entries import Copy, Entry
from dask_gpurt.memory.room import Room
from dask_gpurt.memory.serialize import Scattered, joined, message, on_device
from dask_gpurt.memory.tiers import Tier

#: A buffer, and what its reader remembers of it.
Part = tuple[Buffer, dict[str, Any]]


class Readings(Room):
    """Room whose entries can be read below the live tiers. Thread-safe."""

    def release(self, held: Iterable[Entry]) -> None:
        """Let what was held be spilled again."""
        held = list(held)
        with self._lock:
            for entry in held:
                entry.holders -= 1
                entry.used = next(self._clock)
            for entry in held:
                self._revise(entry)

    @contextmanager
    def reading(
        self, wanted: Iterable[tuple[Key, int]], reserved: Key | None = None
    ) -> Iterator[dict[tuple[Key, int], Part]]:
        """Some buffers of :class:`Raw` objects, for as long as the body runs. Blocks.

        This is for what is read once: it stays in the tier where it lies, is copied where the
        device needs that, and there is room for the copies.

        Parameters
        ----------
        reserved
            Who reads, whose promised room is meant for the copies too.
        """
        found: dict[tuple[Key, int], Part] = {}
        pinned: dict[tuple[Key, int], Copy] = {}
        with ExitStack() as stack:
            with self._lock:
                for key, which in wanted:
                    entry = self._entries[key]
                    if entry.live:
                        entry.holders += 1
                        stack.callback(self.release, [entry])
                        found[key, which] = entry.value.buffers[which], entry.value.memos[which]
                    else:
                        pinned[key, which] = self._pin(entry, stack)
            parts = [(tier, name, which) for (_, which), (_, tier, name) in pinned.items()]
            sizes = zip(pinned.values(), map(self._below.part_size, parts), strict=True)
            self._promise_reading(sizes, reserved, stack)
            ways = [not self._on_host(copy) for copy in pinned.values()]
            scattered: dict[tuple[Key, int], Scattered] = {}
            found_below = self._below.parts(list(zip(parts, ways, strict=True)))
            for (at, copy), pieces in zip(pinned.items(), found_below, strict=True):
                if on_device(pieces):
                    found[at] = pieces[0], {}
                elif self._on_host(copy):
                    found[at] = (pieces[0] if len(pieces) == 1 else joined(pieces)), {}
                else:
                    scattered[at] = pieces
            if scattered:
                buffers, complete = self._device.gather_all(list(scattered.values()))
                stack.callback(complete)  # before the pins are undone, should anything fail
                found.update((at, (buffer, {})) for at, buffer in zip(scattered, buffers, strict=True))
                complete()
            yield found

    def _promise_reading(
        self, parts: Iterable[tuple[Copy, int]], reserved: Key | None, stack: ExitStack
    ) -> None:
        sizes: Counter[Tier] = Counter()
        for copy, nbytes in parts:
            entry, tier, _ = copy
            if not self._on_host(copy) or tier is Tier.DISK:
                sizes[entry.home] += nbytes
        for home in sizes:
            nbytes = max(0, sizes[home] - self._live.promised(reserved, home))
            promised = ("reading", id(stack), home)
            stack.callback(self.forget_promise, promised)
            self.promise(promised, nbytes, home)

    def messages(self, keys: Iterable[Key], stack: ExitStack) -> dict[Key, Serialized]:
        """What Dask sends of objects below the live tiers; refers to those until ``stack`` is left. Blocks.

        Nothing is put together, and nothing goes to the device. Keys of which that can not be sent are
        left out.
        """
        with self._lock:
            known = {key: self._entries[key] for key in keys if key in self._entries}
            below = {key: entry for key, entry in known.items() if not entry.live and entry.before is None}
            pinned = {key: self._pin(entry, stack) for key, entry in below.items()}
        found = {key: message(self._below.get(tier, name)) for key, (_, tier, name) in pinned.items()}
        return {key: sent for key, sent in found.items() if sent is not None}
