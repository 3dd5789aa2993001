"""Summarise timed rechunks."""

from __future__ import annotations

import numpy as np

from benchmarks.array.__main__ import OPERATIONS, checksum, random_rows


def test_operations_keep_all_elements_and_their_chunks_have_checksums_of_their_own() -> None:
    rows = random_rows(8 * 64 * 64, 4)
    assert rows.chunks == ((16,) * 4, (64,))
    columns, transposed = (make(rows, 4, "tasks") for make in OPERATIONS.values())
    assert columns.chunks == ((64,), (16,) * 4)
    assert transposed.chunks == ((16,) * 4, (64,))
    np.testing.assert_array_equal(transposed.compute(scheduler="sync"), rows.compute(scheduler="sync").T)
    assert checksum(np.zeros((2, 3))) != checksum(np.zeros((3, 2)))
