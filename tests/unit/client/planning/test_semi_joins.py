"""Check which joins only look for a match, and that results stay the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._groupby import GroupByBase
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._reductions import DropDuplicates
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.rules import Read, assert_rows, computed, corrected, stored
from tests.unit.client.planning.test_needed_groups import planned

__all__ = ["corrected"]

pytestmark = pytest.mark.usefixtures("by_tasks")


def tables() -> dict[str, pd.DataFrame]:
    """Return orders of a shop, and visits of its pages, with nulls in keys of both."""
    at, of = np.arange(50), np.arange(90)
    return {
        "orders": pd.DataFrame(
            {
                "order": at,
                "user": at * 7 % 13,
                "page": pd.array([None if i % 9 == 0 else f"p{i % 8}" for i in at], dtype="string"),
                "ratio": np.where(at % 5, at % 6, np.nan),
            }
        ),
        "visits": pd.DataFrame(
            {
                "visitor": of * 5 % 11,
                "user": of * 3 % 17,
                "page": pd.array([None if i % 7 == 0 else f"p{i % 5}" for i in of], dtype="string"),
                "ratio": np.where(of % 4, of % 9, np.nan),
                "seconds": of,
            }
        ),
    }


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("shop"), tables(), 2, orders=3)


def where(rows: Any, condition: Callable[[Any], Any]) -> Any:
    return rows[condition(rows)]


def is_semi(plan: Any) -> bool:
    kinds = [expr.how for expr in plan.walk() if type(expr) is Merge]
    return kinds == ["leftsemi"]


KEYS: dict[str, tuple[list[str], list[str]]] = {
    "user": (["user"], ["user"]),
    "visitor": (["user"], ["visitor"]),
    "page": (["page"], ["page"]),
    "ratio": (["ratio"], ["ratio"]),
    "both": (["user", "page"], ["visitor", "page"]),
}
WAYS: dict[str, Callable[[Any, Any, list[str], list[str]], Any]] = {
    "distinct": lambda orders, visits, own, other: orders.merge(
        visits[other].drop_duplicates(), left_on=own, right_on=other, suffixes=("", "_r")
    ),
    "distinct first": lambda orders, visits, own, other: (
        visits[other]
        .rename(columns={name: f"{name}_v" for name in other})
        .drop_duplicates()
        .merge(orders, left_on=[f"{name}_v" for name in other], right_on=own)
    ),
    "subset": lambda orders, visits, own, other: orders.merge(
        visits.drop_duplicates(subset=other)[other], left_on=own, right_on=other, suffixes=("", "_r")
    ),
    "subset of one": lambda orders, visits, own, other: orders.merge(
        visits.drop_duplicates(subset=other[:1])[other], left_on=own, right_on=other, suffixes=("", "_r")
    ),
    "groups": lambda orders, visits, own, other: orders.merge(
        visits.groupby(other).seconds.max().rename("most").reset_index(),
        left_on=own,
        right_on=other,
        suffixes=("", "_r"),
    ),
    "groups by fewer": lambda orders, visits, own, other: orders.merge(
        visits.groupby([*other, "seconds"]).size().rename("n").reset_index(),
        left_on=own,
        right_on=other,
        suffixes=("", "_r"),
    ),
    "some groups": lambda orders, visits, own, other: orders.merge(
        where(visits.groupby(other).size().rename("n").reset_index(), lambda df: df.n > 5),
        left_on=own,
        right_on=other,
        suffixes=("", "_r"),
    ),
    "index": lambda orders, visits, own, other: orders.merge(
        visits.groupby(other[0]).size().to_frame("n"), left_on=own[:1], right_index=True
    ),
    "not null": lambda orders, visits, own, other: where(
        orders.merge(
            visits.groupby(other[0]).size().to_frame("n"), left_on=own[:1], right_index=True, how="left"
        ),
        lambda df: ~df.n.isnull(),
    ),
}
LATER: dict[str, Callable[[Any], Any]] = {
    "columns": lambda rows: rows[["order", "ratio"]],
    "sum": lambda rows: rows.order.sum(),
    "sums": lambda rows: rows.groupby("order").ratio.max().reset_index(),
    "all": lambda rows: rows,
}
programs = st.tuples(
    st.sampled_from(sorted(KEYS)),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from(sorted(LATER)),
    st.booleans(),
)


def run(tables: Any, program: Any) -> Any:
    keys, way, later, is_filtered = program
    visits = tables("visits")
    visits = visits[visits.seconds > 20] if is_filtered else visits
    return LATER[later](WAYS[way](tables("orders"), visits, *KEYS[keys]))


@examples(60)
@given(program=programs)
def test_any_rows_with_a_match_are_those_of_pandas(read: Read, program: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, facts = planned(run(read, program))
        found = computed(plan, facts)
        expected = run(tables().__getitem__, program)
    if program[2] == "sum":
        assert found == expected
        return
    if program[1] == "subset of one":  # which row is kept is left open
        return
    assert_rows(found, expected)


CERTAIN = {"distinct", "distinct first", "groups", "index", "not null"}


@pytest.mark.parametrize("way", WAYS)
def test_neither_distinct_keys_nor_groups_are_made_to_find_a_match(read: Read, way: str) -> None:
    plan, _ = planned(run(read, ("visitor", way, "sum", False)))
    has_keys = any(isinstance(expr, (DropDuplicates, GroupByBase)) for expr in plan.walk())
    assert is_semi(plan) == (way in CERTAIN)
    assert has_keys == (way not in CERTAIN)


def joined(orders: Any, visits: Any, **options: Any) -> Any:
    return orders.merge(visits[["user"]].drop_duplicates(), on="user", **options)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "a column of the groups is used": lambda orders, visits: orders.merge(
        visits.groupby("user").seconds.max().reset_index(), on="user"
    ).seconds.sum(),
    "all rows are used": lambda orders, visits: joined(orders, visits, how="left").order.sum(),
    "it says where rows are from": lambda orders, visits: (
        joined(orders, visits, indicator=True)._merge.astype("string").max()
    ),
    "keys have other dtypes": lambda orders, visits: joined(
        orders, visits.astype({"user": "int32"})
    ).order.sum(),
    "one column is distinct": lambda orders, visits: orders.merge(
        visits[["user", "visitor"]].drop_duplicates(), on="user"
    ).order.sum(),
    "nulls are a group": lambda orders, visits: (
        orders.merge(
            visits.groupby("page", dropna=False).size().to_frame("n"), left_on="page", right_index=True
        )
    ).order.sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_joins_stay(read: Read, name: str) -> None:
    plan, facts = planned(REFUSED[name](read("orders"), read("visits")))
    assert not any(note.rule == "SemiJoins" for note in facts.notes)
    expected = REFUSED[name](*tables().values())
    assert computed(plan, facts) == expected


def test_keys_in_several_partitions_stay(read: Read) -> None:
    orders, visits = read("orders"), read("visits")
    distinct = visits[visits.columns.tolist()].drop_duplicates()
    _, facts = planned(orders.merge(distinct, on=["user", "page", "ratio"]).order.sum(), broadcast=0)
    assert not any(note.rule == "SemiJoins" for note in facts.notes)
