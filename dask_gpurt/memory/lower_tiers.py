"""Combine the lower tiers into one store: objects go to the first tier with room.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from dask_gpurt.device import Device
from dask_gpurt.device.base import Fence
from dask_gpurt.memory.disk import aligned
from dask_gpurt.memory.ledger import Label, Ledger, NoRoom, Tier
from dask_gpurt.memory.serialize import Frames, Scattered

_ORDER = list(Tier)
#: Threads that read files; a single one would leave the disk idle between reads.
READER_THREADS = 4

#: One buffer of an object: the tier, the name of the object, and the number of the buffer.
PartOf = tuple[Tier, str, int]


class LowerTier(Protocol):
    """Protocol of a lower tier: store serialised objects by name. Thread-safe; all methods may block.

    Any object with these methods can be a tier. Returned buffers may refer to the memory of the tier, so an
    object must not be deleted while it is read; :meth:`EntryTable.retain` ensures that. Names are never
    reused.

    ``reads_block``: whether reads wait for I/O, so that concurrent reads are faster.
    """

    reads_block: bool

    @property
    def used(self) -> int:
        """Return the bytes that the tier uses, including padding."""

    def put(self, name: str, frames: Frames, device: Device, /, *, ordered: bool) -> Fence:
        """Start to store an object; its buffers have to stay valid until the returned fence has passed.

        ``device``: the device of buffers that are not in host memory.
        ``ordered``: whether pending work on the device may still write the buffers.
        Raises NoRoom if the object does not fit; then nothing of it is stored.
        """

    def __getitem__(self, name: str, /) -> Frames:
        """Return an object with all of its buffers in host memory."""

    def to_device(self, name: str, /) -> Frames:
        """Return an object, with buffers on the device if the tier can read directly to it."""

    def part(
        self, name: str, which: int, into: np.ndarray | None = None, /, *, to_device: bool = False
    ) -> Scattered:
        """Return one buffer, read ``into`` memory of :meth:`part_room` bytes if given.

        ``to_device``: whether to read directly to the device, if the tier can.
        """

    def part_room(self, name: str, which: int, /) -> int:
        """Return the bytes of new memory needed to read one buffer; 0 if it is read in place."""

    def part_size(self, name: str, which: int, /) -> int:
        """Return the bytes of one buffer of an object."""

    def stored(self, name: str, /) -> int:
        """Return the bytes that an object uses in this tier."""

    def __delitem__(self, name: str, /) -> None: ...

    def close(self) -> None:
        """Delete everything, and free the memory or the files."""


class LowerTiers:
    """Store serialised objects, by tier and name. Thread-safe.

    ``device``: the device of buffers that are not in host memory.
    ``host_has_room``: returns whether this many bytes more fit into the host tier, which live objects use
    too.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, LowerTier],
        device: Device,
        ledger: Ledger,
        host_has_room: Callable[[int], bool],
    ):
        self._tiers = dict(tiers)
        self._device = device
        self._ledger = ledger
        self._host_has_room = host_has_room
        self._stored: dict[tuple[Tier, str], tuple[Label, int]] = {}
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="gpurt-read")

    def put(
        self, name: str, frames: Frames, label: Label, above: Tier, *, ordered: bool = True
    ) -> tuple[Tier, Fence]:
        """Start to store an object in the first tier below ``above`` that has room.

        ``label``: the label of its bytes in the ledger.
        ``ordered``: whether pending work on the device may still write the buffers.
        Returns the tier, and the fence of the copy. The buffers of ``frames`` have to stay valid until the
        fence has passed.
        Raises NoRoom if no tier has room, with the reason for each tier.
        """
        why: list[str] = []
        for tier, store in self._tiers.items():
            if _ORDER.index(tier) <= _ORDER.index(above):
                continue
            if tier is Tier.HOST and not self._host_has_room(frames.nbytes):
                continue
            try:
                fence = store.put(name, frames, self._device, ordered=ordered)
            except NoRoom as error:
                why.append(str(error))
                continue
            self._count(tier, name, label, store.stored(name))
            return tier, fence
        raise NoRoom(_ORDER[-1], frames.nbytes, "; ".join(why) or "there is no lower tier")

    def _count(self, tier: Tier, name: str, label: Label, nbytes: int) -> None:
        self._stored[tier, name] = label, nbytes
        self._ledger.add(tier, label, nbytes)

    def get(self, tier: Tier, name: str, *, to_device: bool = False) -> Frames:
        """Return an object; it may refer to the tier's memory, so it must not be discarded while it is read.

        ``to_device``: whether to read buffers of the device directly to it, if the tier can.
        """
        store = self._tiers[tier]
        return store.to_device(name) if to_device else store[name]

    def part_size(self, part: PartOf) -> int:
        """Return the bytes of one buffer of an object."""
        tier, name, which = part
        return self._tiers[tier].part_size(name, which)

    def parts(self, wanted: Sequence[tuple[PartOf, bool]]) -> list[Scattered]:
        """Return buffers, which may refer to the tiers' memory; files are read concurrently.

        ``wanted``: buffers, each with whether to read it directly to the device, if the tier can.
        """
        if not any(self._tiers[tier].reads_block for (tier, _, _), _ in wanted):
            return [self._part(part) for part in wanted]
        rooms = [0 if to_device else self._part_room(part) for part, to_device in wanted]
        memory = np.split(aligned(sum(rooms)), np.cumsum(rooms)[:-1])
        return list(self._readers.map(self._part, wanted, memory))

    def _part_room(self, part: PartOf) -> int:
        tier, name, which = part
        return self._tiers[tier].part_room(name, which)

    def _part(self, wanted: tuple[PartOf, bool], memory: np.ndarray | None = None) -> Scattered:
        (tier, name, which), to_device = wanted
        return self._tiers[tier].part(name, which, memory, to_device=to_device)

    def discard(self, tier: Tier, name: str) -> None:
        """Delete an object."""
        del self._tiers[tier][name]
        label, nbytes = self._stored.pop((tier, name))
        self._ledger.add(tier, label, -nbytes)

    def total(self, tier: Tier) -> int:
        """Return the bytes used in a tier."""
        return self._tiers[tier].used if tier in self._tiers else 0

    def close(self) -> None:
        """Delete everything, including files. Blocks."""
        self._readers.shutdown()
        for store in self._tiers.values():
            store.close()
