"""Check in which order tables are joined, and that results stay the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._merge import Merge
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning import join_order
from dask_gpurt.client.planning.join_order import JoinOrder, costs
from dask_gpurt.client.planning.join_order.costs import RowEstimates
from dask_gpurt.client.planning.reads import files_of, read_of
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.sorting import SortOnce
from dask_gpurt.client.planning.table_facts import TableFacts
from tests.helpers.clusters import canonical
from tests.helpers.examples import examples
from tests.helpers.rules import Read, apply_rules, computed, ruled, stored, tuned

pytestmark = pytest.mark.usefixtures("by_tasks")


def texts(values: Any) -> Any:
    return pd.array([None if value == 3 else f"t{value}" for value in values], dtype="string")


def tables() -> dict[str, pd.DataFrame]:
    """Return sales and what they refer to, with nulls in keys and names that several of them have."""
    at = np.arange(60)
    days = pd.Series(pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(12), "D"))
    return {
        "sales": pd.DataFrame(
            {
                "item": at * 7 % 12,
                "shop": at * 5 % 8,
                "day": days.reindex(at % 14).to_numpy(),
                "code": texts(at % 6),
                "price": at * 0.5,
            }
        ),
        "items": pd.DataFrame(
            {"id": np.arange(12), "kind": np.arange(12) % 5, "code": texts(np.arange(12) % 6), "price": 2.0}
        ),
        "shops": pd.DataFrame({"shop": np.arange(8), "town": np.arange(8) % 4, "name": texts(np.arange(8))}),
        "towns": pd.DataFrame({"id": np.arange(4), "name": texts(np.arange(4)), "kind": np.arange(4) % 3}),
        "days": pd.DataFrame({"day": days, "week": np.arange(12) // 7, "name": texts(np.arange(12) % 5)}),
        "kinds": pd.DataFrame({"kind": [0, 1, 2, 3, 4], "id": [4, 3, 2, 1, 0], "label": texts(range(5))}),
    }


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return stored(tmp_path_factory.mktemp("tables"), tables(), 1, sales=3, items=2)


def planned(result: Any, *rules: Any) -> tuple[Any, Facts]:
    """Return the tuned plan of a computation, changed by another rule, and its facts."""
    plan, facts = ruled(result, sizes=PartitionSizes(2, 2))
    return apply_rules(tuned(plan), facts, SortOnce(), *rules), facts


# ---- random programs ------------------------------------------------------------------------------

MOST_ROWS = 2_000
SUFFIXES = [("_x", "_y"), ("", "_r"), ("_l", "")]


def keys_of(one: Any, other: Any, number: int) -> tuple[list[Any], list[Any]]:
    """Return one or two pairs of columns of the same dtype, which is not that of floats."""
    pairs = [
        (left, right)
        for left in one.columns
        for right in other.columns
        if one[left].dtype == other[right].dtype and str(one[left].dtype) != "float64"
    ]
    chosen = [pairs[number % len(pairs)]]
    second = pairs[(number // 7) % len(pairs)]
    if number % 5 == 0 and second[0] != chosen[0][0] and second[1] != chosen[0][1]:
        chosen.append(second)
    return [left for left, _ in chosen], [right for _, right in chosen]


def joined(one: Any, other: Any, number: int) -> Any:
    common = [name for name in one.columns if name in other.columns and str(one[name].dtype) != "float64"]
    suffixes = SUFFIXES[number % 3]
    if common and number % 4 == 0:
        return one.merge(other, on=common[number % len(common)], suffixes=suffixes)
    left, right = keys_of(one, other, number)
    return one.merge(other, left_on=left, right_on=right, suffixes=suffixes)


def equal(frame: Any, number: int) -> Any:
    left, right = keys_of(frame, frame, number)
    return frame[frame[left[0]] == frame[right[0]]]


def chosen(frame: Any, number: int) -> Any:
    name = frame.columns[number % len(frame.columns)]
    if str(frame[name].dtype) in ("int64", "float64"):
        return frame[(frame[name] > 1) | (frame[frame.columns[0]].isnull())]
    return frame[frame[name].notnull()] if number % 2 else frame[frame[name] != frame[name].max()]


def summed(frame: Any, number: int) -> Any:
    names = [name for name in frame.columns if str(frame[name].dtype) in ("int64", "float64")]
    one, other = names[number % len(names)], names[number // 3 % len(names)]
    return frame.assign(**{["new", one][number % 2]: frame[one] + frame[other] * 2})


def some(frame: Any, number: int) -> Any:
    return frame[[name for at, name in enumerate(frame.columns) if at == 0 or (number >> at) % 2 == 0]]


def looked_up(frame: Any, other: Any, number: int) -> Any:
    left, right = keys_of(frame, other, number)
    lookup = other.set_index(right[0])
    return frame.merge(lookup, left_on=left[0], right_index=True, suffixes=SUFFIXES[number % 3])


STEPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "join": joined,
    "look up": looked_up,
    "join from the left": lambda frame, other, number: joined(other, frame, number),
    "equal": lambda frame, other, number: equal(frame, number),
    "choose": lambda frame, other, number: chosen(frame, number),
    "assign": lambda frame, other, number: summed(frame, number),
    "some": lambda frame, other, number: some(frame, number),
    "rename": lambda frame, other, number: frame.rename(
        columns={frame.columns[number % len(frame.columns)]: f"r{number % 3}"}
    ),
}
_names = st.sampled_from(list(tables()))
_numbers = st.integers(0, 60)
_joins = st.tuples(st.sampled_from(["join", "join", "join from the left", "look up"]), _numbers)
_between = st.tuples(st.sampled_from(["equal", "choose", "assign", "some", "rename"]), _numbers)
#: Tables or trees of joins that are joined with each other, with some operations in between.
_trees = st.recursive(
    _names, lambda tree: st.tuples(tree, _joins, tree, st.lists(_between, max_size=2)), max_leaves=6
)


def built(source: Read, tree: Any) -> Any:
    """Build a frame of dask or pandas; operations that its columns do not allow are left out."""
    if isinstance(tree, str):
        return source(tree)
    one, join, other, steps = tree
    frame, right = built(source, one), built(source, other)
    for kind, number in [join, *steps]:
        try:
            made = STEPS[kind](frame, right, number)
            len(made.columns)
        except (KeyError, ValueError, ZeroDivisionError, TypeError, NotImplementedError):
            continue
        if len({*made.columns}) == len(made.columns):
            frame = made
    return frame


@examples(12)
@given(tree=_trees)
def test_results_are_the_same_in_any_order(read: Read, tree: Any) -> None:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(costs, "TO_JOIN", -9.0)  # the more bytes are joined the better, which changes most
        patch.setattr(join_order, "WORTHWHILE", -1e9)
        expected = built(tables().__getitem__, tree)
        if len(expected) > MOST_ROWS:
            return
        result = built(read, tree)
        try:
            by_dask = computed(planned(result)[0])
        except KeyError:
            return  # Dask looks for a column that a suffix has renamed
        found = canonical(computed(planned(result, JoinOrder())[0]), index=False)
        pd.testing.assert_frame_equal(found, canonical(by_dask, index=False))
        pd.testing.assert_frame_equal(found, canonical(expected, index=False), check_dtype=False)


# ---- which order ----------------------------------------------------------------------------------


def order_of(expr: Any) -> Any:
    """Return a plan as the tables that are joined, a join as a list of two of them."""
    if type(expr) is Merge:
        return [order_of(expr.left), order_of(expr.right)]
    if (table := read_of(expr)) is not None:
        return Path(files_of(table)[0]).parent.name
    return order_of(expr.dependencies()[0])


Program = Callable[[dict[str, Any]], Any]

#: Programs that join large tables first, the order by sizes, and columns by which tables are joined then.
LARGE_FIRST: dict[str, tuple[Program, Any]] = {
    "a snowflake": (
        lambda of: (
            of["sales"]
            .merge(of["shops"], on="shop")
            .merge(of["towns"], left_on="town", right_on="id")
            .pipe(lambda rows: rows[rows.kind == 2])
            .groupby("name_x")
            .price.sum()
            .reset_index()
        ),
        ["sales", ["shops", "towns"]],
    ),
    "many to many": (
        lambda of: (
            of["sales"]
            .merge(of["items"], on="code", suffixes=("", "_i"))
            .merge(of["towns"], left_on="kind", right_on="kind", suffixes=("", "_t"))
            .pipe(lambda rows: rows[(rows.id_t == 1) & (rows.item == rows.id)])
            .price.sum()
        ),
        ["sales", ["items", "towns"]],
    ),
    "keys with other names": (
        lambda of: (
            of["sales"]
            .rename(columns={"day": "sold"})
            .merge(of["days"], left_on="sold", right_on="day")
            .assign(twice=lambda rows: rows.price * 2)
            .merge(of["kinds"].rename(columns={"kind": "number"}), left_on="week", right_on="number")
            .pipe(lambda rows: rows[rows.label == "t1"])
            .twice.sum()
        ),
        ["sales", ["days", "kinds"]],
    ),
}


@pytest.mark.parametrize("name", LARGE_FIRST)
def test_small_tables_are_joined_first(read: Read, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_order, "WORTHWHILE", 1.0)
    program, order = LARGE_FIRST[name]
    result = program({table: read(table) for table in tables()})
    plan, facts = planned(result, JoinOrder())
    assert [note.done for note in facts.notes if note.rule == "JoinOrder"] == [True], facts.notes
    if order is not None:
        assert order_of(plan) == order
    found, expected = computed(plan), program(tables())
    if isinstance(expected, pd.DataFrame):
        found, expected = canonical(found, index=False), canonical(expected, index=False)
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    else:
        assert found == pytest.approx(expected)


def joins(of: dict[str, Any], **keywords: Any) -> Any:
    rows = (
        of["sales"]
        .merge(of["shops"], on="shop")
        .merge(of["towns"], left_on="town", right_on="id", **keywords)
    )
    return rows[rows.kind == 2]


#: Programs whose joins stay in their order, and what says so.
LEFT: dict[str, tuple[Program, str]] = {
    "first rows": (lambda of: joins(of).head(3, npartitions=-1, compute=False).price.sum(), "Head"),
    "a function of the user": (
        lambda of: joins(of).map_partitions(lambda part: part).price.sum(),
        "MapPartitions",
    ),
    "where rows are from": (lambda of: joins(of, indicator=True).price.sum(), "depend on partitions"),
    "a join that is used twice": (
        lambda of: (
            lambda rows: rows.merge(of["towns"], left_on="town", right_on="id").price.sum() + rows.shop.sum()
        )(of["sales"].merge(of["shops"], on="shop")),
        "",
    ),
    "a key that the lookup has for a column": (
        lambda of: (
            of["items"]
            .merge(of["kinds"].set_index("kind"), left_on="id", right_index=True)
            .merge(of["shops"], left_on="kind", right_on="shop")
            .id_y.sum()
        ),
        "",
    ),
    "floats": (
        lambda of: (
            of["sales"]
            .merge(of["items"], on="price")
            .merge(of["towns"], left_on="shop", right_on="id")
            .kind_x.sum()
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_joins_stay_where_results_would_be_others(read: Read, name: str) -> None:
    program, reason = LEFT[name]
    plan, facts = planned(program({table: read(table) for table in tables()}))
    assert JoinOrder().apply(plan, facts)._name == plan._name
    notes = [note.text for note in facts.notes if note.rule == "JoinOrder"]
    assert reason in notes[0] if reason else not notes, notes


def test_estimates_are_those_of_the_files(read: Read) -> None:
    estimates = RowEstimates(TableFacts())
    sales = read("sales")
    assert estimates.rows(sales.expr) == 60
    assert estimates.column(sales.expr, "item").distinct == 12
    assert estimates.rows(sales[sales.item < 3].expr) == pytest.approx(60 * 3 / 11)
    assert estimates.rows(sales[sales.shop == 1].expr) == pytest.approx(60 / 8)
    assert estimates.rows(sales[(sales.price >= 5) & (sales.price < 10)].expr) == pytest.approx(10, abs=1)
    assert estimates.rows(sales.groupby("item").price.sum().expr) == 12
    assert estimates.rows(sales.merge(read("shops"), on="shop").expr) == pytest.approx(60)
    given_to_dask = dd.from_pandas(tables()["sales"], npartitions=2)
    assert estimates.rows(given_to_dask[given_to_dask.shop.isin([1, 2])].expr) == pytest.approx(2)
