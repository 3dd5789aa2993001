"""Check what is guaranteed of each operation on rows, with rows that are divided at random."""

from __future__ import annotations

import functools
import random
import tempfile
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dask._expr import optimize_until
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning.operations import COMPUTING, KEEPING
from dask_gpurt.client.planning.reads import FewerPartitions, lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.dependence import columns_of_result, rely_on_independence, why_dependent
from dask_gpurt.client.planning.table_facts import TableFacts
from tests.helpers.examples import FACTOR, examples
from tests.helpers.planned import by_size, value_of

#: An integer that is not exact as a float.
LARGE = 2**53 + 1
#: Tables are drawn from so many, as writing their files takes longer than a plan.
SEEDS = st.integers(0, round(30 * FACTOR))
#: Sizes with which a table is read in a single partition, and in two.
SIZES = (PartitionSizes(1, 1, 1 << 50, 1 << 50), PartitionSizes(1, 2, 1 << 50, 0))

# ---- rows -------------------------------------------------------------------------------------------


def rows_of(seed: int) -> pd.DataFrame:
    """Return up to 24 rows with a named index, and of most dtypes a column with nulls and one without."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 5, 12, 24])

    def column(values: list[Any], dtype: Any, nulls: float = 0.0) -> Any:
        chosen = [None if rng.random() < nulls else rng.choice(values) for _ in range(count)]
        return pd.array(chosen, dtype=dtype) if nulls else pd.Series(chosen, dtype=dtype)

    times = [pd.Timestamp("2020-02-29 12:30"), pd.Timestamp("1999-12-31"), pd.Timestamp("2021-01-01")]
    frame = pd.DataFrame(
        {
            "i": column([0, 7, LARGE, LARGE - 1], "int64"),
            "j": column([0, 1, 2, 5], "int32"),
            "n": column([0, 4, LARGE, LARGE - 1], "Int64", rng.choice([0.0, 0.2, 0.9])),
            "f": column([0.0, 0.5, -2.25, np.inf], "float64", rng.choice([0.0, 0.3])),
            "b": column([True, False], "bool"),
            "m": column([True, False], "boolean", rng.choice([0.0, 0.2])),
            "w": column(["a", "Bc d", "", "7"], "str"),
            "s": column(["x", "Yz"], "str", rng.choice([0.0, 0.3])),
            "u": pd.Series([rng.choice(times) for _ in range(count)], dtype="datetime64[us]"),
            "t": pd.Series([rng.choice([*times, pd.NaT]) for _ in range(count)], dtype="datetime64[us]"),
        }
    )
    if rng.random() < 0.5:  # files whose rows are alike
        frame = frame.sort_values("j", ignore_index=True)
    return frame.set_index(pd.Index(np.arange(count) ** 2, name="row"))


def write(frame: pd.DataFrame, folder: Path, seed: int) -> Path:
    """Write rows as one to eight files, some without rows, as users of numpy's dtypes have them."""
    rng = random.Random(seed)
    ends = sorted(rng.randint(0, len(frame)) for _ in range(rng.randint(0, 7)))
    folder.mkdir(parents=True)
    # Pandas reads integers and booleans by the default of Arrow: all files are noted as if without nulls.
    notes = pa.Schema.from_pandas(frame[:0].astype({"n": "int64", "m": "bool"})).metadata
    for number, (start, end) in enumerate(zip([0, *ends], [*ends, len(frame)], strict=True)):
        part = pa.Table.from_pandas(frame.iloc[start:end]).replace_schema_metadata(notes)
        pq.write_table(part, folder / f"{number}.parquet")
    return folder


_folder = tempfile.TemporaryDirectory()


@functools.cache
def table_of(seed: int) -> Path:
    return write(rows_of(seed), Path(_folder.name) / str(seed), seed)


# ---- operations -------------------------------------------------------------------------------------

