"""Know by which columns rows are divided, and claim it only if it is true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import optimize_until
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.partition_notes import divisions
from tests.helpers.clusters import Library, to_pandas
from tests.helpers.examples import examples
from tests.helpers.planned import by_size, value_of

pytestmark = pytest.mark.usefixtures("by_tasks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notes")
    for name, rows, files in (("left", 300, 5), ("right", 120, 4), ("wide", 300, 40)):
        number = np.arange(rows)
        columns = {
            "key": number * 7 % 40,
            "more": number % 3,
            name: number,
            "short": number.astype("int32") % 40,
        }
        table = pd.DataFrame({**columns, "real": columns["key"] * 1.0})
        dd.from_pandas(table, npartitions=files, sort=False).to_parquet(folder / name)
    return folder


@pytest.fixture(scope="module")
def read(library: Library, folder: Path) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        with dask.config.set({"dataframe.backend": library.name}):
            return dd.read_parquet(folder / name)

    return read


Program = Callable[[Any, Any], Any]


def joined(left: Any, right: Any, **how: Any) -> Any:
    return left.merge(right, **{"on": "key", "suffixes": ("_l", "_r"), **how})


def some_of(rows: Any) -> Any:
    return rows[rows.left > 7]


#: Programs on two tables, and the columns by which the rows of their results are divided.
PROGRAMS: dict[str, tuple[Program, list[set[str]]]] = {
    "an inner join": (joined, [{"key"}]),
    "two keys": (lambda left, right: joined(left, right, on=["key", "more"]), [{"key", "more"}]),
    "keys of two names": (
        lambda left, right: joined(left[["key", "left"]], right, left_on="left", right_on="right"),
        [{"left"}, {"right"}],
    ),
    "some rows and columns under other names": (
        lambda left, right: some_of(joined(left, right))[["left", "key"]].rename(
            columns={"key": "left", "left": "key"}
        ),
        [{"left"}],
    ),
    "a key that is assigned anew": (
        lambda left, right: joined(left, right).assign(key=lambda rows: rows.key // 3),
        [],
    ),
    "a key that is left out": (lambda left, right: joined(left, right)[["left"]], []),
    "a key with a suffix": (
        lambda left, right: joined(left, right, on=None, left_on="key", right_on="right"),
        [{"key_l"}, {"right"}],
    ),
    "a name that was another column's": (
        lambda left, right: joined(
            left.rename(columns={"key": "more_r", "more": "key"}),
            right,
            on=None,
            left_on="more_r",
            right_on="right",
        )[["key_l", "right"]],
        [{"right"}],
    ),
    "rows without a match": (
        lambda left, right: joined(
            left[["left"]], right, on=None, left_on="left", right_on="right", how="left"
        ),
        [{"left"}],
    ),
    "all rows": (
        lambda left, right: joined(
            left[["left"]], right, on=None, left_on="left", right_on="right", how="outer"
        ),
        [],
    ),
    "keys of two dtypes": (
        lambda left, right: joined(left, right, on=None, left_on="key", right_on="short"),
        [{"key_l"}, {"short_r"}],
    ),
    "a single partition": (lambda left, right: joined(left, right.repartition(npartitions=1)), []),
    "groups": (
        lambda left, right: joined(left, right).groupby("key").left.sum(split_out=True).reset_index(),
        [{"key"}],
    ),
    "a function of the user": (lambda left, right: joined(left, right).map_partitions(lambda part: part), []),
}


def divided_by(tuned: Any) -> set[frozenset[str]]:
    return {frozenset(each.columns) for each in divisions(tuned)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_divided_by_keys(read: Callable[[str], Any], name: str) -> None:
    build, columns = PROGRAMS[name]
    tuned = optimize_until(build(read("left"), read("right")).expr, "tuned-logical")
    assert divided_by(tuned) == {frozenset(each) for each in columns}


def test_rows_that_meet_a_broadcast_side_are_not_divided(read: Callable[[str], Any]) -> None:
    tuned = optimize_until(joined(read("wide"), read("right").partitions[:2]).expr, "simplified-logical")
    assert tuned.is_broadcast_join
    assert divided_by(tuned) == set()


def test_a_groupby_by_the_key_of_a_join_is_planned_by_size(folder: Path) -> None:
    """With pandas: dask_cudf would read files as small as these in two partitions by itself."""
    groups = (
        joined(dd.read_parquet(folder / "left"), dd.read_parquet(folder / "right"))
        .groupby(["key", "more_l"])
        .agg({"left": "sum"}, split_out=True)
    )
    result = groups.reset_index().left.sum()
    tuned = optimize_until(result.expr.finalize_compute(), "tuned-logical")
    plan = by_size(tuned, facts := Facts(PartitionSizes(1, 2, 1 << 30, 0)))
    counted = facts.metrics.snapshot()["counters"]
    assert counted == {
        "planning.reads.by-size": 1,
        "planning.reads.as-dask": 1,
    }  # Dask reads the other one in as few partitions
    assert value_of(lower(plan, "simplified-physical")) == result.compute()


def hashes(keys: Any, npartitions: int) -> Any:
    """Return the partitions to which Dask would shuffle rows with these keys."""
    columns = list(keys.columns)
    return AssignPartitioningIndex.operation(keys, columns, "to", npartitions, keys.iloc[:0], False)["to"]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("filter"), st.sampled_from("abcd"), st.integers(0, 5)),
        st.tuples(st.just("assign"), st.sampled_from("abcd"), st.sampled_from("abcd")),
        st.tuples(st.just("swap"), st.sampled_from("abcd"), st.sampled_from("abcd")),
        st.tuples(st.just("keep"), st.sampled_from("abcd"), st.sampled_from("abcd")),
    ),
    max_size=3,
)
sides = st.tuples(st.sampled_from(["left", "right", "wide"]), steps, st.sampled_from("abcd"))


def changed(frame: Any, steps: list[tuple[str, str, Any]]) -> Any:
    for kind, column, chosen in steps:
        if column not in frame.columns or (kind != "filter" and chosen not in frame.columns):
            continue
        if kind == "filter":
            frame = frame[frame[column] >= chosen]
        elif kind == "assign":
            frame = frame.assign(**{column: frame[chosen] // 2})
        elif kind == "swap":
            frame = frame.rename(columns={column: chosen, chosen: column})
        else:
            frame = frame[sorted({column, chosen})]
    return frame


def named(frame: Any) -> Any:
    return frame.rename(columns=dict(zip(frame.columns, ["a", "b", "c", "d", "e"], strict=True)))[[*"abcd"]]


@examples(2)
@given(one=sides, other=sides, how=st.sampled_from(["inner", "left", "right", "outer"]), after=steps)
def test_no_two_partitions_have_values_in_common(
    read: Callable[[str], Any], one: Any, other: Any, how: str, after: Any
) -> None:
    """What is said to divide rows does so, in the partitions that are computed."""
    (left, left_steps, left_on), (right, right_steps, right_on) = one, other
    frames = changed(named(read(left)), left_steps), changed(named(read(right)), right_steps)
    if left_on not in frames[0].columns or right_on not in frames[1].columns:
        return
    result = frames[0].merge(frames[1], left_on=left_on, right_on=right_on, how=how, suffixes=("", "_r"))
    tuned = optimize_until(changed(result, after).expr, "tuned-logical")
    claims = divisions(tuned)
    lowered = lower(tuned, "simplified-physical")
    parts = dask.get(lowered.__dask_graph__(), lowered.__dask_keys__())
    for columns, hashed in claims:
        found = [set(to_pandas(part)[[*columns]].itertuples(index=False, name=None)) for part in parts]
        assert len(set().union(*found)) == sum(map(len, found)), columns
        for number, part in enumerate(parts if hashed else ()):
            assert set(to_pandas(hashes(part[[*columns]], len(parts)))) <= {number}  # of its library
