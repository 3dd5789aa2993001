"""Operate on columns of pandas: the reference for programs, which the runtime itself never runs on pandas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from dask_gpurt.frames.programs.values import Domain, Refused, Rows, Values


class PandasColumns:
    """Operate on series of numbered rows; see :class:`~dask_gpurt.frames.programs.values.Engine`."""

    def opened(self, value: Any) -> Rows | Values | None:
        if type(value) is pd.DataFrame and value.columns.is_unique and len(value.columns):
            if value.attrs or not all(type(label) is str for label in value.columns):
                return None
            if value.columns.name is not None or value.columns.dtype != pd.Index(["a"]).dtype:
                return None
            columns = {label: numbered(value[label]) for label in value.columns}
            return Rows(columns, Domain(len(value), value.index), value)
        if type(value) is pd.Series and not value.attrs:
            return Values(value.name, numbered(value), Domain(len(value), value.index), value)
        return None

    def closed(self, value: Rows | Values) -> Any:
        index = self._index(value.domain)
        if isinstance(value, Values):
            return value.column.set_axis(index).rename(value.name)
        columns = [column.set_axis(index) for column in value.columns.values()]
        return pd.concat(columns, axis=1, keys=list(value.columns))

    def _index(self, domain: Domain) -> Any:
        if domain.index is None:
            assert domain.parent is not None
            domain.index = self._index(domain.parent)[domain.mask.to_numpy(dtype=bool)]
        return domain.index

    def difference(self, found: Any, expected: Any, *, in_order: bool) -> str | None:
        return None if found.equals(expected) else "other values"

    def is_same(self, left: Domain, right: Domain) -> bool:
        both = left.index is not None and right.index is not None
        return left is right or (both and left.index is right.index)

    def range(self, length: int) -> Domain:
        return Domain(length, pd.RangeIndex(length))

    def keyed(self, keys: Sequence[Any], names: Sequence[Any], length: int) -> Domain:
        arrays = [key.rename(name) for key, name in zip(keys, names, strict=True)]
        return Domain(length, pd.Index(arrays[0]) if len(arrays) == 1 else pd.MultiIndex.from_arrays(arrays))

    def levels(self, domain: Domain) -> dict[str, Any]:
        index = self._index(domain)
        if not all(type(name) is str for name in index.names):
            raise Refused("names")
        return {name: numbered(index.get_level_values(at).to_series()) for at, name in enumerate(index.names)}

    def mean(self, total: Any, count: Any) -> Any:
        return total / count

    def is_boolean(self, column: Any) -> bool:
        return bool(column.dtype == bool)

    def can_filter(self, domain: Domain) -> bool:
        return True

    def kept(self, columns: Sequence[Any], mask: Any) -> tuple[list[Any], int]:
        return [column[mask].reset_index(drop=True) for column in columns], int(mask.sum())

    def binary(self, name: str, left: Any, right: Any) -> Any:
        return getattr(operator, name)(left, right)

    def inverted(self, column: Any) -> Any:
        return ~column

    def constant(self, value: Any, length: int) -> Any:
        return pd.DataFrame(index=pd.RangeIndex(length)).assign(x=value)["x"]

    def by_rows(self, call: Callable[..., Any], values: Sequence[Values]) -> tuple[Any, Any]:
        result = call(*(each.column.rename(each.name) for each in values))
        if type(result) is not pd.Series or not result.index.equals(values[0].column.index):
            raise Refused("other rows")
        return result.name, numbered(result)

    def is_named(self, domain: Domain) -> bool:
        return any(name is not None for name in self._index(domain).names)

    def joined(
        self, how: str, keys: tuple[list[Any], list[Any]], columns: tuple[list[Any], list[Any]]
    ) -> tuple[list[Any], int]:
        if any(each.dtype == "category" for side in (*keys, *columns) for each in side):
            raise Refused("categories")
        if any(left.dtype != right.dtype for left, right in zip(*keys, strict=True)):
            raise Refused("keys")
        sides = [
            pd.concat([*of, *by], axis=1, keys=[*(f"{side}{at}" for at in range(len(of))), *names])
            for side, of, by in zip("lr", columns, keys, strict=True)
            if (names := [f"k{at}" for at in range(len(by))])
        ]
        if how == "leftsemi":
            sides[1] = sides[1].drop_duplicates()
        joined = sides[0].merge(sides[1], on=names_of(keys[0]), how="left" if how == "left" else "inner")
        if not len(joined):
            raise Refused("no rows")
        labels = [f"l{at}" for at in range(len(columns[0]))] + [f"r{at}" for at in range(len(columns[1]))]
        return [joined[label] for label in labels], len(joined)

    def grouped(
        self, keys: Sequence[Any], requests: Mapping[Any, tuple[Any, Collection[str]]], *, dropna: bool
    ) -> tuple[list[Any], dict[tuple[Any, str], Any], int]:
        names = names_of(keys)
        if any(each.dtype == "category" for each in (*keys, *(column for column, _ in requests.values()))):
            raise Refused("categories")
        frame = pd.concat([*keys, *(column for column, _ in requests.values())], axis=1)
        labels = list(requests)
        frame.columns = pd.Index([*names, *(f"v{at}" for at in range(len(labels)))])
        groups = frame.groupby(names, dropna=dropna)
        found = {
            (label, each): getattr(groups[f"v{at}"], each)()
            for at, label in enumerate(labels)
            for each in requests[label][1]
        }
        index = next(iter(found.values())).index
        if not len(index):
            raise Refused("no groups")
        levels = [numbered(index.get_level_values(at).to_series()) for at in range(index.nlevels)]
        return levels, {place: numbered(series) for place, series in found.items()}, len(index)


def names_of(keys: list[Any]) -> list[str]:
    return [f"k{at}" for at in range(len(keys))]


def numbered(series: Any) -> Any:
    """Return the values of a series with numbered rows."""
    return series.set_axis(pd.RangeIndex(len(series)))
