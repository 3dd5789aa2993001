"""Compute the memory of a GPU, and the workers that `gpurt.compute.concurrency: auto` starts on it."""

from __future__ import annotations

import pytest

from dask_gpurt.device.discover import memory_of
from dask_gpurt.worker.colocation import default_count
from tests.helpers.fake_nvml import FakeGpu, FakeNvml

GIB = 2**30
TWO = FakeNvml([FakeGpu(0, memory=80 * GIB), FakeGpu(1, memory=24 * GIB)])


def test_a_gpu_is_found_by_its_index_and_by_its_id() -> None:
    assert memory_of("1", TWO) == memory_of(TWO.gpus[1].uuid, TWO) == 24 * GIB


@pytest.mark.parametrize("device", ["2", "GPU-ffffffff", "MIG-1"])
def test_of_a_gpu_that_is_not_there_nothing_is_known(device: str) -> None:
    assert memory_of(device, TWO) is None


def test_of_a_gpu_with_the_memory_of_the_host_nothing_is_known() -> None:
    assert memory_of("0", FakeNvml([FakeGpu(0, memory=None)])) is None


def test_without_nvml_nothing_is_known() -> None:
    assert memory_of("0", None) is None


@pytest.mark.parametrize(
    ("memory", "workers"), [(141 * GIB, 2), (64 * GIB, 2), (64 * GIB - 1, 1), (24 * GIB, 1), (None, 1)]
)
def test_auto_starts_two_where_each_has_room(memory: int | None, workers: int) -> None:
    assert default_count(memory) == workers
