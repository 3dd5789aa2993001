"""Join the two sides of an output, one of them in pieces if memory is short.

The output rows for a row of the probe side depend only on that row and on the other side. So the probe side
can be joined in pieces, and the results concatenated: pandas keeps the order of that side, and cudf does not
guarantee any. A join that also keeps unmatched rows of the *other* side cannot be computed piecewise, and is
not split.

pandas has no semi join: Dask removes the duplicates of the right side, and makes an inner join. Where the
right side is a single partition, each task on a partition of the left side does so for the whole of it, so
that side is shrunk to the keys of the left partition first. cudf has a semi join, and its frames stay as they
are.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dask_gpurt.dask_hooks.graphs import name_operation
from dask_gpurt.dask_hooks.types import concat, convert_to_list, merge_chunk
from dask_gpurt.frames import column_names, halves
from dask_gpurt.frames.programs import call
from dask_gpurt.frames.registry import is_of_unknown_categories
from dask_gpurt.observe import Fallback
from dask_gpurt.shuffle.local import output_of, runtime_here
from dask_gpurt.shuffle.splitting import split_and_retry

LEFT, RIGHT, SEMI = "left", "right", "leftsemi"
#: The side that can be joined in pieces, by kind of join.
PROBE_SIDES = {"inner": LEFT, "left": LEFT, SEMI: LEFT, "right": RIGHT}


def merge_unpack(
    shuffle_id_left: Any,
    shuffle_id_right: Any,
    output_partition: int,
    barrier_left: int,
    barrier_right: int,
    how: str,
    left_on: Any,
    right_on: Any,
    result_meta: Any,
    suffixes: Any,
    left_index: bool,
    right_index: bool,
    indicator: bool | str = False,
) -> Any:
    """Assemble and join both sides of an output. Name and arguments are those of Dask's task."""
    join = partial(
        merge_frames,
        how=how,
        left_on=left_on,
        right_on=right_on,
        result_meta=result_meta,
        suffixes=suffixes,
        left_index=left_index,
        right_index=right_index,
        indicator=indicator,
    )
    left = output_of(shuffle_id_left, barrier_left, output_partition)
    right = output_of(shuffle_id_right, barrier_right, output_partition)
    # Only a join on columns renumbers its rows. If index values are kept, Dask may sort the result.
    on_columns = not (left_index or right_index) and _has(left, left_on) and _has(right, right_on)
    if (exchange := getattr(runtime_here(), "exchange", None)) is None:
        return join(left, right)  # the shuffles were Dask's own, since the runtime is off, or local

    def on_split(error: MemoryError) -> None:
        reason = (
            f"output {output_partition} of shuffles {shuffle_id_left} and {shuffle_id_right}, joined: {error}"
        )
        exchange.metrics.fallback(Fallback.MEMORY_SPLIT, reason)

    sides = [with_categories_of(right, left), with_categories_of(left, right)]
    del left, right
    return join_in_pieces(
        join,
        sides,
        PROBE_SIDES.get(how) if on_columns else None,
        make_room=exchange.landing.make_room,
        on_split=on_split,
    )


def merge_aligned(left: Any, right: Any, **options: Any) -> Any:
    """Join two partitions as Dask does, with its options; either may be an output of a shuffle."""
    return merge_frames(with_categories_of(right, left), with_categories_of(left, right), **options)


def merge_frames(left: Any, right: Any, **options: Any) -> Any:
    """Join two partitions as Dask does, with its options; in a semi join, the right side shrinks first."""
    if options.get("how") == SEMI and not (options.get("left_index") or options.get("right_index")):
        keys = (convert_to_list(options.get(on)) or () for on in ("right_on", "left_on"))
        right = rows_that_may_match(right, left, *keys)
    meta = options.get("result_meta")
    if meta is not None and meta.index.nlevels > 1 and not isinstance(meta, pd.DataFrame):
        # Dask asks it for dtypes only, which cudf cannot select from a frame of several levels without rows.
        options["result_meta"] = meta.to_pandas()
    return call("merge", merge_chunk, left, right, **options)


#: In fused tasks.
name_operation("merge", merge_aligned, merge_frames)


