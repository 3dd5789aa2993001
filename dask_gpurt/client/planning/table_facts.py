"""Answer what footers tell of the tables of a plan, and have tasks check what the plan relies on.

A plan may rely on facts about files: that a column has the same dtype in all of them, or that no key is in
two of them. The facts are of the files as they are when it is planned. Between that and the moment in which
a task reads a file, the file may be replaced. Dask reads the new one, which is right for its own plans, but
one that relies on facts may be wrong. So its tasks compare the file that they have read, as cheaply as
possible: if it is the same file, which the operating system tells in microseconds, nothing else is done.
Otherwise the facts have to be true of it as well; they are true of a copy on another host.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from dask_gpurt.client.planning import reads
from dask_gpurt.client.planning.footers import (
    Column,
    ColumnType,
    FileState,
    Footer,
    Range,
    Values,
    footer_of,
    state_of,
)
from dask_gpurt.client.planning.operations import Columns, is_of_pandas
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild

#: The most files of a table whose footers are read for the ranges of a column, each in about 0.3 ms.
MOST_FILES = 500
#: How the names of the types in Arrow begin of which no value is null for pandas or cudf.
_NEVER_NULL = ("int", "uint", "bool", "string", "large_string")


class FilesChangedError(RuntimeError):
    """A file has been replaced while a query was computed whose plan relies on its content."""


@dataclass(frozen=True)
class Assumption:
    """Hold what a plan relies on in each file of a table.

    ``columns``: the columns that are read.
    ``types``: their types; None for one that the files do not have.
    ``exact``: those that would have another dtype in pandas if there were nulls.
    ``full``: those that must have no nulls.
    ``keys``: the columns whose values must be in the range that they had in this file.
    """

    columns: tuple[Hashable, ...]
    types: tuple[ColumnType | None, ...]
    exact: tuple[Hashable, ...]
    full: tuple[Hashable, ...] = ()
    keys: tuple[Hashable, ...] = ()

    def is_true_of(self, footer: Footer, ranges: tuple[Range, ...]) -> bool:
        """Return whether a file is as it is assumed to be."""
        return (
            types_in(footer, self.columns) == self.types
            and all(map(footer.has_one_dtype, self.exact))
            and not any(map(footer.has_nulls, self.full))
            and all(map(_is_within, map(footer.range_of, self.keys), ranges))
        )


#: A file that a task reads: its path, its state, and the range of each key in it.
AssumedFile = tuple[str, FileState, tuple[Range, ...]]


def checked(rows: Any, assumed: Assumption, files: list[AssumedFile]) -> Any:
    """Return rows that have just been read, if what their plan assumes is true of their files.

    Raises FilesChangedError if it is not.
    """
    for path, state, ranges in files:
        try:
            if state_of(path) == state or assumed.is_true_of(footer_of(path), ranges):
                continue
        except OSError as error:
            raise FilesChangedError(_message(path)) from error
        raise FilesChangedError(_message(path))
    return rows


def _message(path: str) -> str:
    return (
        f"{path} has been changed while a query on it was computed, which was planned by what the file "
        "contained before. Compute the query again, and read the table again if its schema has changed."
    )


def types_in(footer: Footer, columns: tuple[Hashable, ...]) -> tuple[ColumnType | None, ...]:
    """Return the type of each column in a file; None for one that the file does not have."""
    return tuple(map(footer.type_of, columns))


def _is_within(found: Range | None, assumed: Range) -> bool:
    if not found or not assumed:
        return found == ()
    return assumed[0] <= found[0] and found[1] <= assumed[1]


@dataclass
class _Relied:
    """Hold on what of a table a plan relies: that columns have no nulls, and the ranges of keys."""

    read: Any
    without_nulls: bool = False
    keys: set[Hashable] = field(default_factory=set)


@dataclass
class TableFacts:
    """Tell facts about the tables of a plan, from one look at each file, and what the plan relies on.

    All methods raise ``OSError`` if a file cannot be read.
    """

    _footers: dict[str, Footer] = field(default_factory=dict)
    #: What is known of the columns of a read, by its name.
    _columns: dict[str, Columns | None] = field(default_factory=dict)
    #: What is relied on of a read, by its name.
    _relied: dict[str, _Relied] = field(default_factory=dict)
    #: The columns that must have no nulls, by the files of a table, whatever becomes of its read.
    _full: dict[tuple[str, ...], set[Hashable]] = field(default_factory=dict)

    def sample(self, read: Any) -> tuple[float, list[list[Column]]] | None:
        """Return the number of files that are read, and the needed columns of up to three of them.

        A file counts in part if only some of its partitions are read. None if a column is not known.
        """
        files = reads.files_of(read)
        sizes = []
        for at in sorted({0, len(files) // 2, len(files) - 1}) if files else ():
            columns = [self.footer(files[at]).sizes_of(name) for name in read.columns]
            if None in columns:
                return None
            sizes.append([each for column in columns for each in column or ()])
        return len(files) * reads.share_of_files(read), sizes

    def values(self, read: Any, column: Hashable) -> Values | None:
        """Estimate the values of a column of a read, from up to three of its files; None if unknown."""
        files = reads.files_of(read) if reads.is_local(read) else []
        chosen = {files[at] for at in (0, len(files) // 2, len(files) - 1)} if files else set()
        found = [self.footer(path).values_of(column) for path in sorted(chosen)]
        known = [each for each in found if each is not None]
        if not known or len(known) < len(found):
            return None
        rows = sum(each.rows for each in known) / len(known) * len(files) * reads.share_of_files(read)
        distinct = max(each.distinct for each in known)
        if distinct > 0.9 * max(each.rows for each in known):  # each value is there once
            distinct = rows
        ends = [(each.low, each.high) for each in known if each.low is not None and each.high is not None]
        if len(ends) < len(known):
            return Values(rows, min(rows, distinct), None, None, max(each.width for each in known))
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        distinct *= max(1.0, (high - low) / max(1.0, *(most - least for least, most in ends)))
        return Values(rows, min(rows, distinct), low, high, max(each.width for each in known))

    def columns(self, plan: Expr) -> dict[str, Columns] | None:
        """Return what is known of the columns of each local read in a plan; None if files are not alike.

        In pandas a column of integers or booleans has another dtype beside files with nulls: integers are
        floats then, of which some large ones are not exact. In cudf any column may have nulls. With pandas
        this reads all footers.
        """
        found: dict[str, Columns] = {}
        for read in reads.local_reads(plan):
            if (name := name_of(read)) not in self._columns:
                self._columns[name] = self._columns_of(read)
            if (known := self._columns[name]) is None:
                return None
            found[name] = known
        return found

    def are_alike(self, read: Any) -> bool:
        """Return whether columns have the same types in all files of a read. This reads all footers."""
        columns = reads.needed_columns(read)
        return len({types_in(self.footer(path), columns) for path in reads.files_of(read)}) <= 1

    def _columns_of(self, read: Any) -> Columns | None:
        if not is_of_pandas(read):
            return Columns(frozenset(), frozenset(read.columns))
        if not self.are_alike(read):
            return None
        footers = [self.footer(path) for path in reads.files_of(read)]
        exact = reads.exact_columns(read)
        varying = {name for name in exact if not all(each.has_one_dtype(name) for each in footers)}
        if varying - set(read.columns):  # of the index
            return None
        nulls = {name for name in read.columns if any(each.has_nulls(name) for each in footers)}
        return Columns(frozenset(varying), frozenset(read.columns) - nulls)

    def ranges(self, read: Any, column: Hashable) -> Iterator[tuple[int, int] | None]:
        """Yield the least and the largest value of a column of integers in each file of a read.

        Each footer is read as it is needed. None, as the last one, says that a range is not known, that a
        file has nulls or is not read as a whole, or that there are more than :data:`MOST_FILES`. Nothing is
        known in object storage, where footers take long to read.
        """
        files = (
            reads.files_of_partitions(read)
            if reads.is_integer(read, column) and reads.is_local(read)
            else None
        )
        if files is None or len(set(files)) != len(files) or len(files) > MOST_FILES:
            yield None
            return
        for path in files:
            found = self.footer(path).range_of(column)
            if found is None:
                yield None
                return
            if found:
                yield found

    def is_full(self, read: Any, column: Hashable) -> bool:
        """Return whether a column of values that are never null has no nulls; the plan then relies on it.

        Statistics do not count floats that are NaN, nor times that are NaT, which is the least of numbers.
        """
        if (files := tuple(reads.files_of(read))) in self._full and column in self._full[files]:
            return True
        if not reads.is_local(read) or not files or len(files) > MOST_FILES or not reads.tells_files(read):
            return False
        for path in files:
            footer = self.footer(path)
            kind, _ = footer.type_of(column) or ("", None)
            is_known = kind.startswith(_NEVER_NULL) or (
                kind.startswith("timestamp") and not any(map(pd.isna, footer.bounds_of(column) or (None,)))
            )
            if not is_known or footer.has_nulls(column):
                return False
        self._full.setdefault(files, set()).add(column)
        return True

    def rows_for_each(self, read: Any, columns: list[Hashable]) -> float:
        """Return the rows for each combination of integers in the ranges of columns; 0 if one is unknown."""
        files = reads.files_of(read)
        if not reads.is_local(read) or len(files) > MOST_FILES:
            return 0.0
        combinations = 1
        for column in columns:
            ranges = [self.footer(path).range_of(column) for path in files]
            known = [each for each in ranges if each]
            if None in ranges or not known:
                return 0.0
            combinations *= max(high for _, high in known) - min(low for low, _ in known) + 1
        return sum(self.footer(path).rows for path in files) / combinations

    def rely_on_dtypes(self, plan: Expr, *, without_nulls: bool) -> None:
        """Note that a plan relies on the dtypes of its tables of pandas that are the same in all files.

        ``without_nulls``: whether it also relies on columns of times and strings that have no nulls.
        """
        for read in reads.local_reads(plan):
            if is_of_pandas(read):
                self._relied_on(read).without_nulls |= without_nulls

    def rely_on_keys(self, read: Any, *keys: Hashable) -> None:
        """Note that the plan relies on the dtypes of a table, and on the ranges of keys in its files."""
        self._relied_on(read).keys.update(keys)

    def _relied_on(self, read: Any) -> _Relied:
        return self._relied.setdefault(name_of(read), _Relied(read))

    def checked(self, plan: Expr) -> Expr:
        """Return a plan whose tasks check what it relies on."""

        def change(expr: Expr) -> Expr:
            if (read := reads.read_of(expr)) is None or not reads.is_local(read):
                return expr
            relied, files = self._relied.get(name_of(read)), tuple(reads.files_of(read))
            full = tuple(sorted(self._full.get(files, ()), key=str))
            return self._checked(expr, read, relied, full) if relied or full else expr

        return rebuild(plan, change) if self._relied or self._full else plan

    def _checked(
        self, expr: Expr, read: Any, relied: _Relied | None, never_null: tuple[Hashable, ...]
    ) -> Expr:
        keys = tuple(sorted(relied.keys, key=str)) if relied else ()
        columns, files = reads.needed_columns(read) if relied else (), reads.files_of(read)
        footers = {path: self.footer(path) for path in files}
        types = types_in(footers[files[0]], columns) if files else ()
        exact = [
            name
            for name in reads.exact_columns(read)
            if relied and all(each.has_one_dtype(name) for each in footers.values())
        ]
        full = [name for name in columns if not any(each.has_nulls(name) for each in footers.values())]
        without_nulls = tuple(full) if relied and relied.without_nulls else ()
        assumed = Assumption(columns, types, tuple(exact), without_nulls + never_null, keys)
        known = {
            path: (path, footer.state, tuple(footer.range_of(key) or () for key in keys))
            for path, footer in footers.items()
        }
        return reads.CheckedRead(expr, checked, assumed, known)  # type: ignore[no-untyped-call]

    def footer(self, path: str) -> Footer:
        """Return the footer of a file, as it was when it was first asked for."""
        if path not in self._footers:
            self._footers[path] = footer_of(path)
        return self._footers[path]
