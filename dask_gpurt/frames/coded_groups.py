"""Group the rows of a pandas frame by numbers that stand for their keys.

pandas numbers the values of each key by a table of hashes, and with several keys their combinations by one
more. Where numbers are known, since a column is a dictionary of words or integers lie close together, an
array that is indexed by them takes the place of the table. pandas then aggregates rows by the number of their
group: values and dtypes are the same to the last bit, and so is the order of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

#: Numbers are looked up in an array of at most so many entries for each row, or so many in all.
ENTRIES_OF_A_ROW, FEW_ENTRIES = 2, 1 << 12
#: Combinations of keys have numbers up to this one.
MOST_COMBINATIONS = 2**62


class Coded(NamedTuple):
    """Hold a key of rows as numbers: the positions of their keys in an index, -1 for none."""

    numbers: np.ndarray
    words: pd.Index


def grouped_by_codes(
    frame: pd.DataFrame, *by: Any, aggregate: Callable[..., Any], order: bool, **how: Any
) -> Any:
    """Aggregate the groups of a frame as ``aggregate(frame, *by, **how)`` does.

    ``by``: the columns of keys. Strings may be categories, in any order.
    ``aggregate``: passes what it is given on to ``groupby``, and calls aggregations of pandas.
    ``order``: whether groups are in the order of their keys, not in that of their first rows.
    """
    keys = [_coded(frame[name], order) for name in by] if len(frame) else []
    known = [key for key in keys if key is not None]
    combinations = int(np.prod([len(key.words) for key in known], dtype=object))
    if len(known) < len(by) or combinations > MOST_COMBINATIONS:
        return aggregate(_with_words(frame, by), *by, **how)
    numbers, groups = _numbered(_combined(known), combinations, order)
    rows = pd.Categorical.from_codes(numbers, pd.RangeIndex(len(groups)))
    # All categories are there, in order: pandas looks for neither.
    how |= {"observed": False, **({"sort": True} if "sort" in how else {})}
    values = frame[[name for name in frame.columns if name not in by]]
    found = aggregate(values, rows, **how)
    found.index = _index_of(groups, known, by)
    return found


def _coded(column: pd.Series, order: bool) -> Coded | None:
    """Return a key as numbers, which ascend as the keys do if groups are ordered; None if it is unknown."""
    dtype, words = column.dtype, None
    if isinstance(dtype, pd.CategoricalDtype):
        numbers, words = column.cat.codes.to_numpy(), dtype.categories
    elif isinstance(dtype, np.dtype) and dtype.kind == "i":
        values = column.to_numpy()
        low, high = int(values.min()), int(values.max())
        if high - low < _most_entries(len(values)):
            return Coded(values.astype("int64") - low, pd.Index(np.arange(low, high + 1, dtype=dtype)))
    elif not isinstance(dtype, pd.StringDtype):
        return None
    if words is None:
        numbers, words = pd.factorize(column)
    if not order:
        return Coded(numbers, pd.Index(words))
    at = words.argsort()
    places = np.full(len(words) + 1, -1)  # the last one is that of rows without a key
    places[at] = np.arange(len(words))
    return Coded(places[numbers], pd.Index(words).take(at))


def _combined(keys: Sequence[Coded]) -> np.ndarray:
    """Return a number for the keys of each row, -1 if one is missing."""
    if len(keys) == 1:
        return keys[0].numbers
    numbers = keys[0].numbers.astype("int64")
    missing = numbers < 0
    for key in keys[1:]:
        numbers *= len(key.words)
        numbers += key.numbers
        missing |= key.numbers < 0
    numbers[missing] = -1
    return numbers


def _numbered(numbers: np.ndarray, count: int, order: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the group of each row, -1 for none, and the number that each group had before.

    ``numbers``: the keys of each row as a number below `count`, -1 if they are missing.
    """
    rows = len(numbers)
    if count > _most_entries(rows):
        there = numbers >= 0
        found = np.full(rows, -1)
        found[there], groups = pd.factorize(numbers[there], sort=order)
        return found, groups
    first = np.full(count + 1, rows)  # the last one is that of rows without a key
    first[numbers[::-1]] = np.arange(rows)[::-1]  # of several the last one stays, which is the first row
    groups = np.flatnonzero(first[:-1] < rows)
    if not order:
        groups = groups[np.argsort(first[groups])]
    places = np.full(count + 1, -1)
    places[groups] = np.arange(len(groups))
    return places[numbers], groups


def _most_entries(rows: int) -> int:
    return max(ENTRIES_OF_A_ROW * rows, FEW_ENTRIES)


def _index_of(groups: np.ndarray, keys: Sequence[Coded], names: Sequence[Any]) -> pd.Index:
    """Return the keys of groups as the index of a result."""
    if len(keys) == 1:
        return keys[0].words.take(groups).rename(names[0])
    codes: list[Any] = []
    for key in reversed(keys):
        groups, each = np.divmod(groups, len(key.words))
        codes.append(each)
    levels: list[Any] = [key.words for key in keys]
    return pd.MultiIndex(levels, codes[::-1], names=list(names), verify_integrity=False)


def _with_words(frame: pd.DataFrame, by: Sequence[Any]) -> pd.DataFrame:
    """Return a frame whose keys have the dtypes that they have if read one by one."""
    dtypes = {name: frame.dtypes[name] for name in by}
    return frame.astype(
        {
            name: dtype.categories.dtype
            for name, dtype in dtypes.items()
            if isinstance(dtype, pd.CategoricalDtype)
        }
    )
