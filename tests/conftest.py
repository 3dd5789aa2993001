from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator

import pytest
from clusters import Library, cluster
from distributed import Client


def cuda_devices() -> int:
    """Count the CUDA devices through the driver's own library: it needs no package and makes no context."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_configure(config: pytest.Config) -> None:
    # Dask says at this level that a shuffle begins and ends.
    logging.getLogger("distributed.shuffle._scheduler_plugin").setLevel(logging.ERROR)
    if os.environ.get("GPURT_REQUIRE_GPU") == "1" and not cuda_devices():
        raise pytest.UsageError("GPURT_REQUIRE_GPU=1 is set, but there is no CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not cuda_devices():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="session", params=["pandas", pytest.param("cudf", marks=pytest.mark.gpu)])
def library(request: pytest.FixtureRequest) -> Library:
    """Each of the two libraries in turn: the behaviour is the same."""
    return Library(request.param)


@pytest.fixture(scope="session")
def client(library: Library) -> Iterator[Client]:
    """A cluster of two processes with the runtime on, shared by all tests that leave it as it is."""
    with cluster(library.name) as client:
        yield client
