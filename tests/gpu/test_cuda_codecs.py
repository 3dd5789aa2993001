"""Compress shards on the GPU that holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_gpurt
from dask_gpurt.exchange.compression import Compressor
from dask_gpurt.exchange.links import Links
from dask_gpurt.observe import Fallback, Metrics
from tests.helpers.clusters import assert_same_partitions, cluster, counters, partitions

pytestmark = pytest.mark.gpu
RUN = ("a shuffle", 1)
UNLIKE_ASKED = {Fallback.EXCHANGE_UNCOMPRESSED.id, Fallback.EXCHANGE_COMPRESSED_ON_HOST.id}


@pytest.fixture(scope="module")
def device() -> Any:
    from dask_gpurt.device.cuda import CudaDevice

    return CudaDevice()


def of_the_gpu(device: Any) -> list[Any]:
    found = list(device.own_codecs().values())
    assert found, "nvCOMP for Python is not installed"
    return found


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.integers(1, 256)
)
def test_sections_come_out_as_they_went_in(device: Any, sizes: list[int], seed: int, values: int) -> None:
    random = np.random.default_rng(seed)
    given = [random.integers(0, values, size, np.uint8) for size in sizes]
    for codec in of_the_gpu(device):
        if sum(sizes):
            packed = codec.compress(codec.whole(device.from_host(given)))
            for sent in (packed, device.to_host(packed)):  # as received by UCX, and by TCP
                for before, after in zip(given, codec.decompress(sent, sizes), strict=True):
                    assert bytes(device.to_host(after)) == before.tobytes()


def test_a_codec_of_the_gpu_is_the_soonest(device: Any) -> None:
    numbers = np.random.default_rng(0).integers(0, 1000, 2**21).view(np.uint8)
    codecs = [*device.own_codecs().values(), *device.host_codecs().values()]
    found = Compressor(Metrics()).pack(RUN, device.from_host([numbers]), 1e8, codecs)
    assert found is not None
    codec, packed = found
    assert not codec.on_host
    assert packed.nbytes < numbers.nbytes / 2


def test_damaged_bytes_raise_an_error(device: Any) -> None:
    from dask_gpurt.device.base import CodecError

    for codec in of_the_gpu(device):
        packed = codec.compress(codec.whole(device.from_host([np.zeros(100_000, np.uint8)])))
        with pytest.raises((CodecError, ValueError)):
            codec.decompress(packed, [99_000])


def pretend_to_be_far() -> None:
    Links.bandwidth_between_hosts = lambda links, peer: 1e7  # type: ignore[method-assign]


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_over_a_slow_link_shards_are_compressed(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cudf
    import dask
    import dask.dataframe as dd

    monkeypatch.setenv("GPURT_TEST_PROTOCOL", protocol)

    def make(part: int) -> Any:
        numbers = np.random.default_rng(part).integers(0, 999, 100_000)
        return cudf.DataFrame({"key": numbers, "text": [f"number {number}" for number in numbers]})

    with cluster("cudf", exchange__paths=["comms"], exchange__compression="gpu") as client:
        client.run(pretend_to_be_far)
        df = dd.from_map(make, range(4), meta=make(0).iloc[:0])
        ours = partitions(df.shuffle("key", ignore_index=True))
        for worker in dask_gpurt.report(client)["workers"].values():
            assert not worker["fallbacks"].keys() & UNLIKE_ASKED, worker["fallbacks"]
        found = counters(client)
        assert 0 < found["exchange.compression.bytes.after"] < found["exchange.compression.bytes.before"] / 2
        with dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": False}):
            assert_same_partitions(
                ours, partitions(df.shuffle("key", ignore_index=True)), in_order=False, index=False
            )
