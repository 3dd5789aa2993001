"""Check which aggregates are computed, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import FinalizeCompute, optimize_until
from dask.base import collections_to_expr
from dask.dataframe.dask_expr._expr import Assign
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import lower, read_of
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.used_aggregates import UsedAggregates, UsedAssignments
from tests.helpers.clusters import canonical
from tests.helpers.examples import examples
from tests.helpers.planned import value_of

pytestmark = pytest.mark.usefixtures("by_tasks")


def table() -> pd.DataFrame:
    at = np.arange(60)
    return pd.DataFrame(
        {
            "key": at % 7,
            "other": at % 4,
            "x": np.where(at % 9, at / 3, np.nan),
            "n": at,
            "s": pd.array([None if i % 8 == 0 else f"s{i % 5}" for i in at], dtype="string"),
            "d": pd.Timestamp("2024-01-01") + pd.to_timedelta(at % 11, "D"),
        }
    )


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    folder = tmp_path_factory.mktemp("aggregates")
    dd.from_pandas(table(), npartitions=3, sort=False).to_parquet(folder, write_index=False)
    return lambda: dd.read_parquet(folder)


def tuned(result: Any) -> Any:
    """Return the tuned plan of a computation that the rules have changed."""
    plan: Any = FinalizeCompute(collections_to_expr([result]))
    facts = Facts(PartitionSizes(1, 1))
    changed = optimize_until(UsedAggregates().apply(plan, facts), "tuned-logical")
    return UsedAssignments().apply(changed, facts)


GROUPED: dict[str, Callable[[Any, Any], Any]] = {
    "by column": lambda rows, by: rows.groupby(by).agg({"x": "sum", "n": "max", "s": "count", "d": "min"}),
    "by name": lambda rows, by: rows.groupby(by).agg(
        x=("x", "mean"), n=("n", "min"), s=("x", "count"), d=("d", "max")
    ),
}
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "reset": lambda groups, name: groups.reset_index(),
    "project": lambda groups, name: groups[[name]],
    "drop": lambda groups, name: groups.drop(columns=[name]),
    "filter": lambda groups, name: groups[groups[name].notnull() & (groups.n > 20)],
    "assign": lambda groups, name: groups.assign(new=groups[name], day=groups.d.dt.day + 1),
    "rename": lambda groups, name: groups.rename(columns={name: "renamed"}),
    "join": lambda groups, name: groups.merge(groups[[name]], on=name, suffixes=("", "_r")),
    "sort": lambda groups, name: groups.sort_values("n"),
    "group": lambda groups, name: groups.reset_index().groupby(name).agg({"n": "sum", "x": "max"}),
}


@examples(12)
@given(
    grouped=st.sampled_from(sorted(GROUPED)),
    by=st.sampled_from(["key", ["key", "other"]]),
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from("xnsd")), max_size=4),
    last=st.sampled_from("xnsd"),
)
def test_results_are_those_of_all_aggregates(
    read: Callable[[], Any], grouped: str, by: Any, steps: list[tuple[str, str]], last: str
) -> None:
    def program(rows: Any) -> Any:
        groups = GROUPED[grouped](rows, by)
        for step, name in steps:
            groups = STEPS[step](groups, name)
        return groups[[last]]

    try:
        expected = program(table())
        result = program(read())
        len(result.columns)
    except Exception:
        return  # a step that the groups so far do not have
    found = value_of(lower(tuned(result), "fused"))
    assert list(found.columns) == list(expected.columns)
    ours, theirs = (canonical(each, index=False).reset_index(drop=True) for each in (found, expected))
    pd.testing.assert_frame_equal(ours, theirs, check_dtype=False, check_index_type=False)


USED: list[tuple[Callable[[Any], Any], set[str]]] = [
    (lambda groups: groups[["n"]], {"key", "n"}),
    (lambda groups: groups.n.sum(), {"key", "n"}),
    (lambda groups: groups.reset_index().drop(columns=["s", "d"]), {"key", "x", "n"}),
    (lambda groups: groups[groups.x > 3][["n"]], {"key", "x", "n"}),
    (lambda groups: groups.assign(new=groups.s * 2, later=groups.n + 1)[["later"]], {"key", "n"}),
    (
        lambda groups: groups.reset_index().groupby("n").agg({"x": "sum", "d": "max"})[["x"]],
        {"key", "n", "x"},
    ),
    (lambda groups: groups, {"key", "x", "n", "s", "d"}),
]


@pytest.mark.parametrize(("use", "columns"), USED)
def test_only_columns_of_used_aggregates_are_read(
    read: Callable[[], Any], use: Callable[[Any], Any], columns: set[str]
) -> None:
    plan = tuned(use(GROUPED["by column"](read(), "key")))
    (found,) = {tuple(each.columns) for each in map(read_of, plan.walk()) if each is not None}
    assert set(found) == columns
    assert not [each for each in plan.walk() if type(each) is Assign and {*each.keys} - {"later"}]
