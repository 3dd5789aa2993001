"""Foresee the plans of programs that have run on stock Dask."""

from __future__ import annotations

from pathlib import Path

import dask.dataframe as dd
import pandas as pd
import pytest
from dask.core import flatten

from dask_gpurt.dask_hooks.planning import keys_of
from dask_gpurt.tools.qualify.program import observed


def test_plans_are_foreseen_with_the_corrections_of_the_runtime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of alternatives for the right side of a join, Dask puts what they share in place of the left side."""
    for name, key in (("a", "k"), ("b", "j")):
        frame = pd.DataFrame({key: range(40), f"{name}_x": 1})
        dd.from_pandas(frame, npartitions=2).to_parquet(tmp_path / name, write_index=False)
    with observed() as plans:
        rows = dd.read_parquet(tmp_path / "a").merge(
            dd.read_parquet(tmp_path / "b"), left_on="k", right_on="j"
        )
        first = (rows.a_x == 1) & (rows.b_x >= 1) & (rows.b_x <= 5)
        second = (rows.a_x == 2) & (rows.b_x >= 1) & (rows.b_x <= 7)
        rows[first | second].compute(scheduler="sync")
    (planned,) = [planned for _, planned in plans.found]
    (found,) = plans.of([{"key": key} for key in flatten(keys_of(planned.plan))], threads=2)
    assert found[1].reads
    assert not caplog.records
