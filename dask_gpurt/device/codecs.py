"""Compress buffers of a device in host memory, with the codecs that Dask supports and that are installed.

A device may also have codecs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from distributed.protocol.compression import compressions

from dask_gpurt.device.base import Codec
from dask_gpurt.device.pool import Buffer

#: The codecs of Dask that are considered: a fast one, and one with a better ratio.
CODECS = ("lz4", "zstd")
#: Bandwidth of a link from which on these do not pay off: they compress some hundred MB/s on a core.
MAX_LINK_BYTES_PER_S = 2e9
#: Number and size in bytes of the pieces of a sample, spread over the shard, since its columns differ.
SAMPLE_PIECES, SAMPLE_PIECE_BYTES = 16, 2**16


class HostCodec:
    """Compress with a codec of Dask.

    Parameters
    ----------
    name
        Dask's name of the codec.
    to_host
        Copies a buffer of the device to host memory.
    """

    on_host = True
    fast = MAX_LINK_BYTES_PER_S

    def __init__(self, name: str, to_host: Callable[[Buffer], bytearray | memoryview]):
        self.name = name
        self._to_host = to_host

    def whole(self, sections: Sequence[Buffer]) -> memoryview:
        here = [memoryview(self._to_host(section)) for section in sections]
        return here[0] if len(here) == 1 else memoryview(b"".join(here))

    def part(self, whole: memoryview) -> memoryview:
        if whole.nbytes <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
            return whole
        starts = np.linspace(0, whole.nbytes - SAMPLE_PIECE_BYTES, SAMPLE_PIECES, dtype=int)
        return memoryview(b"".join(whole[start : start + SAMPLE_PIECE_BYTES] for start in starts))

    def compress(self, whole: memoryview) -> memoryview:
        return memoryview(compressions[self.name].compress(whole))

    def decompress(self, packed: Any, sizes: Sequence[int]) -> list[Buffer]:
        whole = np.frombuffer(compressions[self.name].decompress(packed), np.uint8)
        check(self.name, whole.nbytes, sum(sizes))
        return np.split(whole, np.cumsum(sizes)[:-1])


def check(codec: str, found: int, expected: int) -> None:
    """Check the size of decompressed bytes.

    Raises
    ------
    ValueError
        If it differs from the size before compression.
    """
    if found != expected:
        raise ValueError(f"a shard of {expected} bytes, compressed by {codec}, decompressed to {found} bytes")


def host_codecs(to_host: Callable[[Buffer], bytearray | memoryview]) -> dict[str, Codec]:
    """Return the installed codecs of Dask, by name."""
    return {name: HostCodec(name, to_host) for name in CODECS if name in compressions}
