"""Check that functions of values and rows return on columns what pandas returns, calling them for each."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.frames import pure_functions, row_functions
from dask_gpurt.frames.pure_functions import names_used, pure
from dask_gpurt.frames.row_functions import can_compute, columns_taken, on_columns
from tests.helpers.examples import examples

ROWS = 700


def readings(rows: int = ROWS) -> pd.DataFrame:
    """Return rows with nulls, zeros, large integers and repeated strings."""
    at = np.arange(rows)
    return pd.DataFrame(
        {
            "heat": np.where(at % 7 == 0, np.nan, (at * 37 % 101 - 50) / 7),
            "damp": (at * 13 % 29) / 4,
            "count": at * 11 % 23 - 5,
            "large": (at - 350) * 2**44 + at,
            "short": (at % 100).astype("int8"),
            "name": pd.array(["" if i % 5 == 0 else f"Ab{i * 7 % 13}" for i in at], dtype="str"),
            "room": pd.array([None if i % 11 == 0 else f"r{i % 3}" for i in at], dtype="str"),
            "since": pd.Timestamp("2026-01-01") + pd.to_timedelta(at * 7919 % 100_000, "min"),
            "until": pd.Timestamp("2026-02-01") + pd.to_timedelta(at * 104_729 % 100_000, "s"),
            "seen": pd.Series(pd.Timestamp("2026-01-01") + pd.to_timedelta(at, "D")).where(at % 9 != 0),
            "on": at % 3 == 0,
        }
    )


LIMIT = 3
NAMES = {"Ab1": 1, "Ab2": 2, "": 0}


def grade(value: Any) -> str:
    if value < 0:
        return "cold"
    if value < LIMIT:
        return "fresh"
    return "warm"


def outcome(compute: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compute()
        except Exception as error:  # whatever pandas raises
            return type(error)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, type):
        assert found is expected
    elif expected.ndim == 2:
        pd.testing.assert_frame_equal(found, expected)
    else:
        pd.testing.assert_series_equal(found, expected, check_exact=True)


# ---- random functions -----------------------------------------------------------------------------

NUMBERS = ["row.heat", "row.damp", "row['count']", "row.large", "row.short", "2", "0.5", "-3", "LIMIT"]
TIMES = ["row.since.hour", "row.until.dayofweek", "row.since.weekday()", "row.seen.month", "row.until.year"]
LENGTHS = ["(row.until - row.since).total_seconds()", "(row.seen - row.since).days", "len(row['name'])"]
TEXTS = ["row['name']", "row.room", "'r1'", "row['name'].upper()", "row['name'][0:2]", "grade(row.damp)"]


def number(choose: random.Random, depth: int) -> str:
    if depth == 0:
        return choose.choice([*NUMBERS, *NUMBERS, *TIMES, *LENGTHS])
    one, other = number(choose, depth - 1), number(choose, depth - 1)
    return choose.choice(
        [
            *(f"({one} {sign} {other})" for sign in ["+", "-", "*", "/", "//", "%"]),
            *(f"{name}({one}, {other})" for name in ["min", "max"]),
            *(f"{name}({one})" for name in ["abs", "int", "float", "-", "round"]),
            *(one, f"({one} if {condition(choose, depth - 1)} else {other})", f"math.sqrt({one})"),
            *(f"NAMES.get(row['name'], {one})", f"{one} ** 2"),
        ]
    )


def condition(choose: random.Random, depth: int) -> str:
    one, other = number(choose, max(depth - 1, 0)), number(choose, max(depth - 1, 0))
    text = choose.choice(TEXTS)
    simple = [
        *(f"{one} {sign} {other}" for sign in ["<", "<=", ">", ">=", "==", "!="]),
        *(f"{text} == 'r1'", f"{text} != 'Ab7'", f"{text} in ('r1', 'AB3', 'Ab5')", f"'b1' in {text}"),
        *(f"{text}.startswith('A')", "row.on", f"pd.isna({one})", f"pd.notnull({text})", f"{one}"),
        *(f"{one} in (1, 2, 5)", f"{text} is None", "row.since < row.until", f"row.heat != {one}"),
    ]
    if depth == 0:
        return f"({choose.choice(simple)})"
    left, right = condition(choose, depth - 1), condition(choose, depth - 1)
    joined = [f"({left} and {right})", f"({left} or {right})", f"(not {left})", f"({left} & {right})"]
    return choose.choice([*joined, *(f"({each})" for each in simple)])


def returned(choose: random.Random, depth: int) -> str:
    constant = choose.choice(["1", "0", "None", "'yes'", "'no'", "float('nan')", "True", "2.5", "(1, 2)"])
    value = choose.choice([number(choose, depth), condition(choose, depth), choose.choice(TEXTS), constant])
    if depth and choose.random() < 0.6:
        return f"({value} if {condition(choose, depth)} else {returned(choose, depth - 1)})"
    return value


def function_of(text: str) -> Any:
    names = {"pd": pd, "np": np, "math": math, "LIMIT": LIMIT, "NAMES": NAMES, "grade": grade}
    return eval(f"lambda row: {text}", names)


COLUMNS = st.sampled_from(
    [
        [*readings(1).columns],
        ["heat", "damp", "count", "large", "short"],
        ["count", "large"],
        ["count", "on"],
        ["name", "room"],
    ]
)


@examples(150)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 3), columns=COLUMNS)
def test_any_function_of_a_row_returns_what_it_does_for_each(
    seed: int, depth: int, columns: list[str]
) -> None:
    function, rows = function_of(returned(random.Random(seed), depth)), readings()[columns]
    expected = outcome(lambda: rows.apply(function, axis=1))
    assert_same(outcome(lambda: on_columns(rows, function)), expected)


@examples(60)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 3))
def test_any_function_returns_the_same_without_the_columns_that_it_does_not_take(
    seed: int, depth: int
) -> None:
    function, rows = function_of(returned(random.Random(seed), depth)), readings()
    if not (taken := columns_taken(function)):
        return
    expected = outcome(lambda: rows.apply(function, axis=1))
    left = rows[[name for name in rows.columns if name in taken]]
    assert_same(outcome(lambda: on_columns(left, function, is_mixed=True)), expected)


@examples(100)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 3), column=st.sampled_from([*readings(1).columns]))
def test_any_function_of_a_value_returns_what_it_does_for_each(seed: int, depth: int, column: str) -> None:
    choose = random.Random(seed)
    texts = ["row['name']", "row.room", "row['count']", "row.heat", "row.damp", "row.large", "row.short"]
    text = returned(choose, depth)
    for each in [*texts, "row.since", "row.until", "row.seen", "row.on"]:
        text = text.replace(each, "row")
    function, values = function_of(text), readings()[column]
    assert_same(outcome(lambda: on_columns(values, function)), outcome(lambda: values.map(function)))


# ---- what is computed on columns ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "row.heat * row.damp + 1",
        "1 if row.damp > 5 else 0",
        "'high' if row.damp > 5 else 'low'",
        "row.heat / row.damp if row.damp != 0 else 0",
        "grade(row.heat)",
        "row['name'] if row.room == 'r1' else 'none'",
        "(row.until - row.since).total_seconds() / 60",
        "row.since.hour in (7, 8, 9) and row.until.weekday() < 5",
        "row.heat if pd.notna(row.heat) else row.damp",
        "'b1' in row['name'] or row['name'].startswith('Ab2')",
    ],
)
def test_functions_that_are_written_often_are_computed_on_columns(text: str) -> None:
    calls, rows = [], readings()
    found = row_functions._computed(
        rows,
        function_of(text),
        lambda some: calls.append(len(some)) or some.apply(function_of(text), axis=1),
        None,
    )
    assert found is not None
    assert sum(calls) <= 3 * row_functions.MOST_PARTS


def test_a_function_that_may_do_more_is_called_once_for_each_row_in_order() -> None:
    seen: list[int] = []

    def noted(row: Any) -> int:
        seen.append(row["count"])
        return len(seen)

    rows = readings()
    assert can_compute(noted, 2)  # with a plain row
    assert on_columns(rows, noted).tolist() == [*range(1, ROWS + 1)]
    assert seen == rows["count"].tolist()


def test_integers_beside_strings_stay_integers_without_the_strings() -> None:
    rows = readings()[["count", "damp"]]
    assert on_columns(rows, lambda row: row["count"] if row.damp >= 0 else 0).dtype == "float64"
    assert on_columns(rows, lambda row: row["count"] if row.damp >= 0 else 0, is_mixed=True).dtype == "int64"


def test_a_function_of_values_may_return_series() -> None:
    values, function = readings()["count"], lambda value: pd.Series([value, value + 1])
    assert can_compute(function, 1)
    assert_same(on_columns(values, function, "apply"), values.apply(function))


def test_what_is_written_of_a_value_is_its_own() -> None:
    function = function_of("f'{row!r}'")
    values = pd.Series(np.arange(ROWS)).where(lambda value: ~value.isin([0, ROWS // 2, ROWS - 1]), 7)
    assert_same(on_columns(values, function), values.map(function))


def test_columns_in_a_list_are_not_asked_for_nulls() -> None:
    found = pure(function_of("pd.isna([row]).any()"), row_functions._INSTEAD)
    assert found is not None
    with pytest.raises(row_functions._Unknown):
        found(row_functions._Column(np.arange(3.0)))


def test_strings_as_files_have_them_are_known() -> None:
    rows = readings()[["name", "count"]].astype({"name": "string"})
    function = function_of("row['name'].startswith('Ab') and row['count'] > 3")
    found = row_functions._computed(rows, function, lambda some: some.apply(function, axis=1), None)
    assert_same(found, rows.apply(function, axis=1))
    length = function_of("len(row)")
    assert_same(row_functions._of_distinct(rows.name, length), rows.name.map(length))


def test_methods_of_strings_that_do_not_repeat_are_left() -> None:
    links = pd.Series([f"/{i % 40}/{i}" for i in range(ROWS)], dtype="str")
    function = function_of("row.startswith('/7/')")
    with pytest.raises(row_functions._Unknown):
        row_functions._computed(links, function, lambda some: some.map(function), None)


def test_no_rows_are_what_metadata_says() -> None:
    meta = pd.Series([], dtype="int64")
    rows = readings()[["heat", "count"]][:0]
    assert on_columns(rows, lambda row: int(row.heat), is_mixed=True, meta=meta) is meta


def test_operations_of_later_versions_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pure_functions, "_OPERATIONS", pure_functions._OPERATIONS - {"COMPARE_OP"})
    assert pure(lambda value: value + 1) is not None
    assert pure(grade) is None


TOTAL: list[int] = []


def _with_a_loop(row: Any) -> Any:
    for each in row:
        return each
    return None


def _caught(value: Any) -> Any:
    try:
        return 1 / value
    except ZeroDivisionError:
        return None


@pytest.mark.parametrize(
    "function",
    [
        lambda value: TOTAL.append(value),
        lambda value: np.random.random() + value,
        lambda value: pd.Timestamp.now() if value else None,
        lambda value: [each for each in value],
        lambda value: value is math.nan,
        lambda value: value.__class__,
        lambda value: value.now(),
        lambda value, other: value,
        lambda *values: values,
        _caught,
        print,
        None,
    ],
)
def test_functions_that_may_do_more_than_compute_are_not_known(function: Any) -> None:
    found = pure(function)
    if found is not None:
        with pytest.raises((AttributeError, NameError)):
            found(1)


def test_a_function_is_known_with_its_names_alone() -> None:
    found = pure(grade)
    assert found is not None
    assert found(2.0) == "fresh"
    assert found.__globals__["__builtins__"] == {}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda row: row.heat + row["damp"], {"heat", "damp"}),
        (lambda row: grade(row["count"]), {"count"}),
        (lambda row: row.sum(), None),
        (lambda row: row["heat":], None),
        (lambda row: row[NAMES], None),
        (lambda row: grade(row), None),
        (_with_a_loop, None),
        (lambda row: row.name, None),
        (lambda row: row.heat + eval("row.damp"), None),
        (lambda row: row.heat + locals()["row"].damp, None),
        (lambda: 1, None),
    ],
)
def test_columns_that_a_function_takes(function: Any, names: Any) -> None:
    assert names_used(function) == (names if names is None else frozenset(names))
