"""The tiers below the live ones, as one place: what is put goes to the first that has room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dask_gpurt.device import Device
from dask_gpurt.device.base import Fence, passed
from dask_gpurt.memory.disk import aligned
from dask_gpurt.memory.ledger import Label, Ledger
from dask_gpurt.memory.serialize import Frames, Scattered, on_device
from dask_gpurt.memory.tiers import NoRoom, Tier

_ORDER = list(Tier)
#: Files that are read at once: one after the other a disk is idle in between.
READERS = 4

#: One buffer of an object: its tier, its name, and which one.
PartOf = tuple[Tier, str, int]


class Below:
    """Objects taken apart, by tier and name. Thread-safe.

    Parameters
    ----------
    tiers
        The mapping of each tier, in order.
    device
        Where buffers that are not in host memory lie.
    ledger
        Told of each change.
    host_room
        Whether so many bytes more fit into the host tier, which live objects use too.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, Any],
        device: Device,
        ledger: Ledger,
        host_room: Callable[[int], bool],
    ):
        self._tiers = dict(tiers)
        self._device = device
        self._ledger = ledger
        self._host_room = host_room
        self._stored: dict[tuple[Tier, str], tuple[Label, int]] = {}
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="gpurt-read")

    def put(
        self, name: str, frames: Frames, label: Label, above: Tier, *, ordered: bool = True
    ) -> tuple[Tier, Fence]:
        """Begin to store an object in the first tier under ``above`` with room.

        Returns
        -------
        tuple
            Which tier, and what waits until the copy is complete. Until then the buffers of
            ``frames`` have to stay.

        Parameters
        ----------
        name
            New, and not used again.
        label
            What it is to the ledger.
        ordered
            Whether work that the device was given so far may still write the buffers.

        Raises
        ------
        NoRoom
            When none has room; it names the reason of each.
        """
        why: list[str] = []
        for tier, mapping in self._tiers.items():
            if _ORDER.index(tier) <= _ORDER.index(above):
                continue
            if tier is Tier.HOST and not self._host_room(frames.nbytes):
                continue
            try:
                fence = self._store(mapping, name, frames, ordered)
            except NoRoom as error:
                why.append(str(error))
                continue
            self._count(tier, name, label, mapping.stored(name))
            return tier, fence
        raise NoRoom(_ORDER[-1], frames.nbytes, "; ".join(why) or "there is no lower tier")

    def _store(self, mapping: Any, name: str, frames: Frames, ordered: bool) -> Fence:
        if not any(map(on_device, frames.buffers)):
            mapping[name] = frames
            return passed
        if not hasattr(mapping, "adopt"):
            mapping.put(name, frames, ordered=ordered)
            return passed
        sources = [buffer[0] for buffer in frames.buffers]
        into = mapping.adopt(name, frames.header, [source.nbytes for source in sources])
        try:
            return self._device.scatter(sources, into.buffers, ordered=ordered)
        except BaseException:
            del mapping[name]
            raise

    def _count(self, tier: Tier, name: str, label: Label, nbytes: int) -> None:
        self._stored[tier, name] = label, nbytes
        self._ledger.add(tier, label, nbytes)

    def get(self, tier: Tier, name: str, *, to_device: bool = False) -> Frames:
        """What was put; refers to the tier's memory, so it must not be discarded while it is read.

        Parameters
        ----------
        to_device
            Whether what lies in a file but came from the device may go there at once.
        """
        mapping = self._tiers[tier]
        frames: Frames = mapping.to_device(name) if to_device and tier is Tier.DISK else mapping[name]
        return frames

    def part_size(self, part: PartOf) -> int:
        """Bytes of one buffer of what was put."""
        tier, name, which = part
        return int(self._tiers[tier].part_size(name, which))

    def parts(self, wanted: Sequence[tuple[PartOf, bool]]) -> list[Scattered]:
        """Some buffers, which refer to the tiers' memory too; files are read side by side.

        Parameters
        ----------
        wanted
            Each with whether it may go to the device at once, if it lies in a file.
        """
        if not any(tier is Tier.DISK for (tier, _, _), _ in wanted):
            return [self._part(part) for part in wanted]
        rooms = [0 if to_device else self._room(part) for part, to_device in wanted]
        memory = np.split(aligned(sum(rooms)), np.cumsum(rooms)[:-1])
        return list(self._readers.map(self._part, wanted, memory))

    def _room(self, part: PartOf) -> int:
        tier, name, which = part
        return int(self._tiers[tier].part_room(name, which)) if tier is Tier.DISK else 0

    def _part(self, wanted: tuple[PartOf, bool], memory: np.ndarray | None = None) -> Scattered:
        (tier, name, which), to_device = wanted
        mapping = self._tiers[tier]
        pieces: Scattered
        if tier is not Tier.DISK:
            pieces = mapping.part(name, which)
        elif to_device:
            pieces = mapping.part_to_device(name, which)
        else:
            pieces = mapping.part(name, which, memory)
        return pieces

    def discard(self, tier: Tier, name: str) -> None:
        """Let an object go."""
        del self._tiers[tier][name]
        label, nbytes = self._stored.pop((tier, name))
        self._ledger.add(tier, label, -nbytes)

    def total(self, tier: Tier) -> int:
        """Bytes that a tier says it uses."""
        return int(self._tiers[tier].used) if tier in self._tiers else 0

    def close(self) -> None:
        """Let everything go, files included. Blocks."""
        self._readers.shutdown()
        for mapping in self._tiers.values():
            mapping.clear()
            if hasattr(mapping, "close"):
                mapping.close()
