"""Fixtures of tests with clusters."""

from __future__ import annotations

import pytest

from dask_gpurt.plugins.scheduler import recovery


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let outputs that are being assembled finish before a repair, however busy the machine is."""
    monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 60)
