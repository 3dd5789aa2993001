"""Take empty frames of cudf apart, put them together again, and copy them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from dask_gpurt.client.planning.catalogue.schema import frame_of, schema_of
from dask_gpurt.client.planning.keys import text_of_frame
from dask_gpurt.frames.empty import copied

pytestmark = pytest.mark.gpu

cudf = pytest.importorskip("cudf", reason="cudf is not installed")


def frames() -> list[Any]:
    """Return empty frames and series that differ in labels, dtypes or index."""
    frame = cudf.DataFrame({"a": [1], "b": ["x"], "c": [0.5]}).head(0)
    named = frame.copy()
    named.columns = pd.Index(["a", "b", "c"], name="of")
    by_two = frame.groupby(["a", "b"]).agg({"c": ["sum", "max"]})
    return [frame, frame[["b"]], frame["b"], named, frame.set_index("a"), frame.set_index(["a", "b"]), by_two]


@pytest.mark.parametrize("number", range(7))
def test_a_copy_is_equal_and_of_its_own(number: int) -> None:
    frame = frames()[number]
    copy = copied(frame)
    assert type(copy) is type(frame)
    assert copy.to_pandas().equals(frame.to_pandas())
    assert schema_of(copy) == schema_of(frame) == schema_of(frame_of(schema_of(frame)))  # type: ignore[arg-type]
    copy.index.names = [f"new{level}" for level in range(copy.index.nlevels)]
    if copy.ndim == 2:
        copy.columns = [f"new{label}" for label in range(len(copy.columns))]
    else:
        copy.name = "new"
    assert schema_of(frame) == schema_of(frames()[number])


def test_each_frame_is_described_by_what_differs() -> None:
    texts = [*map(text_of_frame, frames())]
    known = [text for text in texts if text is not None]  # Dask names the others
    assert known[:4] == texts[:4]
    assert len({*known}) == len(known)
    assert texts == [*map(text_of_frame, frames())]