def with_categories_of(other: Any, side: Any) -> Any:
    """Return ``side`` with the categories of ``other`` in place of unknown ones, if ``side`` is empty.

    An empty partition equals the collection's meta, whose categories may be unknown. Dask represents unknown
    categories as strings, and would unite them with those of the other side, which may be of any type. Known
    ones stay: a column that is no key has nothing in common with another one of its name.
    """
    if len(side) or not len(other) or not side.ndim == other.ndim == 2:
        return side
    shared = [
        name
        for name in side.columns
        if name in other.columns
        and _is_categorical(side.dtypes[name])
        and _is_categorical(other.dtypes[name])
        and is_of_unknown_categories(side[name])
    ]
    if not shared:
        return side
    side = side.copy(deep=False)
    for name in shared:
        # Not astype: in cudf it changes `ordered` from None to False, and cudf does not join columns that
        # differ in it.
        empty = other[name].iloc[:0]
        empty.index = side.index
        side[name] = empty
    return side


def _is_categorical(dtype: Any) -> bool:
    """Return whether a dtype is categorical, of whichever library."""
    return str(dtype) == "category"


def _has(frame: Any, names: Any) -> bool:
    return set(convert_to_list(names) or ()) <= set(column_names(frame))


def join_in_pieces(
    join: Callable[[Any, Any], Any],
    sides: list[Any],
    probe: str | None,
    *,
    make_room: Callable[[], object],
    on_split: Callable[[MemoryError], object],
) -> Any:
    """Join two frames on columns, in as few pieces as memory allows.

    ``join``: joins a left and a right frame.
    ``sides``: the left and the right frame; the list is emptied, to free their memory for the result.
    ``probe``: the side that may be split; None for neither.
    ``make_room``, ``on_split``: see :func:`~dask_gpurt.shuffle.splitting.split_and_retry`.
    """

    def joined(piece: Any) -> Any:
        left, right = (sides[0], piece) if probe == RIGHT else (piece, sides[1])
        return join(left, right)

    in_parts = partial(split_and_retry, make_room=make_room, on_split=on_split)
    halve = halves if probe else _in_no_parts
    pieces = list(in_parts(joined, sides[1] if probe == RIGHT else sides[0], halve=halve))
    sides.clear()
    if len(pieces) == 1:
        return pieces[0]
    (result,) = in_parts(_put_together, pieces, halve=_in_no_parts)
    return result


def _put_together(pieces: list[Any]) -> Any:
    """Concatenate frames, and renumber the rows."""
    rows = concat(pieces, ignore_index=True)
    # With categoricals, Dask's concat keeps the old index despite ignore_index.
    rows.reset_index(drop=True, inplace=True)
    return rows


def _in_no_parts(whole: Any) -> tuple[()]:
    return ()


#: Rows of the right side for each row of the left side from which on looking up its keys takes less time than
#: it saves, whether its keys are unique or not.
WORTH_A_LOOKUP = 2


def rows_that_may_match(right: Any, left: Any, right_on: Sequence[Any], left_on: Sequence[Any]) -> Any:
    """Return the right side of a semi join on columns, without rows that match no row of the left side.

    The join has the same result, since it only asks whether a key occurs: rows are dropped only where both
    sides have the same dtypes, and the right side has no columns but its keys, so that neither categories
    nor the comparison of keys depend on the dropped rows. Otherwise the right side is returned as it is.
    """
    if not isinstance(right, pd.DataFrame) or not isinstance(left, pd.DataFrame):
        return right
    if len(right) < WORTH_A_LOOKUP * len(left) or not _are_keys(right, left, right_on, left_on):
        return right
    for name, other in zip(right_on, left_on, strict=True):
        found = _occur(right[name], left[other])
        if found is not None:
            right = right[found]
    return right


def _are_keys(
    right: pd.DataFrame, left: pd.DataFrame, right_on: Sequence[Any], left_on: Sequence[Any]
) -> bool:
    """Return whether the right side consists of its keys, of the same dtypes as those of the left side."""
    if list(right.columns) != list(right_on) or len(right_on) != len(left_on):
        return False
    if not left.columns.is_unique or not set(left_on) <= set(left.columns):
        return False
    pairs = zip(right_on, left_on, strict=True)
    return all(right.dtypes[name] == left.dtypes[other] for name, other in pairs)


def _occur(values: pd.Series[Any], among: pd.Series[Any]) -> np.ndarray | None:
    """Return which values occur in another series of the same dtype; None for other dtypes.

    As in a join, a missing value occurs if any is missing.
    """
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biufmM":
        return values.isin(among).to_numpy()
    if isinstance(values.dtype, pd.StringDtype) and values.dtype.storage == "pyarrow":
        # pandas would convert the values of `among` to Python strings.
        looked_up = pc.is_in(pa.array(values), value_set=pa.array(among))
        return np.asarray(looked_up)
    return None
