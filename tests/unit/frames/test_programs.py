"""Run fused tasks as programs on columns of pandas, and compare with Dask's own result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.graphs import wrap_execution
from dask_gpurt.frames.programs import Interpreter
from tests.helpers.pandas_columns import PandasColumns

TEXTS = ["PROMO x", "b", "", "Ünï", None]


def frame_of(rows: int, seed: int) -> pd.DataFrame:
    """Return rows of all kinds, with nulls, NaN and labels of the index that repeat."""
    random = np.random.default_rng(seed)
    whens = pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 10**4, rows), "h")
    return pd.DataFrame(
        {
            "i": random.integers(-5, 6, rows),
            "j": random.integers(0, 4, rows).astype("int32"),
            "x": np.where(random.random(rows) < 0.2, np.nan, random.integers(-3, 4, rows) / 2),
            "y": random.random(rows).astype("float32"),
            "b": random.random(rows) < 0.5,
            "n": pd.array(np.where(random.random(rows) < 0.3, None, 5), dtype="Int64"),
            "s": pd.Series(random.choice(np.array(TEXTS, dtype=object), rows), dtype="str"),
            "t": pd.Series(np.where(random.random(rows) < 0.2, pd.NaT, whens), dtype="datetime64[us]"),
            "c": pd.Categorical(random.choice(["u", "v"], rows)),
        }
    ).set_axis(pd.Index(random.integers(0, 5, rows), name="row"))


class Ran:
    """Count what ran on columns while fused tasks run as programs."""

    def __init__(self, check: bool) -> None:
        self.check = check
        self.on_columns = self.left = 0
        self.errors: list[str] = []

    def run(self, graph: Any, result: Any, by_dask: Callable[[], Any]) -> Any:
        interpreter = Interpreter(
            PandasColumns(),
            lambda name, error: self.errors.append(f"{name}: {error!r}"),
            lambda name, difference: self.errors.append(f"{name}: {difference}"),
        )
        return interpreter.run(graph, result, self.count, check=self.check)

    def count(self, on_columns: int, left: int) -> None:
        self.on_columns += on_columns
        self.left += left


def as_program(collection: Any, *, check: bool = False) -> tuple[Any, Ran]:
    """Return the result of a collection whose fused tasks run as programs, and what ran."""
    ran, patches = Ran(check), PatchSet()
    wrap_execution(patches, ran.run)
    try:
        return collection.optimize(fuse=True).compute(scheduler="sync"), ran
    finally:
        patches.restore()


def assert_equal(found: Any, expected: Any) -> None:
    same = pd.testing.assert_frame_equal if expected.ndim == 2 else pd.testing.assert_series_equal
    same(found, expected)


# ---- random plans ----------------------------------------------------------------------------------

#: Steps from one frame to the next. Each takes the frame and a number that chooses among its variants.
Step = Callable[[Any, int], Any]
MASKS: list[Callable[[Any], Any]] = [
    lambda df: df.i > 0,
    lambda df: df.i >= df.j,
    lambda df: (df.x < 1.0) & ~df.b,
    lambda df: df.s.isin(["b", ""]) | (df.i == 2),
    lambda df: df.t < pd.Timestamp("2020-06-01"),
    lambda df: df.s.str.startswith("PROMO"),
    lambda df: df.i.between(-1, 3),
    lambda df: df.s == "b",
    lambda df: df.x.isna(),
    lambda df: df.i > 100,
]
VALUES: list[Callable[[Any], Any]] = [
    lambda df: df.x * (1 - df.y),
    lambda df: df.i + df.j,
    lambda df: df.t.dt.year,
    lambda df: df.x.where(df.b, 0.0),
    lambda df: df.s.str.upper(),
    lambda df: df.x.fillna(0.5) - 1,
    lambda df: df.i.astype("float64") * df.x,
    lambda df: 7,
    lambda df: "text",
    lambda df: df.b | (df.i != df.j),
]


def keep(df: Any, variant: int) -> Any:
    return df[MASKS[variant % len(MASKS)](df)]


def add(df: Any, variant: int) -> Any:
    return df.assign(new=VALUES[variant % len(VALUES)](df))


def replace(df: Any, variant: int) -> Any:
    column, value = [("x", lambda df: df.x + df.i), ("i", lambda df: df.i * 2), ("b", lambda df: df.i < 1)][
        variant % 3
    ]
    return df.assign(**{column: value(df)})


def number(df: Any, variant: int) -> Any:
    known = {"row", "index", "level_0"} & set(df.columns)
    return df.reset_index(drop=bool(known) or bool(variant % 2))


def through_users(df: Any, variant: int) -> Any:
    return df.map_partitions(_changed, variant, meta=df._meta)


def _changed(df: Any, variant: int) -> Any:
    df.loc[df.i > variant % 3, "y"] = 9.0  # in place
    return df


STEPS: list[Step] = [keep, add, replace, number, through_users]
ENDS: list[Callable[[Any], Any]] = [
    lambda df: df,
    lambda df: df[["x", "s", "c"]],
    lambda df: df.x,
    lambda df: df.rename(columns={"x": "ex", "s": "text"}),
    lambda df: (df.x + df.i).to_frame(name="sum"),
    lambda df: df[["b", "n", "i"]].reset_index(drop=True),
    lambda df: df.x * df.x + df.y,
]


@given(
    st.integers(0, 12),
    st.integers(1, 3),
    st.integers(0, 2**16),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 20)), max_size=5),
    st.sampled_from(ENDS),
)
@settings(max_examples=40, deadline=None)
def test_programs_are_what_dask_computes(
    rows: int, npartitions: int, seed: int, steps: list[tuple[Step, int]], end: Callable[[Any], Any]
) -> None:
    pdf = frame_of(rows, seed)
    whole = dd.from_map(partial(_part, pdf, npartitions), range(npartitions), meta=pdf.iloc[:0])
    for step, variant in steps:
        whole = step(whole, variant)
    whole = end(whole)
    found, ran = as_program(whole)
    assert_equal(found, whole.compute(scheduler="sync"))
    assert ran.errors == []


def _part(pdf: pd.DataFrame, npartitions: int, at: int) -> pd.DataFrame:
    return pdf.iloc[at::npartitions].copy()


@pytest.mark.parametrize("how", ["inner", "left", "leftsemi"])
@pytest.mark.parametrize("keys", [("i", "i"), ("s", "t"), (["i", "s"], ["k", "s"])])
def test_joins_are_what_dask_computes(how: str, keys: tuple[Any, Any]) -> None:
    pdf = frame_of(30, 1).reset_index(drop=True).drop(columns="c")
    other = frame_of(12, 2).reset_index(drop=True)[["i", "j", "s", "x", "n"]]
    other = other.assign(k=other.i, t=other.s)
    if how == "leftsemi":
        other = other[keys[1] if isinstance(keys[1], list) else [keys[1]]]
    left = dd.from_map(partial(_part, pdf, 2), range(2), meta=pdf.iloc[:0])
    right = dd.from_map(partial(_part, other, 1), range(1), meta=other.iloc[:0])
    joined = left.merge(right[right[other.columns[0]].notnull()], how=how, left_on=keys[0], right_on=keys[1])
    joined = joined.assign(new=joined["y"] * 2).reset_index(drop=True)
    found, ran = as_program(joined)
    assert_equal(found, joined.compute(scheduler="sync"))
    assert ran.errors == []
    assert ran.left == 0


@pytest.mark.parametrize(
    ("keys", "columns", "aggregation"),
    [("j", "x", "sum"), (["j", "s"], ["i", "x"], "count"), ("s", ["x"], "min"), (["j", "s"], "x", "max")],
)
def test_groups_are_what_dask_computes(keys: Any, columns: Any, aggregation: str) -> None:
    pdf = frame_of(30, 1)
    df = dd.from_map(partial(_part, pdf, 2), range(2), meta=pdf.iloc[:0])
    found, ran = as_program(getattr(df[df.i > -4].groupby(keys)[columns], aggregation)())
    expected = getattr(df[df.i > -4].groupby(keys)[columns], aggregation)().compute(scheduler="sync")
    assert_equal(found.sort_index(), expected.sort_index())
    assert (ran.errors, ran.left) == ([], 0)


def test_what_looks_up_rows_by_label_is_left_to_the_library() -> None:
    pdf = frame_of(20, 0).set_axis([f"row {row}" for row in range(20)])
    df = dd.from_map(partial(_part, pdf, 1), range(1), meta=pdf.iloc[:0])
    plan = df[df.i > -9].x.fillna({f"row {row}": float(row) for row in range(20)})
    found, _ = as_program(plan)
    assert_equal(found, plan.compute(scheduler="sync"))


def test_a_node_that_fails_on_columns_runs_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, name: str, left: Any, right: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(PandasColumns, "binary", fails)
    pdf = frame_of(20, 0)
    df = dd.from_map(partial(_part, pdf, 1), range(1), meta=pdf.iloc[:0])
    plan = df[df.i > 0][["x"]]
    found, ran = as_program(plan)
    assert_equal(found, plan.compute(scheduler="sync"))
    assert ran.errors == ["gt: RuntimeError('no such kernel')"]


@pytest.mark.parametrize("check", [True, False])
def test_a_node_that_is_checked_and_differs_is_the_librarys(
    check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PandasColumns, "binary", lambda self, name, left, right: left < right)
    pdf = frame_of(20, 0)
    df = dd.from_map(partial(_part, pdf, 1), range(1), meta=pdf.iloc[:0])
    plan = df[df.i > 0][["i"]]
    found, ran = as_program(plan, check=check)
    assert found.equals(plan.compute(scheduler="sync")) == check
    assert ran.errors == (["gt: other values"] if check else [])


def test_errors_of_users_are_theirs() -> None:
    def fails(df: Any) -> Any:
        raise ValueError("of the user")

    pdf = frame_of(5, 0)
    df = dd.from_map(partial(_part, pdf, 1), range(1), meta=pdf.iloc[:0])
    with pytest.raises(ValueError, match="of the user"):
        as_program(df[df.i > -9].map_partitions(fails, meta=pdf.iloc[:0]))
