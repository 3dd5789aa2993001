"""Define the values of programs: columns of one domain, as a frame or a series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Refused(Exception):
    """An operation is left to the library, whose rules for these operands are not known here."""


@dataclass(eq=False, slots=True)
class Domain:
    """Identify the rows of columns.

    ``length``: the number of rows.
    ``index``: the library's index; None until it is made, from that of `parent` and the rows that `mask`
    keeps.
    """

    length: int
    index: Any = None
    parent: Domain | None = None
    mask: Any = None


@dataclass(eq=False, slots=True)
class Rows:
    """Hold a frame: columns by label, in order. `made` is the library's frame, once it has been made."""

    columns: dict[str, Any]
    domain: Domain
    made: Any = None


@dataclass(eq=False, slots=True)
class Values:
    """Hold a series. `made` is the library's series, once it has been made."""

    name: Any
    column: Any
    domain: Domain
    made: Any = None


class Engine(Protocol):
    """Operate on the columns of one library. Methods raise :class:`Refused` if they do not know the rules."""

    def opened(self, value: Any) -> Rows | Values | None:
        """Return a frame or series of the library as columns; None for anything else, and odd ones."""

    def closed(self, value: Rows | Values) -> Any:
        """Return columns as a frame or series of the library."""

    def difference(self, found: Any, expected: Any, *, in_order: bool) -> str | None:
        """Return how a frame or series of the library differs from another one; None if it does not.

        Sums may differ in their last digits, and rows in their order unless `in_order`.
        """

    def is_same(self, left: Domain, right: Domain) -> bool:
        """Return whether two domains have the same rows, in the same order."""

    def range(self, length: int) -> Domain:
        """Return a new domain of numbered rows."""

    def keyed(self, keys: Sequence[Any], names: Sequence[Any], length: int) -> Domain:
        """Return a new domain whose index is of columns."""

    def levels(self, domain: Domain) -> dict[str, Any]:
        """Return the columns of an index by name."""

    def mean(self, total: Any, count: Any) -> Any:
        """Return the quotient of the sums of groups and the numbers of their values."""

    def is_boolean(self, column: Any) -> bool:
        """Return whether a column can be a mask."""

    def binary(self, name: str, left: Any, right: Any) -> Any:
        """Return the column of a binary operation, of which at most one operand is a scalar."""

    def inverted(self, column: Any) -> Any:
        """Return the column of ``~``."""

    def constant(self, value: Any, length: int) -> Any:
        """Return a column of equal values."""

    def can_filter(self, domain: Domain) -> bool:
        """Return whether the index of a domain can be made from that of its parent."""

    def is_named(self, domain: Domain) -> bool:
        """Return whether the index of a domain, or of one that it is part of, has a name."""

    def kept(self, columns: Sequence[Any], mask: Any) -> tuple[list[Any], int]:
        """Return the rows of columns for which a mask is true, and their number."""

    def by_rows(self, call: Callable[..., Any], values: Sequence[Values]) -> tuple[Any, Any]:
        """Call a function with series of numbered rows; return the name and the column of its result."""

    def joined(
        self, how: str, keys: tuple[list[Any], list[Any]], columns: tuple[list[Any], list[Any]]
    ) -> tuple[list[Any], int]:
        """Return the columns of an inner, left or semi join of a left and a right side, and its length."""

    def grouped(
        self, keys: Sequence[Any], requests: Mapping[Any, tuple[Any, Collection[str]]], *, dropna: bool
    ) -> tuple[list[Any], dict[tuple[Any, str], Any], int]:
        """Return the keys of groups, the aggregations of each column, and the number of groups.

        `requests` are the columns by label, each with the aggregations that are wanted of it.
        """
