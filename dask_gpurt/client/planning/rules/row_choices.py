"""Make filters of ``loc`` with a condition and of ``query``, which Dask takes for functions of whole frames.

Dask moves filters below joins and reads no column that is only carried along, but it does neither for
``frame.loc[condition]`` and ``frame.query("...")``: a table is read with all of its columns for them. Here
they become the filter that they are. A query is parsed as pandas does; what it says has to be comparisons of
columns with each other, with numbers, strings and variables (``local_dict``), put together by ``and``, ``or``
and ``not``.

What it does not reason about
    Queries with functions, attributes, arithmetic on anything but float64, the index, or operands that
    are no columns: these stay as they are. Conditions of ``loc`` on other rows, which are aligned. On cudf,
    anything but comparisons put together by ``and``: it leaves out rows in which any column is null.
Why the result is the same
    ``loc`` with a condition of booleans and ``query`` choose rows as ``frame[condition]`` does; pandas
    computes a query by the operators that the filter has. ``tests/unit/client/planning/test_filters.py``
    compares them on random conditions.
The figure
    See :mod:`.filters`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Hashable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._indexing import Loc

from dask_gpurt.client.planning.operations import is_of_pandas
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.needed_columns import is_condition
from dask_gpurt.dask_hooks.planning import Expr, collection_of, name_of, rebuild

_COMPARISONS: dict[type[ast.cmpop], Any] = {
    ast.Lt: _expr.LT,
    ast.LtE: _expr.LE,
    ast.Gt: _expr.GT,
    ast.GtE: _expr.GE,
    ast.Eq: _expr.EQ,
    ast.NotEq: _expr.NE,
}
_ARITHMETIC: dict[type[ast.operator], Any] = {ast.Add: _expr.Add, ast.Sub: _expr.Sub, ast.Mult: _expr.Mul}
_FLIPPED: dict[type, type] = {
    **{_expr.LT: _expr.GT, _expr.LE: _expr.GE, _expr.GT: _expr.LT, _expr.GE: _expr.LE},
}
#: What variables may hold, and how their names begin in the translation.
_CONSTANTS = (int, float, str, pd.Timestamp)
_VARIABLE = "__variable_"
#: pandas reads these in a query as words, which bind less tightly.
_WORDS = {"&": "and", "|": "or"}


class RowChoices:
    """Make filters of ``loc`` with a condition and of ``query``."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan in which rows are chosen by filters."""

        def change(expr: Any) -> Any:
            if type(expr) is Loc and is_condition(expr.iindexer) and expr.cindexer is None:
                facts.note(self, name_of(expr), "chooses rows by a condition: it is a filter", done=True)
                return _expr.Filter(expr.frame, expr.iindexer)
            if type(expr) is not _expr.Query:
                return expr
            try:
                condition = condition_of(expr)
            except _UnknownError as error:
                facts.note(self, name_of(expr), f"is left to the library of its frames: {error}")
                return expr
            facts.note(self, name_of(expr), "is a query on columns: it is a filter", done=True)
            return _expr.Filter(expr.frame, condition)

        return rebuild(plan, change)


class _UnknownError(Exception):
    """The query says something that is not translated."""


def condition_of(query: Any) -> Any:
    """Return the condition that a query states, as an expression on its frame.

    Raises _UnknownError if it may be another one for the library of the frame.
    """
    frame = query.frame
    if query.expr_kwargs.keys() - {"local_dict"} or not isinstance(text := query.operands[1], str):
        raise _UnknownError("it has options")
    is_of_cudf = type(frame._meta).__module__.startswith("cudf.")
    kind = _Translation if is_of_pandas(frame) else _TranslationForCudf if is_of_cudf else None
    if kind is None or frame.ndim != 2 or not frame._meta.columns.is_unique:
        raise _UnknownError("its frame is not one of pandas or cudf with unique columns")
    try:
        tree = ast.parse(_with_words(text.strip()), mode="eval").body
    except (SyntaxError, tokenize.TokenError) as error:
        raise _UnknownError("its syntax is not that of Python") from error
    return kind(frame, query.expr_kwargs.get("local_dict") or {}).condition(tree)


