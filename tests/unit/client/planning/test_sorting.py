"""Check that results are sorted in one task, and that no index is sorted for a join."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr import _shuffle
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.dependence import why_dependent
from dask_gpurt.client.planning.rules.sorting import SortOnce
from tests.helpers.examples import examples
from tests.helpers.planned import value_of
from tests.helpers.rules import tuned

pytestmark = pytest.mark.usefixtures("by_tasks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two tables of several files, one without rows, with nulls and equal values."""
    folder = tmp_path_factory.mktemp("sorting")
    number = np.arange(240)
    large = pd.DataFrame(
        {
            "row": (number * 77) % 240,
            "key": number % 30,
            "ratio": np.where(number % 11 == 0, np.nan, (number * 7) % 13 / 4),
            "name": pd.array([None if i % 17 == 0 else f"n{i % 9}" for i in number], dtype="str"),
        }
    )
    small = pd.DataFrame({"code": (np.arange(25) * 3) % 25, "more": np.arange(25) * 1.5})
    for name, frame, files in (("large", large, 6), ("small", small, 3)):
        (folder / name).mkdir()
        for at in range(files):
            frame.iloc[at::files].to_parquet(folder / name / f"{at}.parquet", index=False)
        frame.iloc[:0].to_parquet(folder / name / f"{files}.parquet", index=False)
    return folder


class _Quantiles:
    """Count the jobs in which Dask looks for the bounds of the partitions of a sort."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.number = 0
        self._original = _shuffle._calculate_divisions
        monkeypatch.setattr(_shuffle, "_calculate_divisions", self)
        _shuffle.divisions_lru.data.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        return self._original(*args, **kwargs)


def planned(result: Any, rule: bool = True) -> Any:
    """Return the lowered plan of a computation."""
    plan, facts = tuned(result), Facts(PartitionSizes(1, 1, 0, 0))
    changed = SortOnce().apply(plan, facts) if rule else plan
    why_dependent(changed)  # as other rules find out
    return lower(changed, "simplified-physical")


FOLLOWING: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda rows: rows.reset_index(drop=True),
    "a column": lambda rows: rows.assign(twice=rows.row * 2, one=1),
    "some columns": lambda rows: rows[["name", "row"]],
    "one column": lambda rows: rows.row,
    "new names": lambda rows: rows.rename(columns={"name": "other"}),
    "rounded": lambda rows: rows.round(1),
    "some rows": lambda rows: rows[rows.key > 4],
    "numbers, then others": lambda rows: rows.reset_index(drop=True).assign(x=1).rename(columns={"x": "y"}),
    "an index": lambda rows: rows.set_index("row"),
    "another sort": lambda rows: rows.assign(x=1).sort_values(["row"], ascending=False),
}
#: Each row has its own value of the last of these columns.
BY = [["row"], ["ratio", "row"], ["name", "row"], ["key", "name", "row"]]


@examples(20)
@given(
    follows=st.sampled_from([*FOLLOWING]),
    by=st.sampled_from(BY),
    ascending=st.lists(st.booleans(), min_size=3, max_size=3),
    nulls=st.sampled_from(["first", "last"]),
)
def test_results_are_sorted_as_by_pandas(
    folder: Path, follows: str, by: list[str], ascending: list[bool], nulls: Any
) -> None:
    def program(table: Any) -> Any:
        rows = table.sort_values(by, ascending=ascending[: len(by)], na_position=nulls)
        return FOLLOWING[follows](rows)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantiles = _Quantiles(patch)
        found = value_of(planned(program(dd.read_parquet(folder / "large"))))
        assert quantiles.number == 0
        expected = program(pd.read_parquet(folder / "large"))
    if follows == "an index":
        found, expected = found.sort_index(), expected.sort_index()
    if follows == "numbers" or follows.startswith("numbers,") or follows == "an index":
        assert found.index.tolist() == expected.index.tolist()
    if isinstance(expected, pd.Series):
        assert found.tolist() == expected.tolist()
    else:
        pd.testing.assert_frame_equal(
            found.reset_index(drop=True), expected.reset_index(drop=True), check_dtype=False
        )


LOOKED_UP: dict[str, Callable[[Any, Any], Any]] = {
    "join": lambda large, small: large.join(small.set_index("code"), on="key"),
    "of some rows": lambda large, small: large.merge(
        small[small.more > 3].set_index("code").rename(columns={"more": "most"}),
        left_on="key",
        right_index=True,
        how="left",
    ),
    "at the left": lambda large, small: small.set_index("code").merge(
        large, left_index=True, right_on="key", how="right"
    ),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_no_index_is_sorted_for_a_join(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantiles = _Quantiles(monkeypatch)
    large, small = (dd.read_parquet(folder / each) for each in ("large", "small"))
    found = value_of(planned(LOOKED_UP[name](large, small)))
    assert quantiles.number == 0
    frames = (pd.read_parquet(folder / each) for each in ("large", "small"))
    expected = LOOKED_UP[name](*frames)
    columns = list(expected.columns)
    pd.testing.assert_frame_equal(
        found.sort_values(columns).reset_index(drop=True),
        expected.sort_values(columns).reset_index(drop=True),
        check_dtype=False,
    )
    dasks = value_of(planned(LOOKED_UP[name](large, small), rule=False))
    assert found.index.dtype == dasks.index.dtype
    assert sorted(found.index) == sorted(dasks.index)


#: Sorts that are left to Dask.
LEFT: dict[str, Callable[[Any], Any]] = {
    "by a function": lambda table: table.sort_values(
        "row", sort_function=lambda rows, **options: rows.sort_values(**options)
    ).reset_index(drop=True),
    "into partitions": lambda table: table.sort_values("row", npartitions=3).reset_index(drop=True),
    "by a series": lambda table: table.set_index(table.row * 2).round(1),
    "at given bounds": lambda table: table.set_index("row", divisions=[0, 100, 239]).round(1),
    "numbered again for a join": lambda table: table.merge(
        table.set_index("row")[["ratio"]].reset_index(), left_on="key", right_index=True
    ),
    "before a function": lambda table: table.sort_values("row").map_partitions(len),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_dask(folder: Path, name: str) -> None:
    plan = tuned(LEFT[name](dd.read_parquet(folder / "large")))
    assert SortOnce().apply(plan, Facts(PartitionSizes(1, 1, 0, 0)))._name == plan._name


def test_a_join_with_an_index_does_not_depend_on_partitions(folder: Path) -> None:
    large, small = (dd.read_parquet(folder / each) for each in ("large", "small"))

    def depends(result: Any) -> bool:
        return why_dependent(SortOnce().apply(tuned(result), Facts(PartitionSizes(1, 1, 0, 0)))) is not None

    joined = large.join(small.set_index("code"), on="key", how="inner")
    assert not depends(joined.groupby("name", sort=True).more.sum())
    assert not depends(joined)  # whose index numbers rows of files, as reads of several files do
    varying = small[["more"]].assign(code=small.code.where(small.more > 3)).set_index("code")
    assert depends(large.merge(varying, left_on="key", right_index=True).groupby("key", sort=True).more.sum())
