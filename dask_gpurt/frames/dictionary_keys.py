"""Aggregate groups by a dictionary of Arrow, without groups for words that no row has.

pandas makes a group of each word. Tasks of :mod:`dask_gpurt.client.corrections` call these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pyarrow as pa


def is_dictionary(rows: Any) -> bool:
    """Return whether the index of rows of pandas is a dictionary of Arrow."""
    dtype = rows.index.dtype if isinstance(rows, (pd.DataFrame, pd.Series)) else None
    return isinstance(dtype, pd.ArrowDtype) and pa.types.is_dictionary(dtype.pyarrow_dtype)


def aggregate_present(aggregate: Callable[..., Any], parts: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Aggregate parts of groups, whose dictionaries lose the words that are not there."""
    return aggregate(
        [_encoded_again(part) if is_dictionary(part) else part for part in parts], *args, **kwargs
    )


def _encoded_again(part: Any) -> Any:
    keys = part.index
    words = keys.astype(pd.ArrowDtype(keys.dtype.pyarrow_dtype.value_type))
    return part.set_axis(words.astype(keys.dtype), axis=0)
