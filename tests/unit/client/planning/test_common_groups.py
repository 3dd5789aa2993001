"""Check that groups are aggregated once for all that is asked of them, and that results stay the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._groupby import GroupByBase
from dask.dataframe.dask_expr._merge import Merge
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.rules.common_groups import GroupsAtOnce
from tests.helpers.examples import examples
from tests.helpers.rules import Read, assert_rows, computation, corrected, ruled, stored
from tests.unit.client.planning.test_filters import value_of

__all__ = ["corrected"]

pytestmark = pytest.mark.usefixtures("by_tasks")


def rides(rows: int = 90) -> pd.DataFrame:
    """Return rows with nulls in keys and values, of which the keys come in no order."""
    at = np.arange(rows)
    return pd.DataFrame(
        {
            "bike": at * 37 % 11,
            "city": pd.array([None if i % 9 == 0 else f"c{i * 5 % 4}" for i in at], dtype="string"),
            "km": np.where(at % 7 == 0, np.nan, (at * 13 % 29) / 7),
            "stops": at * 3 % 5,
            "late": at % 3 == 0,
            "day": pd.Series(pd.Timestamp("2026-01-01") + pd.to_timedelta(at % 17, "D")).where(at % 8 != 0),
            "short": (at % 200).astype("int8"),
            "nullable": pd.array([None if i % 4 == 0 else i for i in at], dtype="Int64"),
        }
    )


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("rides"), {"rides": rides()}, 3)


def aggregations(plan: Any) -> int:
    return sum(isinstance(expr, GroupByBase) for expr in plan.walk())


ASKED: dict[str, Callable[[Any], Any]] = {
    "sums": lambda groups: groups[["km", "stops"]].sum(),
    "means": lambda groups: groups[["km"]].mean(),
    "size": lambda groups: groups.size().to_frame("rides"),
    "first day": lambda groups: groups["day"].min().to_frame("first"),
    "last day": lambda groups: groups["day"].max().to_frame("last"),
    "counts": lambda groups: groups[["city", "km"]].count() if groups_by_bike(groups) else groups.km.count(),
    "late": lambda groups: groups["late"].sum().to_frame(),
    "short": lambda groups: groups["short"].sum().to_frame("short sum"),
    "of nullable": lambda groups: groups["nullable"].sum().to_frame(),
    "least count": lambda groups: groups["km"].sum(min_count=3).to_frame(),
    "kinds": lambda groups: groups["stops"].nunique().to_frame("kinds"),
    "by agg": lambda groups: groups.agg({"km": "max", "stops": "mean"}),
}


def groups_by_bike(groups: Any) -> bool:
    keys = groups.by if hasattr(groups, "by") else groups.keys
    return [*([keys] if isinstance(keys, str) else keys)] == ["bike"]


WAYS: dict[str, Callable[[Any, Any, int], Any]] = {
    "join": lambda one, other, at: one.join(other, rsuffix=f"_{at}"),
    "merge": lambda one, other, at: one.merge(
        other, left_index=True, right_index=True, suffixes=("", f"_{at}")
    ),
    "set": lambda one, other, at: one.assign(**{f"set{at}": other[other.columns[-1]]}),
    "ratio": lambda one, other, at: (
        one.assign(**{f"ratio{at}": one[one.columns[0]] / other[other.columns[0]]})
        if one.dtypes.iloc[0].kind in "if" and other.dtypes.iloc[0].kind in "if"
        else one
    ),
}
asked = st.sampled_from(sorted(ASKED))
programs = st.tuples(
    st.sampled_from([["bike"], ["city"], ["city", "bike"]]),
    st.sampled_from([None, True, False]),
    st.booleans(),
    asked,
    st.lists(st.tuples(asked, st.sampled_from(sorted(WAYS))), min_size=1, max_size=4),
)


def run(rows: Any, program: Any) -> Any:
    by, sort, is_chosen, first, others = program
    rows = rows[rows.stops > 0] if is_chosen else rows

    def result(name: str) -> Any:
        found = ASKED[name](rows.groupby(by, **({} if sort is None else {"sort": sort})))
        return found.to_frame() if found.ndim == 1 else found

    whole = result(first)
    for at, (name, way) in enumerate(others):
        whole = WAYS[way](whole, result(name), at)
    return whole


@examples(40)
@given(program=programs)
def test_any_columns_of_groups_are_those_of_dask(read: Read, program: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = run(read("rides"), program)
        except ValueError:  # columns overlap
            return
        try:
            expected = value_of(computation(result))
        except (KeyError, TypeError):  # Dask leaves out columns that it counts, and names an index by one key
            return
        plan, _ = ruled(result)
        found = value_of(plan)
        pd.testing.assert_frame_equal(found, expected)  # also the order of groups
        of_pandas = run(rides(), program)
    if found.columns.is_unique:
        assert_rows(found.reset_index(), of_pandas.reset_index())


def test_columns_that_are_set_one_by_one_are_of_one_aggregation(read: Read) -> None:
    groups = read("rides").groupby(["city", "bike"])
    result = groups[["km", "stops"]].sum()
    means = groups[["km"]].mean()
    means.columns = ["mean"]
    result = result.join(means)
    result["rides"] = groups.size()
    result["each"] = groups["stops"].sum() / groups["km"].count()
    plan, facts = ruled(result.reset_index())
    assert aggregations(plan) == 1
    assert any(isinstance(expr, GroupsAtOnce) for expr in plan.walk())
    assert not any(isinstance(expr, (Merge, _expr.MaybeAlignPartitions)) for expr in plan.walk())
    assert {note.rule for note in facts.notes if note.done} >= {"CommonGroups"}


def test_what_is_looked_up_twice_is_aggregated_once(read: Read) -> None:
    rows = read("rides")
    first, last = rows.groupby("bike")["day"].min(), rows.groupby("bike")["day"].max()
    result = rows.merge(first.to_frame("first"), left_on="bike", right_index=True)
    result = result.merge(last.to_frame("last"), left_on="bike", right_index=True)
    plan, _ = ruled(result[result["first"] != result["last"]].km.sum())
    assert aggregations(plan) == 1
    assert value_of(plan) == value_of(computation(result[result["first"] != result["last"]].km.sum()))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "other keys": lambda rows: (rows.groupby("bike").km.sum(), rows.groupby("city").km.sum()),
    "other order": lambda rows: (
        rows.groupby("bike", sort=True).km.sum(),
        rows.groupby("bike", sort=False).km.mean(),
    ),
    "nulls are a group": lambda rows: (
        rows.groupby("city", dropna=False).km.sum(),
        rows.groupby("city", dropna=False).km.mean(),
    ),
    "nullable": lambda rows: (rows.groupby("bike").nullable.sum(), rows.groupby("bike").nullable.mean()),
    "categories": lambda rows: (
        rows.assign(city=rows.city.astype("category")).groupby("city", observed=False).km.sum(),
        rows.assign(city=rows.city.astype("category")).groupby("city", observed=False).km.mean(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_groups_are_aggregated_by_themselves(read: Read, name: str) -> None:
    results = REFUSED[name](read("rides"))
    plan, _ = ruled(*results)
    assert aggregations(plan) == aggregations(computation(*results)) == 2


def test_rows_that_are_left_out_in_between_are_joined(read: Read) -> None:
    groups = read("rides").groupby("bike")
    one, other = groups[["km"]].sum(), groups[["stops"]].sum()
    result = one[one.km > 10].join(other)
    plan, _ = ruled(result)
    assert any(isinstance(expr, Merge) for expr in plan.walk())
    pd.testing.assert_frame_equal(value_of(plan), value_of(computation(result)))