def _with_words(text: str) -> str:
    """Return a query as an expression of Python: ``&`` and ``|`` are words, and ``@`` is part of a name."""
    words: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if words and words[-1][1] == "@" and token.type == tokenize.NAME:
            words[-1] = (token.type, _VARIABLE + token.string)
        elif token.string in _WORDS:
            words.append((tokenize.NAME, _WORDS[token.string]))
        else:
            words.append((token.type, token.string))
    return tokenize.untokenize(words)


class _Translation:
    """Translate the syntax tree of a query on a frame."""

    def __init__(self, frame: Any, variables: Mapping[str, Any]):
        self._frame = frame
        self._variables = {_VARIABLE + name: value for name, value in variables.items()}
        self._labels = {*frame._meta.index.names} | {"index", "columns"}

    def condition(self, tree: ast.expr, *, negated: bool = False) -> Any:
        """Return an expression of booleans.

        ``negated``: whether rows are chosen for which it is false: then null is not the same.
        """
        match tree:
            case ast.BoolOp(op=op, values=values):
                parts = [self.condition(each, negated=negated) for each in values]
                return reduce(_expr.And if isinstance(op, ast.And) else _expr.Or, parts)
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
                return _expr.Invert(self.condition(operand, negated=True))
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[values]):
                found = self._occurrence(left, values)
                return found if isinstance(op, ast.In) else _expr.Invert(found)
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = zip(ops, pairwise([left, *others]), strict=True)
                return reduce(_expr.And, [self._comparison(op, *pair, negated) for op, pair in pairs])
            case ast.Name(id=name) if is_condition(column := self._column(name)):
                return column
        raise _UnknownError(f"{ast.unparse(tree)!r} is no comparison of columns")

    def _comparison(self, op: ast.cmpop, left: ast.expr, right: ast.expr, negated: bool) -> Any:
        one, other, kind = self._value(left), self._value(right), _COMPARISONS.get(type(op))
        if kind is not None and isinstance(one, (int, float, pd.Timestamp)):
            one, other, kind = other, one, _FLIPPED.get(kind, kind)
        if kind is None or not isinstance(one, Expr):
            raise _UnknownError(f"it has {ast.unparse(left)!r} on the left of {type(op).__name__}")
        if isinstance(other, Expr):
            return kind(one, _alike(one, other))
        constant = _constant(one, other, kind)
        found = kind(one, constant)
        if not isinstance(constant, str) or kind not in (_expr.EQ, _expr.NE):
            return found
        # pandas looks up strings as `isin` does: null is not equal to any, and not null.
        if kind is _expr.NE:
            return _expr.Or(_expr.IsNa(one), found)
        return _expr.And(_expr.NotNull(one), found) if negated else found

    def _occurrence(self, left: ast.expr, values: ast.expr) -> Any:
        column, found = self._value(left), self._variables.get(ast.unparse(values))
        if isinstance(values, (ast.List, ast.Tuple)):
            found = [self._value(each) for each in values.elts]
        elif not isinstance(found, (list, tuple, set, frozenset)):
            raise _UnknownError(f"{ast.unparse(values)!r} is no list of constants")
        if not isinstance(column, Expr):
            raise _UnknownError(f"{ast.unparse(left)!r} is no column")
        constants = [_constant(column, each, _expr.LT) for each in found]
        if any(isinstance(each, pd.Timestamp) for each in constants):
            raise _UnknownError("it looks up times among strings")
        return collection_of(column).isin(constants).expr

    def _value(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(value=int() | float() | str() as value) if not isinstance(value, bool):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Name(id=name):
                found = self._variables.get(name)
                is_constant = isinstance(found, _CONSTANTS) and not isinstance(found, bool)
                return found if is_constant else self._column(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                operands = [self._value(left), self._value(right)]
                if all(map(_is_float, operands)) and any(isinstance(each, Expr) for each in operands):
                    return _ARITHMETIC[type(op)](*operands)
        raise _UnknownError(f"{ast.unparse(tree)!r} is no column or constant")

    def _column(self, name: Hashable) -> Any:
        if name not in self._frame.columns or name in self._labels:
            raise _UnknownError(f"{name!r} is not a column alone")
        return _expr.Projection(self._frame, name)


class _TranslationForCudf(_Translation):
    """Translate a query that cudf compiles to a kernel, which chooses no row in which a column is null.

    A filter chooses none for which one of several comparisons is null or false; with ``or`` or ``not`` it
    may, since comparisons of times with null are false, or true for ``!=``. A kernel may round a sum of
    products once, operations twice.
    """

    def condition(self, tree: ast.expr, *, negated: bool = False) -> Any:
        """Return an expression of booleans."""
        is_plain = isinstance(tree, ast.Compare) and all(type(op) in _COMPARISONS for op in tree.ops)
        if is_plain or (isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)):
            return super().condition(tree)
        raise _UnknownError(f"{ast.unparse(tree)!r} may choose other rows where there are nulls")

    def _comparison(self, op: ast.cmpop, left: ast.expr, right: ast.expr, negated: bool) -> Any:
        found = super()._comparison(op, left, right, negated)
        for operand in found.operands:
            dtype = operand._meta.dtype if isinstance(operand, Expr) else None
            is_time = dtype is not None and dtype.kind == "M" and not isinstance(op, ast.NotEq)
            if dtype is not None and not is_time and not _is_exact(dtype, found.operands):
                raise _UnknownError(f"it compares {dtype} on a GPU")
        return found

    def _value(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.BinOp) and any(
            isinstance(each, ast.BinOp) for each in (tree.left, tree.right)
        ):
            raise _UnknownError(f"{ast.unparse(tree)!r} may be rounded once")
        found = super()._value(tree)
        is_too_large = isinstance(found, int) and abs(found) >= 1 << 63
        is_between = isinstance(found, pd.Timestamp) and found.nanosecond  # kernels get microseconds
        if isinstance(found, str) or is_too_large or is_between:
            raise _UnknownError(f"{ast.unparse(tree)!r} is another constant on a GPU")
        return found


def _is_exact(dtype: Any, operands: Sequence[Any]) -> bool:
    """Return whether kernels and operators of cudf compare a column with others and constants alike.

    Both compare the wider of two numbers; kernels take no constant for one of the dtype of the column.
    """
    if dtype == "float64":
        return True
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iu" or dtype == "uint64":
        return False
    limits = np.iinfo(dtype)
    return all(limits.min <= each <= limits.max for each in operands if isinstance(each, int))


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "iuf"


def _is_float(operand: Any) -> bool:
    """Return whether an operand is of float64, for which all engines of pandas compute the same."""
    if isinstance(operand, Expr):
        return bool(operand._meta.dtype == "float64")
    return isinstance(operand, (int, float)) and float(operand) == operand


def _constant(column: Any, value: Any, kind: type[Expr]) -> Any:
    """Return the constant that a column is compared with."""
    dtype = column._meta.dtype
    if isinstance(value, str):
        if isinstance(dtype, pd.StringDtype):
            return value
        # pandas finds times by `==` only among strings, where there are none.
        if isinstance(dtype, np.dtype) and dtype.kind == "M" and kind not in (_expr.EQ, _expr.NE):
            try:
                return pd.Timestamp(value)
            except ValueError as error:
                raise _UnknownError(f"{value!r} is no time") from error
    elif isinstance(value, pd.Timestamp):
        if isinstance(dtype, np.dtype) and dtype.kind == "M" and value.tz is None:
            return value
    elif isinstance(value, (int, float)) and _is_number(dtype):
        return value
    raise _UnknownError(f"it compares {dtype} with {value!r}")


def _alike(column: Any, other: Any) -> Any:
    """Return another column, if the two can be compared as they are."""
    one, two = column._meta.dtype, other._meta.dtype
    is_known = isinstance(one, pd.StringDtype) or getattr(one, "kind", "") == "M"
    if (_is_number(one) and _is_number(two)) or (is_known and one == two):
        return other
    raise _UnknownError(f"it compares {one} with {two}")
