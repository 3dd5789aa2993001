"""Make tiers small enough to fill quickly, and values to put into them."""

from __future__ import annotations

import numpy as np

from dask_gpurt.memory.host import BlockPool, PinnedTier
from dask_gpurt.memory.serialize import Frames

#: Bytes of a block of the pinned tier, and of a tier.
BLOCK, CAPACITY = 512, 8 * 512


def random_bytes(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def frames(*sizes: int, seed: int = 0, cut: int = 300) -> Frames:
    """Return buffers of these sizes, each in pieces of at most ``cut`` bytes."""
    whole = [random_bytes(size, seed + i) for i, size in enumerate(sizes)]
    buffers = tuple([array[at : at + cut] for at in range(0, array.size, cut)] for array in whole)
    return Frames(f"header {seed}".encode() * (seed % 3), buffers)


def content(found: Frames) -> tuple[bytes, list[bytes]]:
    return found.header, [b"".join(piece.tobytes() for piece in buffer) for buffer in found.buffers]


def pinned() -> PinnedTier:
    return PinnedTier(BlockPool(CAPACITY, block=BLOCK))
