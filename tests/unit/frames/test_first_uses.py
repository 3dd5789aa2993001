"""Check that libraries for GPUs are used ahead where they are imported, and nowhere else."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from dask_gpurt.frames import first_uses
from dask_gpurt.frames.registry import LIBRARIES, FrameLibrary

EXPECTED_S = 30.0


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a library for GPUs, which this process has imported."""
    module: Any = ModuleType("toy")
    monkeypatch.setitem(LIBRARIES, "toy", FrameLibrary("cuda", "toy.backend", "Table"))
    monkeypatch.setitem(sys.modules, "toy", module)
    first_uses.begin.cache_clear()
    yield module
    first_uses.begin.cache_clear()


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "gpurt-first-uses":
            thread.join(EXPECTED_S)


def test_calls_are_made_once(toy: Any, caplog: pytest.LogCaptureFixture) -> None:
    made: list[pd.DataFrame] = []
    pd_frames: Any = type(
        "Frames", (pd.DataFrame,), {"hash_values": lambda self: None, "to_pandas": lambda self: self}
    )
    pd_frames._constructor = property(lambda self: pd_frames)
    toy.from_pandas = lambda frame: made.append(frame) or pd_frames(frame)
    toy.concat = pd.concat
    with caplog.at_level(logging.DEBUG, logger=first_uses.__name__):
        first_uses.begin()
        first_uses.begin()
        wait_for_threads()
    assert len(made) == 1
    assert not caplog.records  # each call is one that the library has


def test_a_library_that_cannot_be_used_is_left_to_the_first_query(
    toy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger=first_uses.__name__):
        first_uses.begin()
        wait_for_threads()
    assert "toy cannot be used here" in caplog.text


def test_pandas_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cudf", raising=False)
    first_uses.begin.cache_clear()
    first_uses.begin()
    assert not [each for each in threading.enumerate() if each.name == "gpurt-first-uses"]
