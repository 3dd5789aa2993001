"""Check that libraries for GPUs are used and asked ahead where they are imported, and nowhere else."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest

from dask_gpurt.frames import first_uses
from dask_gpurt.frames.registry import LIBRARIES, FrameLibrary
from tests.helpers.planned import Planner

EXPECTED_S = 30.0


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Register a library for GPUs, whose frames are those of pandas, and which this process has imported."""
    module: Any = ModuleType("toy")
    module.from_pandas = with_text_of_files
    monkeypatch.setitem(LIBRARIES, "toy", FrameLibrary("cuda", "toy.backend", "Table"))
    monkeypatch.setitem(sys.modules, "toy", module)
    first_uses.begin.cache_clear()
    yield module
    wait_for_threads()
    first_uses.begin.cache_clear()


def with_text_of_files(frame: pd.DataFrame) -> pd.DataFrame:
    """Give text the dtype that it has in files that are read."""
    return frame.astype({label: "string[pyarrow]" for label in frame if frame[label].dtype == "str"})


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name in ("gpurt-ask-ahead", "gpurt-first-uses"):
            thread.join(EXPECTED_S)


def program(folder: Path) -> Any:
    sales = pd.DataFrame({"shop": [1, 2], "price": [0.5, 1.5], "off": [0.1, 0.0]})
    sales.to_parquet(folder / "sales.parquet")
    pd.DataFrame({"id": [1, 2], "town": ["a", "b"]}).to_parquet(folder / "shops.parquet")
    sold, shops = (dd.read_parquet(folder / f"{name}.parquet") for name in ("sales", "shops"))
    rows = sold[sold.price > 0.7].merge(shops, left_on="shop", right_on="id")
    rows = rows.assign(value=rows.price * (1 - rows.off))
    return rows[["town", "value"]].groupby("town").agg({"value": "sum"}).reset_index()


def test_a_program_asks_nothing_that_was_asked_ahead(planner: Planner, toy: Any, tmp_path: Path) -> None:
    planner.cache.ask_ahead()
    wait_for_threads()
    asked = planner.count("metadata.computed")
    assert asked > 0
    assert program(tmp_path).columns.to_list() == ["town", "value"]
    assert planner.count("metadata.computed") == asked


def test_nothing_is_asked_of_libraries_on_the_host(planner: Planner) -> None:
    planner.cache.ask_ahead()
    assert "gpurt-ask-ahead" not in [thread.name for thread in threading.enumerate()]


def test_nothing_is_asked_where_the_runtime_does_not_plan(planner: Planner, toy: Any) -> None:
    planner.usable = False
    planner.cache.ask_ahead()
    wait_for_threads()
    assert planner.count("metadata.computed") == 0


def test_a_library_that_cannot_be_asked_is_left_to_the_first_query(
    planner: Planner, toy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del toy.from_pandas
    with caplog.at_level(logging.DEBUG, logger=first_uses.__name__):
        planner.cache.ask_ahead()
        wait_for_threads()
    assert "toy cannot be used here" in caplog.text


# ---- first uses -------------------------------------------------------------------------------------


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
    del toy.from_pandas
    with caplog.at_level(logging.DEBUG, logger=first_uses.__name__):
        first_uses.begin()
        wait_for_threads()
    assert "toy cannot be used here" in caplog.text


def test_pandas_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cudf", raising=False)
    first_uses.begin.cache_clear()
    first_uses.begin()
    assert not [each for each in threading.enumerate() if each.name == "gpurt-first-uses"]
