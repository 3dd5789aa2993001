"""Which way the bytes take between two workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dask_gpurt.device import Device, Mapping, MappingError
from dask_gpurt.device.protocol import Ticket


@dataclass(frozen=True)
class Path:
    """How shards of a peer are read.

    Attributes
    ----------
    name
        "local", "shared-memory", "cuda-ipc" or "comms".
    mapping
        The peer's pool; None where bytes come through a comm.
    in_place
        Whether a shard may stay where it is until it is read.
    reason
        Why a better path was not taken.
    """

    name: str
    mapping: Mapping | None
    in_place: bool
    reason: str | None = None

    def describe(self) -> dict[str, Any]:
        return {"path": self.name, "reason": self.reason}


COMMS = "comms"
LOCAL = "local"


def choose(device: Device | None, ticket: Ticket | None, allowed: frozenset[str]) -> Path:
    """Map the peer's pool where that is possible and allowed; it may take a while.

    Parameters
    ----------
    device
        This worker's device of the kind in question, if it has one.
    ticket
        What the peer's pool says of itself; None where it has none.
    allowed
        The setting ``gpurt.exchange.paths``.
    """
    if device is None or ticket is None:
        return Path(COMMS, None, False, "one of the two workers has no such device")
    if device.shared_path not in allowed:
        return Path(COMMS, None, False, f"gpurt.exchange.paths leaves {device.shared_path} out")
    try:
        return Path(device.shared_path, device.map(ticket), device.reads_in_place)
    except MappingError as error:
        return Path(COMMS, None, False, str(error))


def fallback_noted(path: Path, note: Callable[[str, str], None]) -> Path:
    """Pass ``path`` through; tell ``note`` where it is not the best one."""
    if path.reason is not None:
        note("bytes take Dask's comms", path.reason)
    return path
