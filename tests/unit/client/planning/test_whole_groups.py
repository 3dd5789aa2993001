"""Check that medians of groups are those of ``tasks``, in its order, without a shuffle into one partition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._shuffle import ShuffleBase
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.reads import lower
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.whole_groups import WholeGroups
from tests.helpers.examples import examples
from tests.helpers.planned import value_of
from tests.helpers.rules import ONE_THREAD, tuned

KEYS = {
    "number": st.integers(-3, 3),
    "ratio": st.sampled_from([0.5, -1.5, np.nan, -0.0, 0.0]),
    "name": st.sampled_from(["a", "b", "é", None]),
    "when": st.sampled_from([pd.Timestamp("2020-01-01"), pd.Timestamp("1969-12-31 12:00"), pd.NaT]),
}
AGGREGATIONS = [
    {"value": ["median", "std"]},
    {"value": "median", "other": ["sum", "count"]},
    {"other": ["median", "first", "last"]},
    "median",
    ["median", "max"],
]


pytestmark = pytest.mark.usefixtures("by_tasks")


def ruled(result: Any) -> tuple[Any, Facts]:
    """Return the tuned plan of a computation after the rule, and what the rule has noted."""
    facts = Facts(ONE_THREAD)
    return WholeGroups().apply(tuned(result), facts), facts


def planned(result: Any) -> Any:
    return lower(ruled(result)[0], "simplified-physical")


def is_shuffled(plan: Any) -> bool:
    return any(isinstance(expr, ShuffleBase) for expr in plan.walk())


@st.composite
def rows(draw: st.DrawFn) -> dd.DataFrame:
    """Draw a frame in partitions, of which some have no rows."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=2, max_size=4))
    total = sum(lengths)
    columns = {name: draw(st.lists(key, min_size=total, max_size=total)) for name, key in KEYS.items()}
    frame = pd.DataFrame(columns).astype({"number": "int64", "name": "str", "when": "M8[us]"})
    values = st.lists(st.sampled_from([0.1, 0.2, 1e9, np.nan]), min_size=total, max_size=total)
    frame["value"] = np.array(draw(values), dtype="float64")
    frame["other"] = np.arange(total)
    frame.index = frame.index[::-1]
    ends = np.cumsum([0, *lengths])
    parts = [frame.iloc[start:end] for start, end in pairwise(ends)]
    return dd.from_map(lambda part: part, parts, meta=frame.iloc[:0])


@examples(15)
@given(
    frame=rows(),
    by=st.lists(st.sampled_from([*KEYS]), min_size=1, max_size=3, unique=True),
    arg=st.sampled_from(AGGREGATIONS),
    options=st.fixed_dictionaries(
        {},
        optional={"dropna": st.booleans(), "observed": st.booleans(), "sort": st.sampled_from([None, False])},
    ),
)
def test_groups_are_those_of_tasks_in_its_order(
    frame: dd.DataFrame, by: list[str], arg: Any, options: dict[str, Any]
) -> None:
    groups = frame[[*by, "value", "other"]].groupby(by if len(by) > 1 else by[0], **options)
    result = (groups if isinstance(arg, dict) else groups["value"]).agg(arg)
    plan = planned(result)
    assert not is_shuffled(plan)
    try:
        expected = result.compute()
    except Exception as error:  # such as of a text that is summed
        with pytest.raises(type(error)):
            value_of(plan)
        return
    pd.testing.assert_frame_equal(value_of(plan), expected, check_exact=True)


FRAME = pd.DataFrame({"key": [1, 2, 1, 3] * 5, "kind": ["a", "b"] * 10, "value": np.arange(20) / 3})


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda rows: rows.astype({"kind": "category"}).groupby("kind"), "there are categories"),
        (lambda rows: rows.groupby("key", sort=True), "groups are sorted"),
        (lambda rows: rows.groupby(rows.key + 1), "grouped by other than columns"),
        (lambda rows: rows.value.groupby(rows.key), "not of a frame"),
        (lambda rows: rows.astype({"key": "int16"}).groupby("key"), "short integers"),
        (lambda rows: rows.shuffle("key").groupby("key"), "whole groups already"),
        (lambda rows: rows.repartition(npartitions=1).groupby("key"), "1 partitions become 1"),
    ],
)
def test_groups_that_are_left_to_a_shuffle(result: Any, reason: str) -> None:
    groups = result(dd.from_pandas(FRAME, npartitions=4))
    spec = ["median"] if groups.obj.ndim == 1 else {"value": "median"}
    _, facts = ruled(groups.agg(spec))
    assert [(note.done, reason in note.text) for note in facts.notes] == [(False, True)], facts.notes


def test_groups_in_several_partitions_are_shuffled() -> None:
    assert is_shuffled(
        planned(dd.from_pandas(FRAME, npartitions=4).groupby("key").agg({"value": "median"}, split_out=2))
    )


def test_what_dask_decomposes_is_left() -> None:
    _, facts = ruled(dd.from_pandas(FRAME, npartitions=4).groupby("key").agg({"value": "mean"}))
    assert facts.notes == []
