from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client

from tests.helpers import caps
from tests.helpers.clusters import Library, cluster
from tests.helpers.gpus import cuda_devices


def _without_lock(self: Any, instance: Any, owner: Any = None) -> Any:
    if instance is None:
        return self
    if self.attrname not in instance.__dict__:
        instance.__dict__[self.attrname] = self.func(instance)
    return instance.__dict__[self.attrname]


if sys.version_info < (3, 12):
    # Its cached_property holds one lock for all instances while it computes. Here a client and its
    # scheduler are one process, and the client's waits for the scheduler: Python 3.12 has no such lock.
    functools.cached_property.__get__ = _without_lock  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    # Dask says at this level that a shuffle begins and ends.
    logging.getLogger("distributed.shuffle._scheduler_plugin").setLevel(logging.ERROR)
    if os.environ.get("GPURT_REQUIRE_GPU") == "1" and not cuda_devices():
        raise pytest.UsageError("GPURT_REQUIRE_GPU=1 is set, but there is no CUDA device")
    caps.confine()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in caps.summary():
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not cuda_devices():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="session", params=["pandas", pytest.param("cudf", marks=pytest.mark.gpu)])
def library(request: pytest.FixtureRequest) -> Library:
    """Each of the two libraries in turn: the behaviour is the same."""
    return Library(request.param)


@pytest.fixture(scope="module")
def client(library: Library) -> Iterator[Client]:
    """A cluster of two processes with the runtime on, shared by tests of a module that leave it as it is."""
    with cluster(library.name) as client:
        yield client
