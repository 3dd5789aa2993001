"""Fixtures of tests with clusters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed.core import _expects_comm

from dask_gpurt.scheduler import recovery


@pytest.fixture(autouse=True)
def _forget_handlers() -> Iterator[None]:
    """Let closed servers of this process be freed.

    Dask remembers each handler for ever, and by it the handler's server. With hundreds of them every garbage
    collection takes a second, and each of their loggers' handlers stores every message.
    """
    yield
    _expects_comm.cache_clear()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let outputs that are being assembled finish before a repair, however busy the machine is."""
    monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 60)
