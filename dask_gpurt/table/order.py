"""The order of whole numbers, by sorting each together with its position. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np


def order_of(numbers: np.ndarray, *, distinct: bool = False) -> np.ndarray | None:
    """The positions of numbers in ascending order; equal ones stay as they are.

    A number and its position are sorted as one integer of 64 bits, which takes a third of the
    time of ``argsort``.

    Parameters
    ----------
    distinct
        Whether there is an order only if no two are equal: then any sort finds the same.

    Returns
    -------
    numpy.ndarray or None
        int64; None for anything but integers, or where their range is so wide that they do
        not fit next to a position.
    """
    if not is_whole(numbers.dtype):
        return None
    if not len(numbers):
        return np.empty(0, np.int64)
    lowest = numbers.min()
    bits = (len(numbers) - 1).bit_length()
    if (int(numbers.max()) - int(lowest)).bit_length() + bits > 63:
        return None
    order = numbers.astype(np.int64)  # of uint64 modulo 2**64, and so are the differences
    order -= lowest.astype(np.int64)
    order <<= bits
    order |= np.arange(len(order))
    order.sort()
    if distinct and ((order[1:] >> bits) == (order[:-1] >> bits)).any():
        return None
    order &= (1 << bits) - 1
    return order


def is_whole(dtype: Any) -> bool:
    """Whether a dtype is one of numpy's integers."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"