Program = Callable[[Any], Any]
#: Operations of the catalogue, with arguments for which dtypes are fixed, and others.
PROGRAMS: dict[str, list[Program]] = {
    "LT": [lambda t: t.i < LARGE, lambda t: t.u < pd.Timestamp("2020-01-01"), lambda t: t.n < 5],
    "LE": [lambda t: t.i <= t.j, lambda t: t.w <= "a"],
    "GT": [lambda t: t.f > 0, lambda t: t.i > t.i.min()],
    "GE": [lambda t: t.i >= LARGE, lambda t: t.t >= t.u],
    "EQ": [lambda t: t.i == LARGE, lambda t: t.n == LARGE, lambda t: t.s == "x"],
    "NE": [lambda t: t.i != LARGE, lambda t: t.n != LARGE, lambda t: t.b != t.m],
    "LTSeries": [lambda t: t.i.lt(LARGE)],
    "LESeries": [lambda t: t.i.le(t.j)],
    "GTSeries": [lambda t: t.f.gt(0)],
    "GESeries": [lambda t: t.i.ge(LARGE)],
    "EQSeries": [lambda t: t.i.eq(LARGE), lambda t: t.n.eq(LARGE)],
    "NESeries": [lambda t: t.i.ne(LARGE)],
    "And": [lambda t: t.b & (t.j > 1), lambda t: t.m & t.b, lambda t: t.j & 1],
    "Or": [lambda t: t.b | (t.j > 1), lambda t: t.m | t.b],
    "XOr": [lambda t: t.b ^ (t.j > 1), lambda t: t.m ^ t.b],
    "Invert": [lambda t: ~t.b, lambda t: ~t.j, lambda t: ~t.m, lambda t: ~t.b.where(t.j > 1).dropna()],
    "Add": [
        lambda t: t.i + 1,
        lambda t: t.i + t.f,
        lambda t: t.w + t.s,
        lambda t: t.u + pd.Timedelta(1, "D"),
    ],
    "Sub": [lambda t: t.i - t.j, lambda t: t.u - t.t, lambda t: t.n - 1],
    "Mul": [lambda t: t.i * 2, lambda t: t.f * t.j, lambda t: t.n * 3],
    "Div": [lambda t: t.i / 2, lambda t: t.i / t.j, lambda t: t.f / t.f],
    "Neg": [lambda t: -t.i, lambda t: -t.f, lambda t: -t.n],
    "Pos": [lambda t: +t.i],
    "FloorDiv": [lambda t: t.i // 2, lambda t: t.i // t.j, lambda t: t.f // t.f, lambda t: 7 // t.j],
    "Mod": [lambda t: t.i % 3, lambda t: t.i % t.j, lambda t: t.f % 0.5, lambda t: 7 % t.j],
    "Pow": [lambda t: t.f**2, lambda t: t.j**2],
    "MethodOperator": [
        lambda t: t[["i", "j"]].add(1),
        lambda t: t[["i", "j"]].sub(1),
        lambda t: t[["i", "j"]].floordiv(2),
    ],
    "Where": [
        lambda t: t.i.where(t.j > 1),
        lambda t: t.i.where(t.j > 1, 0),
        lambda t: t.i.where(t.j > 1, t.n),
        lambda t: t.f.where(t.j > 1),
        lambda t: t.j.where(t.j > 1, 2**40),
        lambda t: t.b.where(t.j > 1),
        lambda t: t.u.where(t.j > 1).dt.year,
    ],
    "Mask": [
        lambda t: t.i.mask(t.j > 1),
        lambda t: t.i.mask(t.j > 1, 0),
        lambda t: t.i.mask(t.j > 1, t.f),
        lambda t: t.w.mask(t.j > 1, "none"),
    ],
    "FunctionMap": [
        lambda t: t.w.str.upper(),
        lambda t: t.s.str.contains("x"),
        lambda t: t.s.str.contains("x", na=True),
        lambda t: t.w.str.len(),
        lambda t: t.s.str.len(),
        lambda t: t.w.str[:2],
        lambda t: t.w.str.replace("a", "b"),
        lambda t: t.s.str.startswith("Y"),
        lambda t: t.t.dt.strftime("%Y"),
        lambda t: t.u.dt.floor("D"),
        lambda t: t.s.str.split(" "),
    ],
    "PropertyMap": [
        lambda t: t.u.dt.year,
        lambda t: t.t.dt.year,
        lambda t: t.t.dt.date,
        lambda t: t.t.dt.is_leap_year,
        lambda t: (t.u - t.t).dt.days,
        lambda t: (t.u + pd.Timedelta(1, "D")).dt.month,
    ],
    "Abs": [lambda t: t.i.abs(), lambda t: t.f.abs(), lambda t: t[["i", "f"]].abs()],
    "ArrowStringConversion": [lambda t: t.w, lambda t: t.s],
    "AsType": [
        lambda t: t.i.astype(float),
        lambda t: t[["i", "j"]].astype({"j": "int64"}),
        lambda t: t.f.astype(str),
        lambda t: t.u.astype("O"),
        lambda t: t.j.astype("category"),
    ],
    "Between": [lambda t: t.i.between(0, LARGE - 1), lambda t: t.n.between(0, LARGE - 1)],
    "Clip": [lambda t: t.i.clip(0, 7), lambda t: t.i.clip(upper=2.5), lambda t: t.f.clip(-1, 1)],
    "Fillna": [
        lambda t: t.f.fillna(0),
        lambda t: t.i.fillna(0.5),
        lambda t: t.f.fillna("none"),
        lambda t: t.n.fillna(0),
        lambda t: t.m.fillna(False),
        lambda t: t.s.fillna("none"),
        lambda t: t[["f", "s"]].fillna({"f": 1.5}),
    ],
    "IsNa": [lambda t: t.n.isna(), lambda t: t[["s", "t"]].isna(), lambda t: t.i.where(t.j > 1).isna()],
    "NotNull": [lambda t: t.n.notnull(), lambda t: t.m.notnull()],
    "Isin": [lambda t: t.i.isin([LARGE, 7]), lambda t: t.n.isin([LARGE]), lambda t: t.w.isin(["a"])],
    "Round": [lambda t: t.f.round(1), lambda t: t.i.round(-1)],
    "Projection": [lambda t: t[["i", "s"]], lambda t: t.n],
    "Drop": [lambda t: t.drop(columns=["m", "n"])],
    "RenameFrame": [lambda t: t[["i", "n"]].rename(columns={"i": "n", "n": "i"})],
    "RenameSeries": [lambda t: t.i.rename("other"), lambda t: t.n.rename("i")],
    "AddPrefix": [lambda t: t[["i", "n"]].add_prefix("a_")],
    "AddSuffix": [lambda t: t[["i", "n"]].add_suffix("_a")],
    "ColumnsSetter": [lambda t: set_columns(t[["n", "i"]], ["i", "n"])],
    "RenameAxis": [lambda t: t[["i", "n"]].rename_axis(index="other"), lambda t: t.i.rename_axis(None)],
    "ToFrame": [lambda t: t.i.to_frame(), lambda t: t.n.to_frame("i")],
    "Filter": [lambda t: t[t.i == LARGE], lambda t: t[t.m.fillna(False)].i, lambda t: t.i[t.b]],
    "DropnaFrame": [lambda t: t[["i", "f"]].dropna(), lambda t: t.dropna(subset=["n"])],
    "DropnaSeries": [lambda t: t.f.dropna(), lambda t: t.n.dropna()],
    "ResetIndex": [lambda t: t[["i", "n"]].reset_index(), lambda t: t.i.reset_index()],
    "Assign": [lambda t: t.assign(k=t.i + 1, n=t.j), lambda t: t.assign(i=t.n)],
}


def set_columns(frame: Any, names: list[str]) -> Any:
    frame.columns = names
    return frame


#: What may follow an operation, so that values which differ are seen.
CONSUMERS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda found: found,
    "sums": lambda found: found.sum(),
    "equal": lambda found: (found == LARGE).sum(),
    "count": lambda found: found.count(),
    "largest": lambda found: found.max(),
}


