"""Sort integers by position, faster than numpy's ``argsort``.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def order_of(numbers: np.ndarray, *, distinct: bool = False) -> np.ndarray | None:
    """Return the positions that sort integers in ascending order; the sort is stable.

    Each number is combined with its position into one integer of 64 bits, and these are sorted, which takes a
    third of the time of ``argsort``.

    Parameters
    ----------
    distinct
        Whether to return None if numbers are equal, so that the order is the same for every sort.

    Returns
    -------
    numpy.ndarray or None
        Positions as int64; None for other dtypes, or if the range of numbers is too wide to fit next to a
        position.
    """
    if not is_whole(numbers.dtype):
        return None
    if not len(numbers):
        return np.empty(0, np.int64)
    lowest = numbers.min()
    bits = (len(numbers) - 1).bit_length()
    if (int(numbers.max()) - int(lowest)).bit_length() + bits > 63:
        return None
    order = numbers.astype(np.int64)  # for uint64 modulo 2**64, as are the differences
    order -= lowest.astype(np.int64)
    order <<= bits
    order |= np.arange(len(order))
    order.sort()
    if distinct and ((order[1:] >> bits) == (order[:-1] >> bits)).any():
        return None
    order &= (1 << bits) - 1
    return order


def is_whole(dtype: Any) -> bool:
    """Return whether a dtype is an integer dtype of numpy."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"
