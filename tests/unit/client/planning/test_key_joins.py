"""Check which joins only look keys up and which groups they need, and that results stay the same."""

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

from dask_gpurt.client.planning.cache import RULES
from dask_gpurt.client.planning.rules import Facts, PartitionSizes, needed_groups
from dask_gpurt.client.planning.rules.anti_joins import DistinctKeys
from dask_gpurt.client.planning.rules.dependence import why_dependent
from dask_gpurt.client.planning.table_facts import FilesChangedError
from tests.helpers.examples import examples
from tests.helpers.rules import Read, apply_rules, assert_rows, computed, corrected, ruled, stored, tuned

__all__ = ["corrected"]

pytestmark = pytest.mark.usefixtures("by_tasks")

# ---- only the groups that a join looks for --------------------------------------------------------


def tables() -> dict[str, pd.DataFrame]:
    """Return readings of sensors, and of sensors and of sites those that some programs ask for."""
    at = np.arange(120)
    names = pd.array([None if i % 11 == 0 else f"s{i % 7}" for i in at], dtype="string")
    return {
        "readings": pd.DataFrame(
            {
                "sensor": at * 7 % 23,
                "site": names,
                "hour": pd.Series(pd.Timestamp("2026-01-01") + pd.to_timedelta(at % 9, "h")).where(
                    at % 13 != 0
                ),
                "value": at * 5 % 31,
            }
        ),
        "sensors": pd.DataFrame(
            {
                "sensor": np.arange(20),
                "id": np.arange(20)[::-1],
                "kind": [f"k{i % 4}" for i in range(20)],
                "place": pd.array([None if i % 6 == 0 else f"s{i % 8}" for i in range(20)], dtype="string"),
            }
        ),
        "sites": pd.DataFrame(
            {
                "site": pd.array(["s0", "s1", "s2", None, "s4", "s9"], dtype="string"),
                "height": [3, 1, 4, 1, 5, 9],
                "since": pd.Timestamp("2026-01-01") + pd.to_timedelta([0, 1, 2, 3, 4, 30], "h"),
            }
        ),
    }


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("sensors"), tables(), readings=3)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take any keys for few."""
    monkeypatch.setattr(needed_groups, "FEW", 1e6)
    monkeypatch.setattr(needed_groups, "WORTHWHILE", 0)


def planned(result: Any, broadcast: int | None = None) -> tuple[Any, Facts]:
    """Return the plan of a result that rules have changed, and their facts."""
    plan, facts = ruled(result, sizes=PartitionSizes(1, 2, broadcast=broadcast))
    return apply_rules(tuned(plan), facts, *RULES), facts


def chosen(facts: Facts) -> int:
    return sum(note.rule == "NeededGroups" for note in facts.notes)


KEYS: list[Any] = ["sensor", "site", ["sensor", "site"], "hour"]
GROUPED: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda rows, by: rows.groupby(by).value.mean().rename("of_all").reset_index(),
    "agg": lambda rows, by: rows.groupby(by).agg({"value": "max"}).rename(columns={"value": "of_all"}),
    "size": lambda rows, by: rows.groupby(by).size().rename("of_all").to_frame(),
    "with nulls": lambda rows, by: rows.groupby(by, dropna=False).value.sum().rename("of_all").reset_index(),
    "kinds": lambda rows, by: rows.groupby(by).value.nunique().rename("of_all").reset_index(),
}


def joined(rows: Any, groups: Any, by: Any, how: str) -> Any:
    keys = [by] if isinstance(by, str) else by
    if not set(keys) <= {*groups.columns}:
        if len(keys) == 1 and how in ("inner", "left"):
            return rows.merge(groups, left_on=keys, right_index=True, how=how)
        groups = groups.reset_index()
    if how == "right":
        return groups.merge(rows, on=by, how="right")
    return rows.merge(groups, on=by, how=how)


def with_others(rows: Any, tables: Any, which: int, is_first: bool) -> Any:
    sensors, sites = tables("sensors"), tables("sites")
    sensors = sensors[sensors.kind == "k1"] if which % 2 else sensors[sensors.id > 6]
    if which % 3 == 0:
        return rows.merge(sensors[["sensor", "kind"]], on="sensor")
    if which % 3 == 1:
        return rows.merge(sites[sites.height > 2][["site", "height"]], on="site", how="inner")
    sides = (sensors[["id", "place"]], rows) if is_first else (rows, sensors[["id", "place"]])
    names = ("id", "sensor") if is_first else ("sensor", "id")
    return sides[0].merge(sides[1], left_on=names[0], right_on=names[1])


def run(tables: Any, program: Any) -> Any:
    by, grouped, how, is_filtered, others, is_small, is_kept = program
    rows = tables("readings")
    groups = GROUPED[grouped](rows[rows.value > 3] if is_filtered else rows, by)
    groups = groups[groups.of_all > 2] if is_kept else groups
    if is_small:
        found = with_others(rows[rows.value > 25], tables, others[0][0], others[0][1])
        found = joined(found, groups, by, how)
    else:
        found = joined(rows, groups, by, how)
        for which, is_first in others:
            if not {"kind", "height", "place"} & {*found.columns}:
                found = with_others(found, tables, which, is_first)
    return found[["sensor", "site", "value", "of_all"]]


programs = st.tuples(
    st.sampled_from(KEYS),
    st.sampled_from(sorted(GROUPED)),
    st.sampled_from(["inner", "inner", "left", "right"]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=2),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.usefixtures("forced")
@examples(40)
@given(program=programs)
def test_any_groups_that_are_joined_are_those_of_pandas(read: Read, program: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, facts = planned(run(read, program))
        found = computed(plan, facts)
        expected = run(tables().__getitem__, program)
    assert_rows(found, expected)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("by", ["sensor", ["sensor", "site"]])
@pytest.mark.parametrize("grouped", sorted({*GROUPED} - {"with nulls"}))
def test_groups_are_found_however_they_are_joined(read: Read, grouped: str, by: Any) -> None:
    for is_small in (True, False):
        _, facts = planned(run(read, (by, grouped, "inner", True, [(0, False)], is_small, True)))
        assert chosen(facts) >= 1


def below_their_means(tables: Any) -> Any:
    """Return the readings below the mean of their sensor, of some kind: a condition that is written last."""
    rows, sensors = tables("readings"), tables("sensors")
    means = rows.groupby("sensor").value.mean().rename("mean").reset_index()
    rows = rows.merge(means, on="sensor").merge(sensors, on="sensor")
    rows = rows[(rows.kind == "k1") & (rows.value < rows["mean"])]
    return rows.value.sum()


@pytest.mark.usefixtures("forced")
def test_means_are_those_of_the_sensors_of_a_kind(read: Read) -> None:
    plan, facts = planned(below_their_means(read))
    assert chosen(facts) >= 1
    assert any(type(expr) is Merge and expr.how == "leftsemi" for expr in plan.walk())
    assert computed(plan, facts) == below_their_means(tables().__getitem__)


def test_small_tables_are_left(read: Read) -> None:
    assert chosen(planned(below_their_means(read))[1]) == 0


def test_keys_that_are_many_are_left(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed_groups, "WORTHWHILE", 0)
    rows, sensors = read("readings"), read("sensors")
    means = rows.groupby("sensor").value.mean().rename("mean").reset_index()
    assert chosen(planned(sensors.merge(means, on="sensor")["mean"].max())[1]) == 0


def of_groups(rows: Any) -> Any:
    return rows.groupby("sensor").value.sum().rename("total").reset_index()


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "all rows are kept": lambda rows, few: of_groups(rows).merge(few, on="sensor", how="left").total.sum(),
    "another part uses the groups": lambda rows, few: (
        of_groups(rows).merge(few, on="sensor").total.sum() + of_groups(rows).total.max()
    ),
    "nulls are a group": lambda rows, few: (
        rows.groupby("sensor", dropna=False).value.sum().rename("total").reset_index().merge(few, on="sensor")
    ).total.sum(),
    "the key is computed": lambda rows, few: (
        of_groups(rows).assign(sensor=lambda df: df.sensor + 1).merge(few, on="sensor").total.sum()
    ),
    "the key has another dtype": lambda rows, few: (
        of_groups(rows).merge(few.astype({"sensor": "int32"}), on="sensor").total.sum()
    ),
    "the key is of floats": lambda rows, few: (
        of_groups(rows.astype({"sensor": "float64"})).merge(few.astype({"sensor": "float64"}), on="sensor")
    ).total.sum(),
    "keys are in several partitions": lambda rows, few: (
        of_groups(rows).merge(rows[rows.value > 29][["sensor"]], on="sensor").total.sum()
    ),
}


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_may_be_needed_stay(read: Read, name: str) -> None:
    few = read("sensors")
    result = REFUSED[name](read("readings"), few[few.kind == "k1"][["sensor", "id"]])
    assert chosen(planned(result, broadcast=0)[1]) == 0


# ---- joins that only look for a match -------------------------------------------------------------


def shop_tables() -> dict[str, pd.DataFrame]:
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
def shop(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("shop"), shop_tables(), 2, orders=3)


def where(rows: Any, condition: Callable[[Any], Any]) -> Any:
    return rows[condition(rows)]


def is_semi(plan: Any) -> bool:
    kinds = [expr.how for expr in plan.walk() if type(expr) is Merge]
    return kinds == ["leftsemi"]


MATCHED: dict[str, tuple[list[str], list[str]]] = {
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
AFTER_MATCHES: dict[str, Callable[[Any], Any]] = {
    "columns": lambda rows: rows[["order", "ratio"]],
    "sum": lambda rows: rows.order.sum(),
    "sums": lambda rows: rows.groupby("order").ratio.max().reset_index(),
    "all": lambda rows: rows,
}
lookups = st.tuples(
    st.sampled_from(sorted(MATCHED)),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from(sorted(AFTER_MATCHES)),
    st.booleans(),
)


def look_up(source: Any, program: Any) -> Any:
    keys, way, later, is_filtered = program
    visits = source("visits")
    visits = visits[visits.seconds > 20] if is_filtered else visits
    return AFTER_MATCHES[later](WAYS[way](source("orders"), visits, *MATCHED[keys]))


@examples(60)
@given(program=lookups)
def test_any_rows_with_a_match_are_those_of_pandas(shop: Read, program: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, facts = planned(look_up(shop, program))
        found = computed(plan, facts)
        expected = look_up(shop_tables().__getitem__, program)
    if program[2] == "sum":
        assert found == expected
        return
    assert_rows(found, expected)


CERTAIN = {"distinct", "distinct first", "groups", "index", "not null"}


@pytest.mark.parametrize("way", WAYS)
def test_neither_distinct_keys_nor_groups_are_made_to_find_a_match(shop: Read, way: str) -> None:
    plan, _ = planned(look_up(shop, ("visitor", way, "sum", False)))
    has_keys = any(isinstance(expr, (DropDuplicates, GroupByBase)) for expr in plan.walk())
    assert is_semi(plan) == (way in CERTAIN)
    assert has_keys == (way not in CERTAIN)


def with_distinct(orders: Any, visits: Any, **options: Any) -> Any:
    return orders.merge(visits[["user"]].drop_duplicates(), on="user", **options)


OTHER_JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "a column of the groups is used": lambda orders, visits: orders.merge(
        visits.groupby("user").seconds.max().reset_index(), on="user"
    ).seconds.sum(),
    "all rows are used": lambda orders, visits: with_distinct(orders, visits, how="left").order.sum(),
    "it says where rows are from": lambda orders, visits: (
        with_distinct(orders, visits, indicator=True)._merge.astype("string").max()
    ),
    "nulls are a group": lambda orders, visits: (
        orders.merge(
            visits.groupby("page", dropna=False).size().to_frame("n"), left_on="page", right_index=True
        )
    ).order.sum(),
}


@pytest.mark.parametrize("name", OTHER_JOINS)
def test_other_joins_stay(shop: Read, name: str) -> None:
    plan, facts = planned(OTHER_JOINS[name](shop("orders"), shop("visits")))
    assert not any(note.rule == "SemiJoins" for note in facts.notes)
    expected = OTHER_JOINS[name](*shop_tables().values())
    assert computed(plan, facts) == expected


def test_keys_in_several_partitions_stay(shop: Read) -> None:
    orders, visits = shop("orders"), shop("visits")
    distinct = visits[visits.columns.tolist()].drop_duplicates()
    _, facts = planned(orders.merge(distinct, on=["user", "page", "ratio"]).order.sum(), broadcast=0)
    assert not any(note.rule == "SemiJoins" for note in facts.notes)


# ---- left joins that look rows up in distinct keys ------------------------------------------------


def two_tables() -> dict[str, pd.DataFrame]:
    """Return two tables whose keys occur often, once, or not, with nulls among them."""
    at, of = np.arange(80), np.arange(50)
    names = [None if i % 7 == 0 else f"n{i % 12}" for i in at]
    left = pd.DataFrame({"key": at % 23, "ratio": np.where(at % 9, at % 17, np.nan), "name": names, "id": at})
    right = pd.DataFrame(
        {
            "key": of % 13,
            "ratio": np.where(of % 8, of % 11, np.nan),
            "name": [None if i % 5 == 0 else f"n{i % 8}" for i in of],
            "other": of % 13,
            "number": of,
            "gaps": [None if i % 4 else "gap" for i in of],
        }
    )
    return {"left": left, "right": right}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("anti"), two_tables(), 4)


def looks_up_distinct_keys(plan: Any) -> bool:
    return any(isinstance(each, DistinctKeys) for each in plan.walk())


TESTS: dict[str, Callable[[Any], Any]] = {
    "number": lambda rows: rows.number.isnull(),
    "not number": lambda rows: ~rows.number.notnull(),
    "indicator": lambda rows: rows._merge == "left_only",
    "gaps": lambda rows: rows.gaps.isnull(),
    "ratio": lambda rows: rows.ratio_r.isnull(),
    "either": lambda rows: rows.number.isnull() | (rows.id < 9),
    "both": lambda rows: rows.number.isnull() & (rows.id > 9),
}
FOUND_BY = {"number", "not number", "indicator", "both"}
AFTER_GAPS: dict[str, Callable[[Any], Any]] = {
    "all": lambda rows: rows.drop(columns="_merge"),
    "left": lambda rows: rows[["id", "name"]],
    "right": lambda rows: rows[["id", "number", "gaps"]],
    "sum": lambda rows: rows.groupby("id").key.sum().reset_index(),
}


@examples(12)
@given(
    on=st.sampled_from(["key", None, "ratio", ["key", "name"]]),
    test=st.sampled_from(sorted(TESTS)),
    later=st.sampled_from(sorted(AFTER_GAPS)),
    is_chosen=st.booleans(),
)
def test_rows_without_a_match_are_those_of_pandas(
    two: Read, on: Any, test: str, later: str, is_chosen: bool
) -> None:
    def program(left: Any, right: Any) -> Any:
        right = right[right.number > 20] if is_chosen else right
        names = {"on": on} if on else {"left_on": "key", "right_on": "other"}
        rows = left.merge(right, how="left", suffixes=("", "_r"), indicator=True, **names)
        rows = rows.assign(ratio_r=0.0) if "ratio_r" not in rows.columns else rows
        return AFTER_GAPS[later](rows[TESTS[test](rows)])

    plan, facts = ruled(program(two("left"), two("right")))
    assert looks_up_distinct_keys(plan) == (test in FOUND_BY and on in ("key", None))
    assert_rows(computed(tuned(plan), facts), program(*two_tables().values()))


def test_partitions_do_not_matter_to_distinct_keys(two: Read) -> None:
    rows = two("left").merge(two("right")[["key", "number"]], on="key", how="left")
    plan, _ = ruled(rows[rows.number.isnull()].id.sum())
    assert looks_up_distinct_keys(plan)
    assert why_dependent(tuned(plan)) is None


def test_a_file_that_has_nulls_by_then_is_noticed(tmp_path: Any) -> None:
    left, right = two_tables().values()
    right = right.assign(number=pd.array(right.number, dtype="Int64"))
    two = stored(tmp_path, {"left": left, "right": right})
    rows = two("left").merge(two("right"), on="key", how="left")
    plan, facts = ruled(rows[rows.number.isnull()].id.sum())
    with_nulls = right.assign(number=right.number.where(right.number > 3))
    with_nulls.to_parquet(tmp_path / "right" / "part.0.parquet")
    with pytest.raises(FilesChangedError):
        computed(tuned(plan), facts)
