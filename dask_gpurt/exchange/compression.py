"""Decide from a sample of each run whether to compress its shards for the network.

The codecs are those that Dask supports and that are installed. They work in host memory (why not on a GPU:
docs/decisions/device.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from distributed.protocol.compression import compressions
from zict import LRU

from dask_gpurt.device.pool import Buffer
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe import Metrics

#: The most time that a compressed transfer may take, as a share of an uncompressed one: a sample is only a
#: rough estimate, and compression takes CPU time from tasks.
PAYING_TIME_SHARE = 0.9
#: Limits of a shard in bytes: latency dominates below, and above no codec compresses it in one call.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 2**16, 2**30
#: The most runs whose samples are kept, least recently used first out. A sample taken while its run ends is
#: only removed this way.
MAX_RUNS = 256
#: The codecs of Dask that are considered: a fast one, and one with a better ratio.
CODECS = ("lz4", "zstd")
#: Message if a worker has neither.
CODECS_MISSING = "neither lz4 nor zstandard is installed: pip install dask-gpurt[compression]"
#: Bandwidth of a link in bytes per second from which on these do not pay off: they compress some hundred MB/s
#: on a core.
MAX_LINK_BYTES_PER_S = 2e9
#: Number and size in bytes of the pieces of a sample, spread over the shard, since its columns differ.
SAMPLE_PIECES, SAMPLE_PIECE_BYTES = 16, 2**16


class Codec:
    """Compress buffers of a device with a codec of Dask. Thread-safe; its methods block.

    ``name``: Dask's name of the codec, which peers use too.
    ``to_host``: copies a buffer of the device to host memory.
    """

    def __init__(self, name: str, to_host: Callable[[Buffer], bytearray | memoryview]):
        self.name = name
        self._to_host = to_host

    def whole(self, sections: Sequence[Buffer]) -> memoryview:
        """Concatenate buffers of the device, for :meth:`compress`."""
        here = [memoryview(self._to_host(section)) for section in sections]
        return here[0] if len(here) == 1 else memoryview(b"".join(here))

    def part(self, whole: memoryview) -> memoryview:
        """Return a representative part of the bytes, to measure the codec."""
        if whole.nbytes <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
            return whole
        starts = np.linspace(0, whole.nbytes - SAMPLE_PIECE_BYTES, SAMPLE_PIECES, dtype=int)
        return memoryview(b"".join(whole[start : start + SAMPLE_PIECE_BYTES] for start in starts))

    def compress(self, whole: memoryview) -> memoryview:
        """Compress bytes."""
        return memoryview(compressions[self.name].compress(whole))

    def decompress(self, packed: Any, sizes: Sequence[int]) -> list[np.ndarray]:
        """Decompress bytes, and split them into sections of the given sizes.

        Raises ValueError if the result does not have the total size.
        """
        whole = np.frombuffer(compressions[self.name].decompress(packed), np.uint8)
        if whole.nbytes != sum(sizes):
            raise ValueError(
                f"a shard of {sum(sizes)} bytes, compressed by {self.name}, decompressed to "
                f"{whole.nbytes} bytes"
            )
        return np.split(whole, np.cumsum(sizes)[:-1])


def codecs(to_host: Callable[[Buffer], bytearray | memoryview]) -> dict[str, Codec]:
    """Return the installed codecs of Dask, by name. The first call may load libraries."""
    return {name: Codec(name, to_host) for name in CODECS if name in compressions}


# ---- where compression pays; these functions are pure --------------------------------


@dataclass(frozen=True)
class Sample:
    """Describe the performance of a codec on a run.

    ``codec``: the name of the codec.
    ``ratio``: compressed by uncompressed bytes, above 0.
    ``compress_rate``, ``decompress_rate``: uncompressed bytes per second of one thread.
    """

    codec: str
    ratio: float
    compress_rate: float
    decompress_rate: float

    def seconds_per_byte(self, bandwidth: float) -> float:
        """Return the time to compress, send and decompress a byte."""
        return 1 / self.compress_rate + self.ratio / bandwidth + 1 / self.decompress_rate

    def corrected(self, ratio: float, compress_rate: float) -> Sample:
        """Return the mean of this sample and the measurements of a shard.

        Decompression runs on the peer and is not measured. It is assumed to slow down as compression does,
        since both compete with tasks.
        """
        seconds_per_byte = (1 / self.compress_rate + 1 / compress_rate) / 2
        slower = seconds_per_byte * self.compress_rate
        return Sample(
            self.codec, (self.ratio + ratio) / 2, 1 / seconds_per_byte, self.decompress_rate / slower
        )


def compression_pays(bandwidth: float, ratio: float, compress_rate: float, decompress_rate: float) -> bool:
    """Return whether bytes arrive clearly earlier with compression.

    ``bandwidth``: bytes per second of the link.
    ``ratio``: compressed by uncompressed bytes.
    ``compress_rate``, ``decompress_rate``: uncompressed bytes per second.
    """
    return (
        Sample("", ratio, compress_rate, decompress_rate).seconds_per_byte(bandwidth)
        < PAYING_TIME_SHARE / bandwidth
    )


def best(samples: Iterable[Sample], bandwidth: float) -> str | None:
    """Return the codec with which bytes arrive first over a link; None if none pays off."""
    paying = [
        sample
        for sample in samples
        if compression_pays(bandwidth, sample.ratio, sample.compress_rate, sample.decompress_rate)
    ]
    return min(paying, key=lambda sample: sample.seconds_per_byte(bandwidth)).codec if paying else None


def sample(codec: Codec, whole: Any) -> Sample:
    """Measure a codec on a part of some bytes: the better of two runs, since the first may be slow."""
    part = codec.part(whole)
    packings, restorings = [], []
    for _ in range(2):
        start = perf_counter()
        packed = codec.compress(part)
        between = perf_counter()
        codec.decompress(packed, [part.nbytes])
        packings.append(between - start)
        restorings.append(perf_counter() - between)
    return Sample(
        codec.name, packed.nbytes / part.nbytes, part.nbytes / min(packings), part.nbytes / min(restorings)
    )


# ---- runs ----------------------------------------------------------------------------


class _Run:
    """Hold the samples of a run, by codec."""

    def __init__(self, metrics: Metrics) -> None:
        self.samples: dict[str, Sample] = {}
        self._metrics = metrics
        self._trying = threading.Lock()

    def try_out(self, codecs: Iterable[Codec], sections: Sequence[Buffer]) -> None:
        """Sample the codecs that are new to the run; other threads block until that is done.

        Blocking pays off: taking a sample is quick, and compression matters on slow links only, where a shard
        sent uncompressed in the meantime would hold up all others.
        """
        with self._trying:
            for codec in codecs:
                if codec.name not in self.samples:
                    with self._metrics.seconds("exchange.seconds.compressing"):
                        self.samples[codec.name] = sample(codec, codec.whole(sections))


class Compressor:
    """Compress the shards of this worker where that pays off. Thread-safe; its methods block."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._lock = threading.Lock()
        self._runs: LRU[RunKey, _Run] = LRU(MAX_RUNS, {})

    def pack(
        self, run: RunKey, sections: Sequence[Buffer], bandwidth: float, codecs: Iterable[Codec]
    ) -> tuple[Codec, memoryview] | None:
        """Compress all sections of a shard into one buffer; return None if that does not pay off.

        The first shard of a run serves as its sample, and each compressed shard updates it. While the sample
        is taken, other shards of the run block, those of other runs do not.

        ``bandwidth``: bytes per second of the link.
        ``codecs``: the codecs that the peer has too.
        Returns the codec and the compressed bytes.
        """
        nbytes = sum(section.nbytes for section in sections)
        tried = {codec.name: codec for codec in codecs}
        pays_at_all = bandwidth < MAX_LINK_BYTES_PER_S and MIN_SHARD_BYTES <= nbytes <= MAX_SHARD_BYTES
        if not tried or not pays_at_all:
            return None
        samples = self._of(run, sections, tried.values())
        name = best((samples[name] for name in tried), bandwidth)
        return None if name is None else self._packed(tried[name], sections, samples)

    def _packed(
        self, codec: Codec, sections: Sequence[Buffer], samples: dict[str, Sample]
    ) -> tuple[Codec, memoryview]:
        start, nbytes = perf_counter(), sum(section.nbytes for section in sections)
        packed = codec.compress(codec.whole(sections))
        seconds = perf_counter() - start
        samples[codec.name] = samples[codec.name].corrected(packed.nbytes / nbytes, nbytes / seconds)
        self._metrics.add("exchange.seconds.compressing", seconds)
        self._metrics.add("exchange.compression.bytes.before", nbytes)
        self._metrics.add("exchange.compression.bytes.after", packed.nbytes)
        return codec, packed

    def _of(self, run: RunKey, sections: Sequence[Buffer], codecs: Iterable[Codec]) -> dict[str, Sample]:
        with self._lock:
            known = self._runs.setdefault(run, _Run(self._metrics))
        known.try_out(codecs, sections)
        return known.samples

    def forget(self, run: RunKey) -> None:
        """Forget a run that is over."""
        with self._lock:
            self._runs.pop(run, None)
