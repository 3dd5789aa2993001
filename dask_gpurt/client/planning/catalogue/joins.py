"""Say how the schema of a join follows from those of its sides.

Labels, order and suffixes have a rule; dtypes and the index are the library's own answers about single
columns and keys. Joins of which that is not known are asked about as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.catalogue.asking import Library, answered
from dask_gpurt.client.planning.catalogue.schema import Part, Schema, SchemaOf
from dask_gpurt.frames.empty import dtype_of


def joined(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Join two frames; odd keys, indicators and suffixes are asked about as a whole."""
    left, right = of(expr.left), of(expr.right)
    if left is None or right is None:
        return None
    on = (expr.left_on, expr.right_on, expr.left_index, expr.right_index)
    return library.derived(
        _joined_as_known, expr, (left, right), expr.how, *on, expr.suffixes, expr.indicator
    )


def _joined_as_known(expr: Any, left: Schema, right: Schema, library: Library) -> Schema | None:
    found = None
    # Where cudf swaps the sides, it puts the keys first.
    swapped = expr.how == "right" and not issubclass(left.frames, pd.DataFrame)
    is_plain = left.is_frame and right.is_frame and not (left.has_levels or right.has_levels)
    if is_plain and not expr.indicator and not swapped:
        found = _joined(expr, left, right, library)
    if found is None:
        rest = (expr.how, expr.left_on, expr.right_on, expr.left_index, expr.right_index, expr.suffixes)
        found = library.ask(Merge, [left, right, *rest, expr.indicator])
    return found


def _joined(expr: Any, left: Schema, right: Schema, library: Library) -> Schema | None:
    """Join the columns of the left, then those of the right but for keys of the same name."""
    pairs = _pairs_of_keys(expr, left, right)
    if pairs is None:
        return None
    shared = {one for one, other in pairs if one == other}
    in_both = ({*left.labels} & {*right.labels}) - shared
    if in_both & {key for pair in pairs for key in pair}:
        return None  # pandas puts the values of keys elsewhere
    names = _names_of_sides(left, right, in_both, expr.suffixes)
    columns = _columns_of_join(expr, left, right, pairs, library)
    if names is None or columns is None:
        return None
    rest, *sides = columns
    kept = [
        (name, of_side[label])
        for schema, of_names, of_side, skipped in zip(
            (left, right), names, sides, (set(), shared), strict=True
        )
        for label, name in zip(schema.labels, of_names, strict=True)
        if label not in skipped
    ]
    if not kept:
        return None
    labels, parts = zip(*kept, strict=True)
    return rest._replace(labels=labels, columns=parts) if len({*labels}) == len(labels) else None


def _pairs_of_keys(expr: Any, left: Schema, right: Schema) -> list[tuple[Any, Any]] | None:
    """Return the keys of both sides, None for an index; None if they are not plain labels of columns."""
    sides = [
        _keys_of_side(left, expr.left_on, expr.left_index),
        _keys_of_side(right, expr.right_on, expr.right_index),
    ]
    if not sides[0] or not sides[1] or len(sides[0]) != len(sides[1]):
        return None
    return list(zip(*sides, strict=True))


def _keys_of_side(side: Schema, on: Any, by_index: bool) -> list[Any] | None:
    keys = list(on) if isinstance(on, (list, tuple)) else [] if on is None else [on]
    levels = side.index.value.names
    if by_index:
        return None if keys or len(levels) > 1 else [None]
    plain = all(type(key) is str and key in side.labels and key not in levels for key in keys)
    distinct = len({*keys}) == len(keys) and len({*side.labels}) == len(side.labels)
    return keys if plain and distinct else None


def _names_of_sides(left: Schema, right: Schema, in_both: set[Any], suffixes: Any) -> list[list[str]] | None:
    """Return the names of the columns of both sides in the result; None if it may fail."""
    if in_both and not (any(suffixes) and all(each is None or type(each) is str for each in suffixes)):
        return None
    return [
        [f"{label}{suffix or ''}" if label in in_both else label for label in side.labels]
        for side, suffix in zip((left, right), suffixes, strict=True)
    ]


def _columns_of_join(
    expr: Any, left: Schema, right: Schema, pairs: Sequence[tuple[Any, Any]], library: Library
) -> tuple[Schema, dict[Any, Part], dict[Any, Part]] | None:
    """Return the join of the keys alone, and what becomes of each column of the left and the right side.

    Whether a column gets nulls in Dask's example, and so another dtype, depends on the dtypes of the keys and
    on its own.
    """
    if not (expr.left_index or expr.right_index):  # then indexes do not count
        numbered = [each for side in (left, right) if (each := with_row_numbers(side, library)) is not None]
        if len(numbered) < 2:
            return None
        left, right = numbered
    keys = [
        {
            pair[at]: _name_of_key(number, at, pair)
            for number, pair in enumerate(pairs)
            if pair[at] is not None
        }
        for at in (0, 1)
    ]
    bare = [
        side._replace(labels=tuple(of.values()), columns=tuple(map(side.at, of)))
        for side, of in zip((left, right), keys, strict=True)
    ]
    # Those of each side on either side, since the next join may have them there; but Dask takes categories in
    # another order for the same.
    both = [
        each
        for side in (left, right)
        for each in side.columns
        if not hasattr(dtype_of(each.value), "categories")
    ]
    of_side = (dict.fromkeys([*side.columns, *both]) for side in (left, right))
    parts = [None, *((at, each) for at, columns in enumerate(of_side) for each in columns)]
    rest = [expr.how, *(list(of.values()) or None for of in keys), expr.left_index, expr.right_index]

    def answer(missing: list[int]) -> list[Schema | None]:
        sides, asked_for = list(bare), [parts[position] for position in missing]
        for number, part in enumerate(asked_for):
            if part is not None:
                at, column = part
                labels, columns = (*sides[at].labels, f"v{number}"), (*sides[at].columns, column)
                sides[at] = sides[at]._replace(labels=labels, columns=columns)
        found = answered(Merge, [*sides, *rest])
        expected = [*sides[0].labels, *(label for label in sides[1].labels if label not in sides[0].labels)]
        if found is None or [*found.labels] != expected:
            return [None] * len(missing)
        of_keys = [label for label in expected if label[0] != "v"]
        return [
            found.select(of_keys if part is None else [f"v{number}"]) for number, part in enumerate(asked_for)
        ]

    operands = [*bare, *rest]
    named = [None if part is None else (part[0], part[1].key) for part in parts]
    found = library.ask_parts(Merge, operands, named, answer)
    if found is None:
        return None
    alone, answers = (
        found[0],
        {part: each.columns[0] for part, each in zip(parts[1:], found[1:], strict=True)},
    )
    of_sides = [
        {
            label: alone.at(of[label]) if label in of else answers[at, column]
            for label, column in zip(side.labels, side.columns, strict=True)
        }
        for at, (side, of) in enumerate(zip((left, right), keys, strict=True))
    ]
    return alone, of_sides[0], of_sides[1]


def _name_of_key(number: int, at: int, pair: tuple[Any, Any]) -> str:
    return f"k{number}" if pair[0] == pair[1] else f"{'lr'[at]}{number}"


def with_row_numbers(side: Schema, library: Library) -> Schema | None:
    """Return a schema with row numbers as its index."""
    found = library.ask(_expr.ResetIndex, [side.one("a"), True])
    return None if found is None else side._replace(index=found.index)
