"""Ask Dask about an operation on stand-ins: frames that have only what its answer depends on.

A question is an operation with schemas in place of its inputs. Each is asked once: the answer is kept, also
for other processes (:class:`~dask_gpurt.client.planning.store.StoredCache`).

A library on a GPU is asked by kernels: a tenth to a quarter of the time that a first plan takes on cudf. So a
thread asks about what programs do most often, as soon as the runtime is on for a client that has imported
such a library, while the user's program goes on.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import cached_property, partial
from typing import Any

import dask
import numpy as np
import pandas as pd
from dask.dataframe.backends import dataframe_creation_dispatch
from dask.dataframe.dask_expr._expr import Expr as FrameExpr

from dask_gpurt.client.planning.catalogue.schema import SCHEMA, Schema, frame_of, schema_of
from dask_gpurt.client.planning.keys import frozen
from dask_gpurt.dask_hooks.planning import Expr, collection_of, metadata
from dask_gpurt.frames import first_uses

logger = logging.getLogger(__name__)

#: Returns the answer to each question: kept ones, and for the positions of those that are missing the results
#: of the function, which are None where Dask has to say it.
Keep = Callable[[Sequence[Hashable], Callable[[list[int]], list[Schema | None]]], list[Schema | None]]
#: Returns what has been derived before by a key, or what the function derives.
Remember = Callable[[Hashable, Callable[[], Schema | None]], Schema | None]

#: The attribute of an expression that tells that it is a question.
QUESTION = "_gpurt_question"

_numbers = itertools.count()


class StandIn(FrameExpr):
    """Stand for an input of which only the schema counts; the operand makes it unique."""

    _parameters = ["number"]

    @cached_property
    def _meta(self) -> Any:
        return frame_of(vars(self)[SCHEMA])

    def _divisions(self) -> tuple[None, None]:
        return (None, None)


def stand_in(schema: Schema) -> Expr:
    """Return an expression of one partition with a schema."""
    found = StandIn(next(_numbers))  # type: ignore[no-untyped-call]
    vars(found)[SCHEMA] = schema
    return found


class Library:
    """Ask the library of frames, through Dask's operations.

    ``keep``: keeps answers.
    ``remember``: keeps what follows from them, in this process alone.
    """

    def __init__(self, keep: Keep, remember: Remember):
        self._keep, self._remember = keep, remember

    def derived(
        self, rule: Callable[..., Schema | None], expr: Any, of: Sequence[Schema], *operands: Any
    ) -> Schema | None:
        """Return what a rule says of an expression, applied once to each schemas of inputs and operands.

        For rules that take longer than looking up a key does.
        """
        key = (rule, *of, *map(frozen, operands))
        return rule(expr, *of, self) if None in key else self._remember(key, lambda: rule(expr, *of, self))

    def ask(self, kind: type, operands: Sequence[Any]) -> Schema | None:
        """Return the schema of the result of an operation; None if Dask has to say it.

        ``operands``: those of the operation, with schemas as inputs.
        """
        found = self.ask_parts(kind, operands, [()], lambda _: [answered(kind, operands)])
        return None if found is None else found[0]

    def ask_parts(
        self,
        kind: Callable[..., Any],
        operands: Sequence[Any],
        parts: Sequence[Hashable],
        answer: Callable[[list[int]], list[Schema | None]],
    ) -> list[Schema] | None:
        """Return the answer to each part of a question; None if Dask has to say one of them.

        Those that are missing are asked at once.

        ``operands``: what all parts have in common.
        ``parts``: what each part is about.
        ``answer``: takes the positions of parts; returns their answers.
        """
        keys = tuple(map(key_of, operands))
        if None in keys:
            return None
        found = self._keep([(kind, *keys, part) for part in parts], answer)
        known = [each for each in found if each is not None]
        return known if len(known) == len(parts) else None

    def converted(self, frame: Any, convert: Callable[[Any], Any]) -> Any | None:
        """Return an empty frame in another library, of each dtype one column converted; None if it cannot.

        ``convert``: the library's function.
        """
        schema = schema_of(frame)
        if schema is None or not schema.is_frame or not 0 < len(schema.labels) == len({*schema.labels}):
            return None
        columns = list(dict.fromkeys(schema.columns))

        def answer(missing: list[int]) -> list[Schema | None]:
            single = (schema._replace(labels=("a",), columns=(columns[position],)) for position in missing)
            return [schema_of(convert(frame_of(each))[["a"]]) for each in single]

        bare = schema._replace(labels=(), columns=())
        found = self.ask_parts(convert, [bare], [column.key for column in columns], answer)
        if found is None or len({(each.labels, each.index, each.axis) for each in found}) > 1:
            return None
        parts = dict(zip(columns, (each.columns[0] for each in found), strict=True))
        of_labels = tuple(parts[column] for column in schema.columns)
        return frame_of(found[0]._replace(labels=schema.labels, columns=of_labels))


def answered(kind: type, operands: Sequence[Any]) -> Schema | None:
    """Return the schema of the result of an operation, with schemas as inputs; None if Dask has to say it."""
    try:
        question = kind(*(stand_in(each) if isinstance(each, Schema) else each for each in operands))
        vars(question)[QUESTION] = True
        return schema_of(metadata(question))
    except Exception:  # Dask is asked about the operation itself: its error names the columns of the user
        logger.debug("Dask says what %s returns", kind.__name__, exc_info=True)
        return None


def key_of(operand: Any) -> Hashable | None:
    """Return a key that is equal only for equal operands, which may be schemas; None if there is none."""
    if isinstance(operand, Schema):
        return operand.key
    if isinstance(operand, (pd.Timestamp, pd.Timedelta)):
        return (type(operand), operand.isoformat(), operand.unit, repr(getattr(operand, "tz", None)))
    if isinstance(operand, (date, timedelta, Decimal, np.generic)):
        return (type(operand), repr(operand))
    return frozen(operand)


# ---- before a program asks ---------------------------------------------------------------------------

#: What a read of Parquet files has for its most frequent types, by the names of columns.
DTYPES = {
    "i": "int64", "j": "int64", "k": "int32", "f": "float64", "g": "float64", "s": "str", "r": "str",
    "t": "datetime64[us]", "n": "datetime64[ns]", "b": "bool",
}  # fmt: skip

COMPARISONS = (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)

#: Converts an empty frame of pandas by the function of a library, as files are described.
Convert = Callable[[Any, Callable[[Any], Any]], Any]


def ask_ahead(convert: Convert, is_wanted: Callable[[], bool]) -> None:
    """Ask in a thread, once the libraries for GPUs that this process has imported have been used.

    ``convert``: see :data:`Convert`.
    ``is_wanted``: returns whether the thread that calls it plans for a client; if not, no more is asked.
    """

    def of(library: Any) -> Iterator[Callable[[], Any]]:
        first_uses.wait()
        yield from questions(convert(pd.DataFrame(columns=[*DTYPES]).astype(DTYPES), library.from_pandas))

    first_uses.in_threads("gpurt-ask-ahead", of, is_wanted)


def questions(frame: Any) -> Iterator[Callable[[], Any]]:
    """Yield steps of programs; making each asks about it.

    ``frame``: an empty frame with the columns of :data:`DTYPES`.
    """
    yield lambda: dataframe_creation_dispatch.dispatch(dask.config.get("dataframe.backend", None) or "pandas")
    schema = schema_of(frame)
    if schema is None:
        return
    others = schema._replace(labels=tuple(label.upper() for label in schema.labels))
    rows, other = collection_of(stand_in(schema)), collection_of(stand_in(others))
    alike = other.rename(columns={"I": "i"})
    values: list[tuple[str, Any]] = [("f", 1.5), ("i", 1), ("t", pd.Timestamp(2000, 1, 1)), ("f", 1)]
    yield from (partial(compare, rows[column], value) for column, value in values for compare in COMPARISONS)
    yield from (
        lambda: rows[(rows.f > 1.5) & (rows.f <= 1.5)].reset_index(drop=True),
        lambda: rows.merge(other, left_on="i", right_on="J"),
        lambda: rows.merge(alike, on="i"),
        lambda: (rows.s == "a") & (rows.r != "a") | rows.s.isin(["a"]) & ~rows.i.isin([1]),
        lambda: rows.assign(x=rows.f * (1 - rows.g), y=rows.i * 2 + rows.k, z=rows.f / rows.g, s=rows.r),
        lambda: rows.groupby("i").agg({"f": "sum", "j": "count", "g": "mean", "t": "max"}).reset_index(),
        lambda: rows.groupby("s").agg({"f": "sum", "j": "count", "g": "mean", "i": "sum"}).reset_index(),
        lambda: rows.groupby(["s", "r"]).agg({"f": "sum", "j": "count", "g": "mean"}).reset_index(),
        lambda: rows.groupby("i").f.sum().reset_index(),
        lambda: rows.groupby("s").size().reset_index(),
        lambda: rows.merge(other, left_on="i", right_on="J", how="left"),
        lambda: rows.merge(other, left_on=["i", "s"], right_on=["J", "R"]),
        lambda: rows.merge(alike, on="i", how="leftsemi"),
        lambda: rows.sort_values("f", ascending=False).head(5, compute=False).simplify().dtypes,
        lambda: rows.sort_values(["f", "t"]).head(5, compute=False).simplify().dtypes,
        lambda: rows.sort_values(["i", "s"]).head(5, compute=False).simplify().dtypes,
        lambda: rows.shuffle("i").optimize(fuse=False).dtypes,
        lambda: rows.assign(year=rows.t.dt.year, new=rows.n, small=rows.k),
        lambda: rows[(rows.f > rows.g) & ~rows.b][["f"]].drop_duplicates(),
        lambda: (rows.f.sum(), rows.i.max(), rows.f.mean(), rows.f + 1, rows.f * 2, rows.f + rows.g),
    )
