"""Switch the runtime off while its messages are in flight: Dask logs no errors, and closes no worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dask_gpurt
from dask_gpurt import api
from tests.helpers.in_process import on_plain_cluster


@contextmanager
def without_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.clear()
    yield
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_another_client_has_switched_it_off_already(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was on when this client asked."""

    async def was_on(client: Any) -> bool:
        return True

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        with without_warnings(caplog), monkeypatch.context() as patch:
            patch.setattr(api, "_is_on", was_on)
            await dask_gpurt.disable(client)
