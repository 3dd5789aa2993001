"""Test the benchmark of skewed keys: data, checks and figures."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.skew.frames import KEYS, Size, digest, expected, join, left_frame, right_frame, total

SIZE = Size(rows=4003, partitions=3)


@pytest.mark.parametrize("keys", list(KEYS))
def test_joins_have_a_row_for_each_of_the_left_side_whatever_its_keys_are(keys: str) -> None:
    sides = left_frame(keys, SIZE), right_frame(SIZE)
    parts = join(*sides).to_delayed()
    found = total([digest(part.compute(scheduler="sync")) for part in parts])
    assert found == expected(keys, SIZE)
    assert found.rows == SIZE.rows


def test_a_digest_tells_rows_but_not_their_order() -> None:
    rows = pd.DataFrame({"key": [1, 2, 3], "payload": [4, 5, 6]})
    assert digest(rows.iloc[::-1]) == digest(rows) == total([digest(rows[:1]), digest(rows[1:])])
    swapped = rows.assign(payload=[5, 4, 6])
    for other in (rows[:2], swapped, pd.concat([rows, rows[:1]]), rows.rename(columns={"key": "z"})):
        assert digest(other) != digest(rows)
    assert digest(rows[:0]) == (0, 0)
