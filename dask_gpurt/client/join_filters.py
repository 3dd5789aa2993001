"""Choose the side of a join whose keys filter the other side before it is moved."""

from __future__ import annotations

from typing import Any

from dask_gpurt.dask_hooks.expr import Filter, convert_to_list, meta, parameters
from dask_gpurt.frames.join_keys import can_look_up
from dask_gpurt.shuffle.joins import LEFT, RIGHT, SEMI

#: The sides whose rows without a match are not in the result, by kind of join.
DROPPABLE = {"inner": (LEFT, RIGHT), LEFT: (RIGHT,), RIGHT: (LEFT,), SEMI: (LEFT, RIGHT)}


def filtering_side(join: Any) -> str | None:
    """Return the side of a join on columns that has been filtered, if the other one has not.

    The keys of that side are presumably a few of the other's. At run time, nothing is filtered if they are
    not.
    """
    left_on, right_on = convert_to_list(join.left_on), convert_to_list(join.right_on)
    if join.left_index or join.right_index or not left_on or not right_on:
        return None
    left, right = meta(join.left), meta(join.right)
    if not _has(left, left_on) or not _has(right, right_on) or len(left_on) != len(right_on):
        return None
    if not can_look_up(left, left_on, right, right_on):
        return None
    reduced = {LEFT: is_reduced(join.left), RIGHT: is_reduced(join.right)}
    for side, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
        if reduced[side] and not reduced[other] and other in DROPPABLE.get(join.how, ()):
            return side
    return None


def is_reduced(side: Any) -> bool:
    """Return whether an expression leaves out rows of what it reads, itself or while it reads."""
    return any(
        type(node) is Filter or ("filters" in parameters(type(node)) and node.operand("filters"))
        for node in side.walk()
    )


def _has(frame: Any, names: Any) -> bool:
    return frame.ndim == 2 and frame.columns.is_unique and set(names) <= set(frame.columns)
