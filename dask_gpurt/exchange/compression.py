"""Decide from a sample of each run whether its shards are worth compressing on their way.

The functions at the top are pure: figures in, figures out. The codecs are those of the shard's device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from zict import LRU

from dask_gpurt.device.base import Buffer, Codec, CodecError
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe import Fallback, Metrics

#: With compression it has to take at most so much of the time without: what a sample tells is rough, and
#: compression takes processors from tasks.
PAYING_TIME_SHARE = 0.9
#: Bytes of a shard: of smaller ones it is the latency that counts, larger ones no codec takes at once.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 2**16, 2**30
#: Runs of which samples are kept, those used last: one may be taken as its run ends, and stays then.
MAX_RUNS = 256


@dataclass(frozen=True)
class Sample:
    """Describe how a codec does on a run.

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

    def seconds_per_byte(self, bandwidth: float) -> float:
        """Return the seconds that a byte takes to be compressed, sent and decompressed."""
        return 1 / self.compress_rate + self.ratio / bandwidth + 1 / self.decompress_rate

    def corrected(self, ratio: float, compress_rate: float) -> Sample:
        """Return the sample to be expected after a shard: the mean of this one and of the shard's.

        Restoring is done elsewhere, and counts as slower by as much as compressing is: it competes too.
        """
        seconds_per_byte = (1 / self.compress_rate + 1 / compress_rate) / 2
        slower = seconds_per_byte * self.compress_rate
        return Sample(
            self.codec, (self.ratio + ratio) / 2, 1 / seconds_per_byte, self.decompress_rate / slower
        )


def compression_pays(bandwidth: float, ratio: float, compress_rate: float, decompress_rate: float) -> bool:
    """Return whether bytes arrive clearly sooner compressed on one side and restored on the other.

    Parameters
    ----------
    bandwidth
        Of the link, in bytes per second.
    ratio
        Bytes after compression by bytes before.
    compress_rate, decompress_rate
        Bytes before compression, per second.
    """
    return (
        Sample("", ratio, compress_rate, decompress_rate).seconds_per_byte(bandwidth)
        < PAYING_TIME_SHARE / bandwidth
    )


def best(samples: Iterable[Sample], bandwidth: float) -> str | None:
    """Return the codec with which bytes arrive soonest over a link, None where none pays."""
    paying = [
        sample
        for sample in samples
        if compression_pays(bandwidth, sample.ratio, sample.compress_rate, sample.decompress_rate)
    ]
    return min(paying, key=lambda sample: sample.seconds_per_byte(bandwidth)).codec if paying else None


def sample(codec: Codec, whole: Any) -> Sample:
    """Try a codec out, on a part of some bytes; the better of two times, since the first may be slow."""
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
    """Keep what is known of a run, by codec."""

    def __init__(self, metrics: Metrics) -> None:
        self.samples: dict[str, Sample] = {}
        self._metrics = metrics
        self._trying = threading.Lock()

    def try_out(self, codecs: Iterable[Codec], sections: Sequence[Buffer]) -> None:
        """Sample those that are new to the run; a thread that comes meanwhile waits for the result.

        A sample is small and a link where it matters is slow: a shard that does not wait crosses it in full,
        and all others wait for that.
        """
        with self._trying:
            for codec in codecs:
                if codec.name not in self.samples:
                    with self._metrics.seconds("exchange.seconds.compressing"):
                        self.samples[codec.name] = sample(codec, codec.whole(sections))


class Compressor:
    """Compress the shards of this worker where that pays. Thread-safe; its methods take a while."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._lock = threading.Lock()
        self._runs: LRU[RunKey, _Run] = LRU(MAX_RUNS, {})

    def pack(
        self, run: RunKey, sections: Sequence[Buffer], bandwidth: float, codecs: Iterable[Codec]
    ) -> tuple[Codec, Any] | None:
        """Return all sections of a shard as one, compressed, and by what; None where that does not pay.

        Parameters
        ----------
        run
            Of the shard; the first of a run is the sample for it, and those that are compressed correct that.
            While it is taken, other shards of the run wait, and those of other runs do not.
        bandwidth
            Bytes per second of the link that it will cross.
        codecs
            Those of its device that the peer has too.
        """
        nbytes = sum(section.nbytes for section in sections)
        tried = {codec.name: codec for codec in codecs if bandwidth < codec.fast}
        if not tried or not MIN_SHARD_BYTES <= nbytes <= MAX_SHARD_BYTES:
            return None
        try:
            samples = self._of(run, sections, tried.values())
            name = best((samples[name] for name in tried), bandwidth)
            return None if name is None else self._packed(tried[name], sections, samples)
        except CodecError as error:
            self._metrics.fallback(Fallback.EXCHANGE_UNCOMPRESSED, str(error))
            return None

    def _packed(
        self, codec: Codec, sections: Sequence[Buffer], samples: dict[str, Sample]
    ) -> tuple[Codec, Any]:
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
