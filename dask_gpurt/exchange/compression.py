"""Whether shards are worth compressing on their way, found out from a sample of each run.

The cores at the top know figures only. Codecs are the ones that Dask knows, as far as they are installed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from distributed.protocol.compression import compressions
from zict import LRU

from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe import Metrics

#: The codecs that are tried, if they are installed: one that is fast, and one that makes less of the bytes.
CODECS = ("lz4", "zstd")
#: With compression it has to take at most so much of the time without: what a sample tells is rough, and
#: compression takes processors from those who compute.
WORTH = 0.9
#: Bytes per second at which no link gains: these codecs compress some hundred MB/s on a core.
FAST = 2e9
#: Bytes of a shard: of smaller ones it is the latency that counts, larger ones no codec takes at once.
LEAST, MOST = 2**16, 2**30
#: A sample is so many pieces of so many bytes, from all over the shard: its columns differ.
PIECES, PIECE = 16, 2**16
#: Samples are kept of so many runs, those used last: one may be taken as its run ends, and nobody forgets it.
RUNS = 256


@dataclass(frozen=True)
class Sample:
    """What a codec makes of a run.

    Parameters
    ----------
    codec
        Its name.
    ratio
        Bytes after by bytes before, above 0.
    compress_rate, decompress_rate
        Bytes before compression, per second of one thread.
    """

    codec: str
    ratio: float
    compress_rate: float
    decompress_rate: float

    def pace(self, bandwidth: float) -> float:
        """Seconds that a byte takes to be compressed, sent and decompressed."""
        return 1 / self.compress_rate + self.ratio / bandwidth + 1 / self.decompress_rate

    def corrected(self, ratio: float, compress_rate: float) -> Sample:
        """What is to be expected after a shard: half of what was, half of what it has shown.

        Restoring is done elsewhere, and counts as slower by as much as compressing is: it competes too.
        """
        pace = (1 / self.compress_rate + 1 / compress_rate) / 2
        slower = pace * self.compress_rate
        return Sample(self.codec, (self.ratio + ratio) / 2, 1 / pace, self.decompress_rate / slower)


def compression_pays(bandwidth: float, ratio: float, compress_rate: float, decompress_rate: float) -> bool:
    """Whether bytes arrive clearly sooner when they are compressed on one side and restored on the other.

    Parameters
    ----------
    bandwidth
        Of the link, in bytes per second.
    ratio
        Bytes after compression by bytes before.
    compress_rate, decompress_rate
        Bytes before compression, per second.
    """
    return Sample("", ratio, compress_rate, decompress_rate).pace(bandwidth) < WORTH / bandwidth


def best(samples: Iterable[Sample], bandwidth: float) -> str | None:
    """The codec with which bytes arrive soonest over a link, None where none pays."""
    paying = [
        sample
        for sample in samples
        if compression_pays(bandwidth, sample.ratio, sample.compress_rate, sample.decompress_rate)
    ]
    return min(paying, key=lambda sample: sample.pace(bandwidth)).codec if paying else None


# ---- codecs --------------------------------------------------------------------------


def installed() -> tuple[str, ...]:
    """The codecs that this process has."""
    return tuple(codec for codec in CODECS if codec in compressions)


def compress(codec: str, data: Any) -> Any:
    """Bytes that :func:`decompress` restores."""
    return compressions[codec].compress(data)


def decompress(codec: str, data: Any, sizes: Sequence[int]) -> list[np.ndarray]:
    """The sections that were compressed as one.

    Parameters
    ----------
    sizes
        Bytes of each.

    Raises
    ------
    ValueError
        When something else comes out.
    """
    whole = np.frombuffer(compressions[codec].decompress(data), np.uint8)
    if whole.nbytes != sum(sizes):
        raise ValueError(f"a shard of {sum(sizes)} bytes, compressed by {codec}, came out as {whole.nbytes}")
    return np.split(whole, np.cumsum(sizes)[:-1])


def sample(codec: str, data: bytes) -> Sample:
    """Try a codec out."""
    start = perf_counter()
    packed = compress(codec, data)
    between = perf_counter()
    compressions[codec].decompress(packed)
    end = perf_counter()
    return Sample(codec, len(packed) / len(data), len(data) / (between - start), len(data) / (end - between))


def pieces_of(data: memoryview) -> bytes:
    """A part of some bytes that stands for all."""
    if data.nbytes <= PIECES * PIECE:
        return bytes(data)
    starts = np.linspace(0, data.nbytes - PIECE, PIECES, dtype=int)
    return b"".join(data[start : start + PIECE] for start in starts)


# ---- runs ----------------------------------------------------------------------------


class Compressor:
    """Compresses the shards of this worker where that pays. Thread-safe; its methods take a while."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._lock = threading.Lock()
        self._samples: LRU[RunKey, dict[str, Sample]] = LRU(RUNS, {})

    def pack(
        self, run: RunKey, sections: Sequence[memoryview], bandwidth: float, codecs: Collection[str]
    ) -> tuple[str | None, list[Any]]:
        """What to send of a shard: all sections as one and by which codec, or each as it is.

        Parameters
        ----------
        run
            Of the shard; the first of a run is the sample for it, and those that are compressed correct that.
        bandwidth
            Bytes per second of the link that it will cross.
        codecs
            Those that the peer has.
        """
        nbytes = sum(section.nbytes for section in sections)
        if not LEAST <= nbytes <= MOST or bandwidth >= FAST:
            return None, list(sections)
        whole = sections[0] if len(sections) == 1 else memoryview(b"".join(sections))
        samples = self._of(run, whole)
        codec = best((one for name, one in samples.items() if name in codecs), bandwidth)
        if codec is None:
            return None, list(sections)
        start = perf_counter()
        packed = compress(codec, whole)
        seconds = perf_counter() - start
        samples[codec] = samples[codec].corrected(len(packed) / nbytes, nbytes / seconds)
        self._metrics.add("exchange.seconds.compressing", seconds)
        self._metrics.add("exchange.compression.bytes.before", nbytes)
        self._metrics.add("exchange.compression.bytes.after", len(packed))
        return codec, [packed]

    def _of(self, run: RunKey, data: memoryview) -> dict[str, Sample]:
        with self._lock:
            if run not in self._samples:
                with self._metrics.seconds("exchange.seconds.compressing"):
                    piece = pieces_of(data)
                    self._samples[run] = {codec: sample(codec, piece) for codec in installed()}
            return self._samples[run]

    def forget(self, run: RunKey) -> None:
        """A run is over."""
        with self._lock:
            self._samples.pop(run, None)
