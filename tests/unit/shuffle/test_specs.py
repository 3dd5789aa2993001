"""Describe a shuffle: what an output looks like is known before the first row."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from distributed.shuffle._core import ShuffleId
from distributed.shuffle._shuffle import DataFrameShuffleSpec

from dask_gpurt.device.host import HostDevice
from dask_gpurt.frames import Hashed, column_names
from dask_gpurt.frames.pandas import PandasTable
from dask_gpurt.shuffle import ShuffleSpec
from tests.helpers.clusters import Library

TARGET = "_partitions"


def described(meta: Any, *, drop_column: bool = True) -> DataFrameShuffleSpec:
    return DataFrameShuffleSpec(
        id=ShuffleId("shuffle"),
        disk=True,
        npartitions=2,
        column=TARGET,
        meta=meta,
        parts_out=2,
        drop_column=drop_column,
    )


def output(spec: ShuffleSpec) -> Any:
    """Return the empty output as pandas."""
    found = pickle.loads(spec.meta)
    return found if isinstance(found, pd.DataFrame) else found.to_pandas()


def test_an_output_has_all_columns_but_that_of_the_targets(library: Library) -> None:
    frame = pd.DataFrame({"name": ["a"], TARGET: [0], "value": [0.5]}, index=pd.Index([7], name="id"))
    meta = library.frame(frame)
    spec = ShuffleSpec.of(described(meta))
    assert spec.columns == column_names(meta) == ("name", TARGET, "value")
    pd.testing.assert_frame_equal(output(spec), frame[["name", "value"]][:0])
    kept = ShuffleSpec.of(described(meta, drop_column=False), ignore_index=True)
    pd.testing.assert_frame_equal(output(kept), frame[:0].reset_index(drop=True))


@pytest.mark.parametrize("labels", [["a", "a", TARGET], [0, 0.5, TARGET], [("a", "b"), None, TARGET]])
def test_labels_may_be_anything_and_be_equal(labels: list[Any]) -> None:
    frame = pd.DataFrame([[1, 2, 0]])
    frame.columns = pd.Index(labels, dtype="object", tupleize_cols=False, name="labels")
    spec = ShuffleSpec.of(described(frame))
    assert spec.columns == tuple(labels)
    pd.testing.assert_frame_equal(output(spec), frame.drop(columns=TARGET)[:0])


# ---- partitions without rows, and outputs without rows ------------------------------------------------

TABLES: Any = SimpleNamespace(table=lambda frame: PandasTable(HostDevice(1 << 20)))
META = pd.DataFrame({"k": pd.Series(dtype="int64"), TARGET: pd.Series(dtype="int64")})


def test_an_input_without_rows_may_have_any_columns() -> None:
    """Some functions return other columns for no rows, as in the chunks of ``groupby().value_counts()``."""
    spec, other = ShuffleSpec.of(described(META)), pd.DataFrame({"index": [1.5]})
    hashed = Hashed(other[:0], ("k",), other[:0], META[["k"]], lambda rows: rows[["k"]])
    for data in (other[:0], hashed):
        found = spec.input(data, 0, TABLES)
        assert found.split([[0], [1]]) == [None, None]
        assert found.empty() is None
    with pytest.raises(ValueError, match=r"missing .*'k'.*, unexpected \['index'\]"):
        spec.input(other, 0, TABLES)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float64", "Int64", "str", object, "category"])
@pytest.mark.parametrize("ignore_index", [True, False])
def test_an_output_without_rows_has_the_dtypes_of_the_first_input(dtype: Any, ignore_index: bool) -> None:
    """As with ``tasks``; that of the collection may be a guess of the user's."""
    spec = ShuffleSpec.of(described(META), ignore_index=ignore_index)
    rows = pd.DataFrame({"k": pd.Series([1, 2]).astype(dtype)}).set_index(pd.Index([7.5, 8], name="label"))
    empty = spec.input(rows.assign(**{TARGET: 0}), 0, TABLES).empty()
    found, _ = spec.assembler(TABLES).assemble([], empty)
    expected = rows[:0].reset_index(drop=True) if ignore_index else rows[:0]
    pd.testing.assert_frame_equal(found, expected)
    assert (empty is None) == (dtype == "int64" and ignore_index), "what the spec tells is not sent"


def test_an_output_without_rows_has_all_columns_though_the_first_input_lacks_one() -> None:
    spec = ShuffleSpec.of(described(META.assign(v=0.5)), any_columns=True)
    lacking = pd.DataFrame({"k": ["text"], TARGET: [0]})
    assert spec.input(lacking, 0, TABLES).empty() is None
