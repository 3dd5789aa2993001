"""Verify the rows of benchmarks, and that their programs find what they import."""

from __future__ import annotations

import importlib
import itertools
import pkgutil

import pandas as pd
import pytest

import benchmarks
from benchmarks.common.rows import check, fingerprint, make_random, totals

FRAME = make_random(0, 100, 50, "pandas")
SORTED = FRAME.sort_values("key", ignore_index=True)
WHOLE = totals([fingerprint(FRAME)])


def cut(frame: pd.DataFrame, *at: int) -> list[pd.DataFrame]:
    ends = [0, *sorted(at), len(frame)]
    return [frame.iloc[begin:end] for begin, end in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (cut(SORTED.iloc[1:], 50), "rows and checksums"),
        (cut(SORTED.assign(payload=SORTED["payload"] + 1), 50), "rows and checksums"),
        (cut(SORTED, 50)[::-1], "order"),
        ([SORTED.iloc[:50], SORTED.iloc[50:][::-1]], "order"),
    ],
)
def test_invalid_rows_are_reported(parts: list[pd.DataFrame], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check([fingerprint(part) for part in parts], WHOLE, sorts=True)


# ---- programs find what they import ---------------------------------------------------------------

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(name)
