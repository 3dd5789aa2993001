"""Fixtures of tests with clusters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster
from distributed.core import _expects_comm

from dask_gpurt.client.session import register_method
from dask_gpurt.scheduler import recovery


@pytest.fixture(autouse=True)
def _forget_handlers() -> Iterator[None]:
    """Let closed servers of this process be freed.

    Dask remembers each handler for ever, and by it the handler's server. With hundreds of them every garbage
    collection takes a second, and each of their loggers' handlers stores every message.
    """
    yield
    _expects_comm.cache_clear()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    """Yield a cluster of this process without the runtime, for the tests of a module."""
    register_method()  # a process that has once enabled the runtime keeps it registered
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(protocol="tcp", **options) as local:
        yield local


@pytest.fixture
def plain(local: LocalCluster) -> Iterator[Client]:
    """Yield a client of that cluster."""
    with Client(local) as client:
        yield client


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let outputs that are being assembled finish before a repair, however busy the machine is."""
    monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 60)
