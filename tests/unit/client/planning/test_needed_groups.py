"""Check of which groups only those are aggregated that a join looks for, and that results stay the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._merge import Merge
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.cache import RULES
from dask_gpurt.client.planning.rules import Facts, PartitionSizes, needed_groups
from tests.helpers.examples import examples
from tests.helpers.rules import Read, apply_rules, assert_rows, computed, corrected, ruled, stored, tuned

__all__ = ["corrected"]

pytestmark = pytest.mark.usefixtures("by_tasks")


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
    "all rows are kept on both sides": lambda rows, few: (
        of_groups(rows).merge(few, on="sensor", how="outer").total.sum()
    ),
    "another part uses the groups": lambda rows, few: (
        of_groups(rows).merge(few, on="sensor").total.sum() + of_groups(rows).total.max()
    ),
    "nulls are a group": lambda rows, few: (
        rows.groupby("sensor", dropna=False).value.sum().rename("total").reset_index().merge(few, on="sensor")
    ).total.sum(),
    "the key is computed": lambda rows, few: (
        of_groups(rows).assign(sensor=lambda df: df.sensor + 1).merge(few, on="sensor").total.sum()
    ),
    "the key is no key of the groups": lambda rows, few: (
        of_groups(rows).merge(few, left_on="total", right_on="sensor").total.sum()
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
    "rows have numbers that show": lambda rows, few: (
        of_groups(rows).merge(few, on="sensor").cumsum()[["total"]].repartition(npartitions=1)
    ),
}


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_may_be_needed_stay(read: Read, name: str) -> None:
    few = read("sensors")
    result = REFUSED[name](read("readings"), few[few.kind == "k1"][["sensor", "id"]])
    assert chosen(planned(result, broadcast=0)[1]) == 0