pytestmark = pytest.mark.usefixtures("by_tasks")


def outcome(compute: Callable[[], Any]) -> Any:
    """Return a result, or the type of the error that computing it raises."""
    try:
        return compute()
    except Exception as error:
        return type(error)


def plans(program: Program, consumer: str, seed: int) -> tuple[Any, list[Any]]:
    """Return a collection on a table, and plans of it whose reads have fewer partitions."""
    result = CONSUMERS[consumer](program(dd.read_parquet(table_of(seed))))
    tuned = optimize_until(result.expr.finalize_compute(), "tuned-logical")
    changed = (by_size(tuned, Facts(sizes)) for sizes in SIZES)
    are_changed = [plan for plan in changed if any(type(each) is FewerPartitions for each in plan.walk())]
    return result, [lower(plan, "simplified-physical") for plan in are_changed]


@pytest.mark.parametrize("name", PROGRAMS)
@examples(2)
@given(seed=SEEDS, at=st.integers(0, 10))
def test_dtypes_are_fixed(name: str, seed: int, at: int) -> None:
    """Dtypes that are said not to vary are the same in all partitions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = PROGRAMS[name][at % len(PROGRAMS[name])](dd.read_parquet(table_of(seed)))
        assert_dtypes_are_fixed(found)


def test_plans_rely_on_their_tables_together_or_not_at_all() -> None:
    table = dd.read_parquet(table_of(0))
    free, bound = (
        optimize_until(each.expr, "tuned-logical")
        for each in (table[["i"]].count(), table.map_partitions(len, meta=(None, "int64")))
    )
    facts = TableFacts()
    assert not rely_on_independence(facts, free, bound)
    assert facts.checked(free) is free
    assert rely_on_independence(facts, free, free)
    assert facts.checked(free) is not free


def assert_dtypes_are_fixed(found: Any) -> None:
    tuned = optimize_until(found.expr, "tuned-logical")
    files = TableFacts().columns(tuned)
    if files is None or (known := columns_of_result(tuned, files)) is None:
        return
    parts = [part.to_frame("it") if part.ndim == 1 else part for part in dask.compute(*found.to_delayed())]
    varying = {"it"} if known.varying and found.ndim == 1 else known.varying
    dtypes = [part.drop(columns=list(varying)).dtypes.to_dict() for part in parts]
    assert all(each == dtypes[0] for each in dtypes)
    without_nulls = [*known.without_nulls] if found.ndim == 2 else ["it"] if known.without_nulls else []
    assert not any(part[without_nulls].isna().any(axis=None) for part in parts)


@pytest.mark.parametrize("name", PROGRAMS)
@examples(5)
@given(seed=SEEDS, at=st.integers(0, 10), consumer=st.sampled_from([*CONSUMERS]))
def test_results_are_the_same_however_rows_are_divided(name: str, seed: int, at: int, consumer: str) -> None:
    program = PROGRAMS[name][at % len(PROGRAMS[name])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result, changed = plans(program, consumer, seed)
        except (TypeError, ValueError):  # no sum of strings, say
            return
        if changed:
            expected = outcome(result.compute)
            for plan in changed:
                assert_same(outcome(functools.partial(value_of, plan)), expected, exact=consumer != "sums")


def assert_same(found: Any, expected: Any, exact: bool = True) -> None:
    """Compare results; the last digit of sums of floats depends on the order in which they are added."""
    assert type(found) is type(expected)
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, check_exact=exact)
    elif isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(found, expected, check_exact=exact)
    else:
        is_close = not exact and isinstance(expected, float) and found == pytest.approx(expected)
        assert is_close or found == expected or (found != found and expected != expected)


@pytest.mark.parametrize("kind", [*COMPUTING, *KEEPING], ids=lambda kind: kind.__name__)
def test_each_operation_of_the_catalogue_is_among_those_that_are_divided(kind: type) -> None:
    """An operation whose guarantees are not checked must not be in the catalogue."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, program in product(range(20), PROGRAMS[kind.__name__]):
            if any(plans(program, consumer, seed)[1] for consumer in ("rows", "count")):
                return
    raise AssertionError(f"no plan with {kind.__name__} is changed")


