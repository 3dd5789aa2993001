"""Keep nothing of received buffers in what pandas has concatenated."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal, assert_series_equal

from dask_gpurt.dask_hooks.types import concat
from dask_gpurt.frames.pickled import own_rest

ROWS = 2_000
KINDS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "frame": lambda frame: frame,
    "objects": lambda frame: frame.assign(objects=[(row,) for row in range(ROWS)]),
    "strings": lambda frame: frame["strings"],
    "levels": lambda frame: frame.set_index(["row", "strings"]),
    "rows of strings": lambda frame: frame.set_index("strings")[["row"]],
}


class Message(np.ndarray):
    """View a received message; everything that is read from it keeps this view alive."""


def received(part: Any) -> tuple[Any, weakref.ref[Message]]:
    """Return a frame as it comes from a worker, and a reference to the message."""
    buffers: list[pickle.PickleBuffer] = []
    whole = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    sizes = [buffer.raw().nbytes for buffer in buffers]
    joined = bytearray(b"".join(bytes(buffer.raw()) for buffer in buffers))
    message = np.frombuffer(joined, np.uint8).view(Message)
    ends = np.cumsum(sizes)
    views = [message[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return pickle.loads(whole, buffers=views), weakref.ref(message)


def made(part: int) -> pd.DataFrame:
    rows = np.arange(part, part + ROWS)
    columns = {
        "row": rows,
        "half": rows / 2,
        "strings": pd.array([f"x{row}" for row in rows], "str"),
        "categories": pd.Categorical.from_codes(rows % 2, [f"of {part}", "of all"]),
        "times": pd.to_datetime(rows),
        "integers": pd.array(rows, "Int64"),
    }
    return pd.DataFrame(columns, index=pd.Index(rows[::-1], name="at"))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_messages_stays(kind: str) -> None:
    parts = [KINDS[kind](made(part)) for part in range(3)]
    expected = concat(parts)
    frames, messages = map(list, zip(*map(received, parts), strict=True))
    found = own_rest(concat(frames))
    del frames
    gc.collect()
    assert [message() for message in messages] == [None] * 3
    (assert_frame_equal if isinstance(expected, pd.DataFrame) else assert_series_equal)(found, expected)


def test_numbers_are_not_copied_again() -> None:
    whole = concat([made(0)[["half"]], made(1)[["half"]]])
    found = own_rest(whole)
    assert np.shares_memory(found["half"].to_numpy(), whole["half"].to_numpy())
    found.iloc[0, 0] = -1.0  # which may be written to


def test_what_cannot_be_pickled_stays_as_it_is() -> None:
    whole = concat([made(0), made(1)])
    whole.attrs["unit"] = lambda: None
    assert own_rest(whole) is whole
