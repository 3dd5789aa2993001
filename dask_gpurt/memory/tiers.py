"""Define the memory tiers of a worker, from fast to slow, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: Bytes by which a live tier may exceed its limit before objects are spilled: one block of the pinned tier,
#: but at most this share of the tier.
SPILL_SLACK_BYTES, SLACK_SHARE = 2**20, 1 / 64


class Tier(StrEnum):
    """Enumerate the memory tiers, from fast to slow."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"
    DISK = "disk"


class NoRoom(Exception):
    """A tier cannot take an object.

    ``tier``, ``nbytes``: the tier, and the bytes that were to be stored.
    ``reason``: the reason, if it is not just that the tier is full.
    """

    def __init__(self, tier: Tier, nbytes: int, reason: str = ""):
        super().__init__(tier, nbytes, reason)  # all arguments, so that it can be pickled
        self.tier = tier
        self.nbytes = nbytes
        self.reason = reason

    def __str__(self) -> str:
        return f"no room for {self.nbytes} bytes in the {self.tier} tier" + (
            self.reason and f": {self.reason}"
        )


@dataclass(frozen=True)
class Limits:
    """Limit the bytes of each tier; None for a disk tier limited only by the file system."""

    device: int
    pinned: int
    host: int
    disk: int | None

    def live(self, tier: Tier) -> int:
        """Return the limit of a live tier."""
        return self.device if tier is Tier.DEVICE else self.host