# ---- numbers of rows beside nulls -----------------------------------------------------------------


def with_counts(table: Any, counted: str) -> Any:
    """Join rows with the numbers of rows of groups, which some rows have none of."""
    groups = table[table.f > 0].groupby("j")
    counts = {
        "size": lambda: groups.size().to_frame("c"),
        "count": lambda: groups.f.count().to_frame("c"),
        "agg": lambda: groups.agg({"f": "count"}).rename(columns={"f": "c"}),
    }[counted]()
    return table[["i", "j", "f"]].merge(counts, left_on="j", right_index=True, how="left")


#: What is done with the numbers, whose result is independent of partitions, and what is not known to be.
OF_COUNTS: dict[str, Program] = {
    "filled": lambda rows: rows.c.fillna(0).astype("int64").sum(),
    "filled by a mapping": lambda rows: (
        rows.fillna({"c": 0}).astype({"j": "int64"}).pipe(lambda all: all[all.c > 1].j.sum())
    ),
    "grouped by": lambda rows: (
        rows.assign(c=rows.c.fillna(-1).astype("int64")).groupby("c", sort=True).j.sum()
    ),
    "compared": lambda rows: (rows.c.fillna(0) > 1).sum(),
    "chosen by": lambda rows: rows[rows.c >= 2].j.sum(),
    "a share": lambda rows: (rows.c / rows.j).sum(),
}
NOT_OF_COUNTS: dict[str, Program] = {
    "a sum with large integers": lambda rows: (rows.c + rows.i).sum(),
    "compared with large integers": lambda rows: (rows.c == rows.i).sum(),
    "the numbers": lambda rows: rows.groupby("j", sort=True).c.max(),
    "large integers": lambda rows: (
        rows.merge(rows[["j", "i"]].rename(columns={"j": "f"}), on="f", how="left")
        .i_y.fillna(0)
        .astype("int64")
        .sum()
    ),
}


@pytest.mark.parametrize("name", OF_COUNTS)
@examples(4)
@given(seed=SEEDS, counted=st.sampled_from(["size", "count", "agg"]))
def test_numbers_of_rows_do_not_depend_on_how_rows_are_divided(name: str, seed: int, counted: str) -> None:
    result, changed = plans(lambda table: OF_COUNTS[name](with_counts(table, counted)), "rows", seed)
    for plan in changed:
        assert_same(
            outcome(functools.partial(value_of, plan)), outcome(result.compute), exact="share" not in name
        )


@pytest.mark.parametrize(("programs", "is_free"), [(OF_COUNTS, True), (NOT_OF_COUNTS, False)])
def test_what_is_known_of_numbers_of_rows(programs: dict[str, Program], is_free: bool) -> None:
    for name, program in programs.items():
        result = program(with_counts(dd.read_parquet(table_of(1)), "size"))
        tuned = optimize_until(result.expr.finalize_compute(), "tuned-logical")
        assert (why_dependent(tuned) is None) is is_free, name
