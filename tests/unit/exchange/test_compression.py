"""Compress shards where it pays; nothing else about them changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.exchange import compression
from dask_gpurt.exchange.compression import (
    MAX_LINK_BYTES_PER_S,
    MIN_SHARD_BYTES,
    SAMPLE_PIECE_BYTES,
    SAMPLE_PIECES,
    Codec,
    Compressor,
    Sample,
    best,
    codecs,
    compression_pays,
)
from dask_gpurt.exchange.links import PRIOR_BYTES, MeasuredBandwidth
from dask_gpurt.observe import Metrics
from dask_gpurt.topology import Speed

RATES = st.floats(1e6, 1e10)
RATIOS = st.floats(0.01, 1.5)
RUN = ("a shuffle", 1)

CODECS: list[Codec] = list(codecs(memoryview).values())

has_codec = pytest.mark.skipif(not CODECS, reason="neither lz4 nor zstandard is installed")


# ---- where it pays -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bandwidth", "ratio", "pays"),
    [
        (12e6, 0.5, True),  # 100 Mbit/s
        (120e6, 0.3, True),  # 1 Gbit/s, and data that compress well
        (120e6, 0.7, False),  # ... and data that hardly compress
        (1.1e9, 0.3, False),  # 10 Gbit/s is faster than the codec
        (12e6, 1.0, False),  # noise
    ],
)
def test_a_person_would_say_the_same(bandwidth: float, ratio: float, pays: bool) -> None:
    assert compression_pays(bandwidth, ratio, compress_rate=400e6, decompress_rate=1e9) == pays


@given(RATES, RATIOS, RATES, RATES)
def test_compression_that_pays_makes_shards_arrive_sooner(
    bandwidth: float, ratio: float, packing: float, unpacking: float
) -> None:
    if compression_pays(bandwidth, ratio, packing, unpacking):
        assert 1 / packing + ratio / bandwidth + 1 / unpacking < 1 / bandwidth


@given(st.lists(st.tuples(RATIOS, RATES, RATES), max_size=4), RATES)
def test_the_best_codec_is_the_soonest_of_those_that_pay(
    figures: list[tuple[float, float, float]], bandwidth: float
) -> None:
    samples = [Sample(str(at), *known) for at, known in enumerate(figures)]
    chosen = best(samples, bandwidth)
    paying = [
        known
        for known in samples
        if compression_pays(bandwidth, known.ratio, known.compress_rate, known.decompress_rate)
    ]
    if chosen is None:
        assert not paying
    else:
        assert samples[int(chosen)] in paying
        assert samples[int(chosen)].seconds_per_byte(bandwidth) == min(
            known.seconds_per_byte(bandwidth) for known in samples
        )


@given(RATIOS, RATES, RATES, RATIOS, RATES)
def test_a_sample_is_corrected_by_what_shards_show(
    ratio: float, packing: float, unpacking: float, seen: float, rate: float
) -> None:
    before = Sample("lz4", ratio, packing, unpacking)
    after = before
    for _ in range(60):
        after = after.corrected(seen, rate)
    assert after.ratio == pytest.approx(seen)
    assert after.compress_rate == pytest.approx(rate)
    assert after.decompress_rate / unpacking == pytest.approx(rate / packing)


# ---- link estimates from transfers --------------------------------------------------


LATENCY = 1e-3


def after(
    shown: MeasuredBandwidth, bandwidth: float, transfers: int, *, at_once: int = 1, start: float = 0.0
) -> float:
    """Simulate concurrent transfers of 1 MiB over a link; returns when they end."""
    now = start
    for _ in range(transfers // at_once):
        begin, now = now, now + LATENCY + at_once * PRIOR_BYTES / bandwidth
        for _ in range(at_once):
            shown.observe(PRIOR_BYTES, begin, now)
    return now


@given(st.floats(1e6, 1e9), st.integers(10, 100), st.integers(1, 4))
def test_a_slow_link_is_found_out_after_few_bytes(bandwidth: float, transfers: int, at_once: int) -> None:
    shown = MeasuredBandwidth(Speed(1.1e9, LATENCY))
    after(shown, bandwidth, transfers, at_once=at_once)
    assert bandwidth * 0.99 <= shown.bandwidth <= bandwidth * 1.3


# ---- shards --------------------------------------------------------------------------


def sections(*arrays: Any) -> list[memoryview]:
    return [memoryview(np.ascontiguousarray(array)).cast("B") for array in arrays]


@has_codec
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_sections_come_out_as_they_went_in(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    given = sections(*(random.integers(0, 4, size, dtype=np.uint8) for size in sizes))
    found = Compressor(Metrics()).pack(RUN, given, 1e5, CODECS)
    if found is None:
        assert sum(sizes) < MIN_SHARD_BYTES
    else:
        codec, packed = found
        assert packed.nbytes < sum(sizes)
        for before, after in zip(given, codec.decompress(packed, sizes), strict=True):
            np.testing.assert_array_equal(np.frombuffer(before, np.uint8), after)


@has_codec
def test_noise_goes_as_it_is() -> None:
    metrics = Metrics()
    given = sections(np.random.default_rng(0).random(100_000))
    assert Compressor(metrics).pack(RUN, given, 1e6, CODECS) is None
    assert "exchange.compression.bytes.before" not in metrics.snapshot()["counters"]


@has_codec
def test_the_first_shard_of_a_run_is_the_sample_for_it() -> None:
    noise, zeros = sections(np.random.default_rng(0).random(100_000)), sections(np.zeros(100_000))
    compressor = Compressor(Metrics())
    assert compressor.pack(RUN, noise, 1e6, CODECS) is None
    assert compressor.pack(RUN, zeros, 1e6, CODECS) is None
    assert compressor.pack(("another", 2), zeros, 1e6, CODECS) is not None
    compressor.forget(RUN)
    assert compressor.pack(RUN, zeros, 1e6, CODECS) is not None


@has_codec
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_only_a_codec_that_the_peer_has(codec: Codec) -> None:
    found = Compressor(Metrics()).pack(RUN, sections(np.zeros(100_000)), 1e5, [codec])
    assert found is not None
    assert found[0] is codec


def test_without_codecs_shards_go_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "compressions", {})
    assert not codecs(memoryview)
    assert Compressor(Metrics()).pack(RUN, sections(np.zeros(100_000)), 1e5, []) is None


@has_codec
def test_a_shard_that_comes_out_wrong_is_an_error() -> None:
    codec = CODECS[0]
    with pytest.raises(ValueError, match="a shard of 9 bytes"):
        codec.decompress(codec.compress(memoryview(b"12345678")), [4, 5])


@given(st.integers(0, 3 * SAMPLE_PIECES * SAMPLE_PIECE_BYTES))
def test_a_sample_is_bounded_and_from_both_ends(nbytes: int) -> None:
    data = np.zeros(nbytes, np.uint8)
    data[:1], data[-1:] = 1, 2
    taken = Codec("lz4", memoryview).part(memoryview(data))
    assert len(taken) == min(nbytes, SAMPLE_PIECES * SAMPLE_PIECE_BYTES)
    if nbytes > 1:
        assert (taken[0], taken[-1]) == (1, 2)


# ---- several threads -----------------------------------------------------------------


class Refusing(Codec):
    """Fake a codec without memory for its result."""

    def compress(self, whole: Any) -> Any:
        raise MemoryError


class Held(Codec):
    """Compress only once released, and count the trials."""

    def __init__(self) -> None:
        super().__init__(CODECS[0].name, memoryview)
        self.tried = 0
        self.begun, self.let = threading.Event(), threading.Event()

    def part(self, whole: memoryview) -> memoryview:
        self.tried += 1
        return super().part(whole)

    def compress(self, whole: memoryview) -> memoryview:
        self.begun.set()
        assert self.let.wait(60)
        return super().compress(whole)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


SHRINKING = sections(np.zeros(2 * MIN_SHARD_BYTES, np.uint8))


@has_codec
def test_while_a_run_is_sampled_others_are_packed(thread: ThreadPoolExecutor) -> None:
    compressor, held = Compressor(Metrics()), Held()
    sampling = thread.submit(compressor.pack, RUN, SHRINKING, 1e6, [held])
    try:
        assert held.begun.wait(60)
        other = thread.submit(compressor.pack, ("another", 2), SHRINKING, 1e6, CODECS)
        assert other.result(60) is not None
    finally:
        held.let.set()
    assert sampling.result(60) is not None


@has_codec
def test_a_run_is_sampled_once_and_its_other_shards_wait_for_that(thread: ThreadPoolExecutor) -> None:
    compressor, held = Compressor(Metrics()), Held()
    sampling = thread.submit(compressor.pack, RUN, SHRINKING, 1e6, [held])
    try:
        assert held.begun.wait(60)
        meanwhile = thread.submit(compressor.pack, RUN, SHRINKING, 1e6, [held])
        with pytest.raises(TimeoutError):
            meanwhile.result(0.1)
    finally:
        held.let.set()
    assert sampling.result(60) is not None
    assert meanwhile.result(60) is not None
    assert held.tried == 1


@has_codec
def test_a_sample_that_fails_is_taken_of_the_next_shard() -> None:
    compressor, held = Compressor(Metrics()), Held()
    held.let.set()
    with pytest.raises(MemoryError):
        compressor.pack(RUN, SHRINKING, 1e6, [held, Refusing("another", memoryview)])
    assert compressor.pack(RUN, SHRINKING, 1e6, [held]) is not None
    assert held.tried == 1


@has_codec
@given(st.floats(1e6, 1e12))
def test_a_codec_is_not_even_tried_where_its_link_is_too_fast(bandwidth: float) -> None:
    held = Held()
    held.let.set()
    Compressor(Metrics()).pack(RUN, SHRINKING, bandwidth, [held])
    assert held.tried == (bandwidth < MAX_LINK_BYTES_PER_S)
