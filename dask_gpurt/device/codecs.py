"""Compress and restore the bytes of a device.

The codecs that Dask knows, as far as they are installed, work in host memory. A device may have some of
its own besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from distributed.protocol.compression import compressions

from dask_gpurt.device.base import Buffer, Codec

#: The codecs of Dask that are tried: one that is fast, and one that makes less of the bytes.
CODECS = ("lz4", "zstd")
#: Bytes per second of a link at which these gain nothing: they compress some hundred MB/s on a core.
MAX_LINK_BYTES_PER_S = 2e9
#: A sample for them is so many pieces of so many bytes, from all over the shard: its columns differ.
SAMPLE_PIECES, SAMPLE_PIECE_BYTES = 16, 2**16


class HostCodec:
    """Compress with a codec that Dask knows.

    Parameters
    ----------
    name
        As Dask calls it.
    to_host
        Copies a buffer of the device into host memory.
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
    """Refuse restored bytes of another size than before compression.

    Raises
    ------
    ValueError
        Where that is so.
    """
    if found != expected:
        raise ValueError(f"a shard of {expected} bytes, compressed by {codec}, came out as {found}")


def host_codecs(to_host: Callable[[Buffer], bytearray | memoryview]) -> dict[str, Codec]:
    """Return those of Dask's codecs that this process has, by name."""
    return {name: HostCodec(name, to_host) for name in CODECS if name in compressions}
