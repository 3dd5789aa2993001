"""Describe a shuffle: what an output looks like is known before the first row."""

from __future__ import annotations

import pickle
from typing import Any

import pandas as pd
import pytest
from distributed.shuffle._core import ShuffleId
from distributed.shuffle._shuffle import DataFrameShuffleSpec

from dask_gpurt.frames import column_names
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
