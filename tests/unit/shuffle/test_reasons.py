"""Name the reasons of recoveries so that a narrow place shows what matters."""

from __future__ import annotations

import pytest

from dask_gpurt.shuffle.run import inputs_lost


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([3], "1 input lost: 3"),
        ([12, 0, 3], "3 inputs lost: 0, 3, 12"),
        (range(1000), "1000 inputs lost: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …"),
    ],
)
def test_lost_inputs_are_counted_first(inputs: range | list[int], reason: str) -> None:
    assert inputs_lost(inputs) == reason
