"""Summarise timed rechunks."""

from __future__ import annotations

import numpy as np

from benchmarks.array.__main__ import OPERATIONS, Run, checksum, figures, random_rows


def runs(method: str, *seconds: float) -> list[Run]:
    return [Run("rechunk", method, turn, one, 2 * one, {"host": turn}) for turn, one in enumerate(seconds)]


def test_methods_are_compared_in_their_turns_and_without_the_first() -> None:
    ours, theirs = figures(runs("gpurt", 9, 1, 2, 3) + runs("p2p", 1, 2, 6, 12))
    assert (ours["seconds"], "times_gpurt" in ours["seconds"]) == ({"median": 2, "min": 1, "max": 3}, False)
    assert theirs["seconds"] == {
        "median": 6,
        "min": 2,
        "max": 12,
        "times_gpurt": {"median": 3, "interval": [2, 4]},
    }
    assert theirs["peak_bytes"] == {"host": 3}


def test_operations_keep_all_elements_and_their_chunks_have_checksums_of_their_own() -> None:
    rows = random_rows(8 * 64 * 64, 4)
    assert rows.chunks == ((16,) * 4, (64,))
    columns, transposed = (make(rows, 4, "tasks") for make in OPERATIONS.values())
    assert columns.chunks == ((64,), (16,) * 4)
    assert transposed.chunks == ((16,) * 4, (64,))
    np.testing.assert_array_equal(transposed.compute(scheduler="sync"), rows.compute(scheduler="sync").T)
    assert checksum(np.zeros((2, 3))) != checksum(np.zeros((3, 2)))
