"""Compare each operation of programs on columns of cudf with cudf itself."""

from __future__ import annotations

import importlib
import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask._task_spec import DataNode, Task, TaskRef, execute_graph
from dask.dataframe.dask_expr import _groupby as of_groups
from dask.dataframe.dask_expr._accessor import FunctionMap, PropertyMap
from dask.dataframe.dask_expr._expr import Assign, RenameFrame
from dask.dataframe.multi import merge_chunk
from dask.utils import M

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.graphs import in_order, wrap_trees
from dask_gpurt.frames.programs import Interpreter
from dask_gpurt.frames.registry import LIBRARIES

pytestmark = pytest.mark.gpu

ROWS = 40
COMPARED = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
COMPUTED = [operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor]
SCALARS: list[Any] = [
    0,
    -1,
    3,
    2**40,
    300,
    True,
    2.5,
    float("inf"),
    float("nan"),
    None,
    "b",
    "",
    np.int64(2),
    np.float32(0.1),
    np.int8(-3),
    pd.Timestamp("2020-01-01 05:00"),
    pd.Timestamp("2020-01-01", tz="UTC"),
    np.datetime64("2020-01-02"),
    pd.Timedelta("1h"),
    pd.NaT,
]
#: Columns beside each column.
OTHERS = ("i2", "i32", "u", "x", "f32", "b2", "s2", "t2", "ms", "d", "c")
KINDS = ("full", "nulls", "empty", "all null")


@cache
def frame_of(kind: str, seed: int = 0) -> Any:
    """Return rows of all kinds, with NaN beside nulls, and an index that is not a range for some."""
    import cudf

    random = np.random.default_rng(seed)
    rows = 0 if kind == "empty" else ROWS
    texts = random.choice(["PROMO x", "b", "", "Ünï"], rows)
    times = np.datetime64("2020-01-01", "us") + random.integers(0, 10**6, rows).astype("timedelta64[s]")
    columns = {
        "i": random.integers(-5, 6, rows),
        "i2": random.integers(-3, 4, rows),
        "i32": random.integers(-5, 6, rows).astype("int32"),
        "i8": random.integers(-100, 100, rows).astype("int8"),
        "u": random.integers(0, 9, rows).astype("uint32"),
        "x": np.where(random.random(rows) < 0.2, np.nan, random.integers(-3, 4, rows) / 2),
        "f32": random.random(rows).astype("float32"),
        "b": random.random(rows) < 0.5,
        "b2": random.random(rows) < 0.5,
        "s": texts,
        "s2": random.permutation(texts),
        "t": times,
        "t2": random.permutation(times),
        "ms": times.astype("datetime64[ms]"),
        "d": times - np.datetime64("2020-01-01", "us"),
    }
    made = {label: cudf.Series(values, nan_as_null=False) for label, values in columns.items()}
    if kind in ("nulls", "all null"):
        for label, series in made.items():
            keep = cudf.Series(random.random(rows) < (0.7 if kind == "nulls" else -1))
            made[label] = series.where(keep, None)
    frame = cudf.DataFrame(made)
    frame["c"] = frame["s"].astype("category")
    frame["e"] = frame["i"].astype(cudf.Decimal64Dtype(9, 2)) if kind != "all null" else frame["i"]
    return frame if seed else frame.set_index(cudf.Index(random.integers(0, 9, rows), name="row"))


class Graph:
    """Build the graph of a task on one frame."""

    def __init__(self, frame: Any):
        self.nodes: dict[Any, Any] = {"in": DataNode("in", frame.copy(deep=False))}  # a task may add columns
        self.whole = TaskRef("in")

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> TaskRef:
        key = ("n", len(self.nodes))
        self.nodes[key] = Task(key, function, *args, **kwargs)
        return TaskRef(key)

    def column(self, label: str) -> TaskRef:
        return self(operator.getitem, self.whole, label)


class Compared:
    """Run graphs as programs and as Dask does, and collect differences."""

    def __init__(self, *, also_left: bool = False) -> None:
        self.also_left = also_left
        self.errors: list[str] = []
        self.ran: Counter[str] = Counter()
        self.differences: list[str] = []
        self.interpreter = Interpreter(
            LIBRARIES["cudf"].engine(), lambda name, error: self.errors.append(f"{name}: {error!r}")
        )

    def __call__(self, said: str, graph: Graph, result: TaskRef, *, order: bool = True) -> None:
        self.errors.clear()
        left = self.ran["left"]
        found = outcome(lambda: self.interpreter.run(graph.nodes, result.key, self.count))
        if self.ran["left"] > left and not self.errors and not self.also_left:
            return  # cudf itself has computed it
        needed = {key: graph.nodes[key] for key in in_order(graph.nodes, result.key, {})}
        expected = outcome(lambda: execute_graph(needed, keys=[result.key])[result.key])
        difference = differ(found, expected, order)
        if difference is None and self.errors and not isinstance(expected, Exception):
            difference = f"failed on columns: {self.errors}"
        if difference is not None:
            self.differences.append(f"{said}: {difference}")

    def count(self, on_columns: int, left: int) -> None:
        self.ran["columns"] += on_columns
        self.ran["left"] += left

    def check(self, *, ran: bool = True) -> None:
        print(dict(self.ran), len(self.differences), "differences")
        assert not self.differences, "\n".join(
            [f"{len(self.differences)} differences", *self.differences[:25]]
        )
        assert bool(self.ran["columns"]) == ran


def outcome(call: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return error


def differ(found: Any, expected: Any, order: bool = True) -> str | None:
    """Return how two outcomes differ: values, nulls, dtypes, labels, index; None if they do not."""
    if isinstance(expected, Exception) or isinstance(found, Exception):
        same = type(found) is type(expected)
        return None if same else f"{found!r:.300} in place of {expected!r:.300}"
    if type(found) is not type(expected):
        return f"{type(found)} in place of {type(expected)}"
    if type(found.index) is not type(expected.index) or list(found.index.names) != list(expected.index.names):
        return f"index {found.index} in place of {expected.index}"
    if found.ndim == 1:
        if found.name != expected.name:
            return f"name {found.name!r} in place of {expected.name!r}"
        found, expected = found.to_frame("value"), expected.to_frame("value")
    if not found.columns.equals(expected.columns) or found.columns.dtype != expected.columns.dtype:
        return f"columns {found.columns} in place of {expected.columns}"
    if list(found.dtypes) != list(expected.dtypes):
        return f"dtypes {list(found.dtypes)} in place of {list(expected.dtypes)}"
    if list(found.index.dtypes if found.index.nlevels > 1 else [found.index.dtype]) != list(
        expected.index.dtypes if expected.index.nlevels > 1 else [expected.index.dtype]
    ):
        return "dtype of the index"
    if [found[c].null_count for c in found] != [expected[c].null_count for c in expected]:
        return "nulls"
    if not order:
        by = list(expected.columns)
        found, expected = (each.sort_values(by).reset_index(drop=True) for each in (found, expected))
    try:
        pd.testing.assert_frame_equal(found.to_pandas(), expected.to_pandas(), check_exact=order)
        for label in found:  # NaN stays NaN, and 0.0 does not become -0.0
            if found[label].dtype.kind == "f" and order:
                pairs = (each[label].to_arrow().to_pylist() for each in (found, expected))
                assert [repr(value) for value in next(pairs)] == [repr(value) for value in next(pairs)]
    except AssertionError as error:
        return str(error).replace("\n", " ")[:300]
    return None


def frames(seeds: tuple[int, ...] = (0,)) -> Iterator[tuple[str, Any]]:
    for kind, seed in itertools.product(KINDS, seeds):
        yield f"{kind} {seed}", frame_of(kind, seed)


@pytest.mark.parametrize("function", COMPARED + COMPUTED, ids=lambda function: function.__name__)
def test_binary_operations(function: Any) -> None:
    compared = Compared()
    for said, frame in frames():
        for label in frame.columns if said.startswith(("full", "nulls")) else ("i", "x", "s", "t"):
            for scalar in SCALARS:
                graph = Graph(frame)
                compared(
                    f"{said}: {label} {function.__name__} {scalar!r}",
                    graph,
                    graph(function, graph.column(label), scalar),
                )
                if function in (operator.sub, operator.lt):
                    graph = Graph(frame)
                    compared(
                        f"{said}: {scalar!r} {function.__name__} {label}",
                        graph,
                        graph(function, scalar, graph.column(label)),
                    )
            for other in OTHERS:
                graph = Graph(frame)
                pair = graph.column(label), graph.column(other)
                compared(f"{said}: {label} {function.__name__} {other}", graph, graph(function, *pair))
    compared.check()


BY_ROWS = [
    (M.isin, ([1, 2, -3],), {}),
    (M.isin, (["b", ""],), {}),
    (M.isin, ([],), {}),
    (M.isin, ([None, "b"],), {}),
    (M.isin, ([1.5, float("nan")],), {}),
    (M.isin, ([pd.Timestamp("2020-01-02")],), {}),
    (M.isin, (np.array(["b", "x"], dtype=object),), {}),
    (M.between, (-1, 2, "both"), {}),
    (M.between, (0.5, 1, "neither"), {}),
    (M.between, ("a", "c", "both"), {}),
    (M.isna, (), {}),
    (M.notnull, (), {}),
    (M.fillna, (0,), {}),
    (M.fillna, ("none",), {}),
    (M.abs, (), {}),
    (M.round, (0,), {}),
    (M.round, (1,), {}),
    (M.astype, ("float64",), {}),
    (M.astype, ("int64",), {}),
    (M.astype, ("str",), {}),
    (M.astype, ("category",), {}),
    (operator.inv, (), {}),
    (M.to_frame, (), {}),
    (M.to_frame, (), {"name": "other"}),
    (M.reset_index, (), {"drop": True}),
    (M.reset_index, (), {"drop": False}),
    (M.cumsum, (), {}),
    *(
        (PropertyMap.operation, ("dt", name), {})
        for name in ("year", "month", "day", "hour", "weekday", "quarter")
    ),
    *(
        (FunctionMap.operation, ("str", name, args, kwargs), {})
        for name, args, kwargs in [
            ("contains", ("P.*x",), {}),
            ("contains", ("b",), {"regex": False}),
            ("startswith", ("PROMO",), {}),
            ("endswith", ("x",), {}),
            ("upper", (), {}),
            ("len", (), {}),
            ("slice", (0, 2), {}),
            ("strip", (), {}),
            ("split", (" ",), {"expand": True}),
            ("contains", ("b",), {"na": False}),
        ]
    ),
]


def test_operations_by_rows() -> None:
    compared = Compared()
    for said, frame in frames():
        for label in frame.columns:
            for function, args, kwargs in BY_ROWS:
                if (
                    label == "x" and str(args) == "('category',)"
                ):  # a category of NaN does not equal another one
                    continue
                graph = Graph(frame)
                name = getattr(function, "method", getattr(function, "__name__", ""))
                compared(
                    f"{said}: {label}.{name}{args}{kwargs}",
                    graph,
                    graph(function, graph.column(label), *args, **kwargs),
                )
    compared.check()


def test_where_takes_other_series() -> None:
    compared = Compared()
    for said, frame in frames():
        for label, other, method in itertools.product(
            frame.columns, [0, 1.5, "x", None, "i2", "x", "s2"], (M.where, M.mask)
        ):
            graph = Graph(frame)
            value = graph.column(other) if other in frame.columns else other
            compared(
                f"{said}: {label}.{method.method}(b, {other!r})",
                graph,
                graph(method, graph.column(label), graph.column("b"), value),
            )
    compared.check()


def test_filters_and_labels() -> None:
    compared = Compared(also_left=True)
    for said, frame in frames((0, 1)):
        for mask in ("b", "b2", "i"):
            graph = Graph(frame)
            kept = graph(operator.getitem, graph.whole, graph.column(mask))
            compared(f"{said}: filter by {mask}", graph, kept)
            again = graph(operator.getitem, kept, graph(operator.getitem, kept, "b2"))
            compared(f"{said}: filter by {mask}, b2", graph, again)
            compared(
                f"{said}: column filtered",
                graph,
                graph(operator.getitem, graph.column("s"), graph.column(mask)),
            )
            chosen = graph(operator.getitem, again, ["s", "i", "c", "e", "x"])
            compared(f"{said}: chosen", graph, chosen)
            compared(
                f"{said}: renamed", graph, graph(RenameFrame.operation, chosen, {"i": "eye", "none": "n"})
            )
            compared(f"{said}: renamed twice", graph, graph(RenameFrame.operation, chosen, {"i": "s"}))
            compared(f"{said}: numbered", graph, graph(M.reset_index, chosen, drop=True))
            double = graph(operator.mul, graph(operator.getitem, kept, "x"), 2)
            compared(
                f"{said}: assigned",
                graph,
                graph(Assign.operation, chosen, "i", graph(operator.getitem, chosen, "x"), "new", 1),
            )
            compared(
                f"{said}: assigned from elsewhere",
                graph,
                graph(Assign.operation, kept, "new", double, "i", double),
            )
            compared(f"{said}: another index", graph, graph(Assign.operation, kept, "new", graph.column("x")))
            for value in (1, 1.5, True, "text", None, float("nan"), np.float32(1), pd.Timestamp("2020")):
                compared(f"{said}: assigned {value!r}", graph, graph(Assign.operation, kept, "new", value))
            compared(f"{said}: no label", graph, graph(operator.getitem, kept, "none"))
            compared(f"{said}: labels twice", graph, graph(operator.getitem, kept, ["i", "i"]))
    compared.check()


@pytest.mark.parametrize(
    "keys", [["s"], ["i"], ["i8", "s"], ["t"], ["b", "u"], ["x"], ["c"], ["i", "i2", "s"]], ids=str
)
@pytest.mark.parametrize("dropna", [True, False])
def test_groups_of_a_partition(keys: list[str], dropna: bool) -> None:
    from dask_cudf._expr.groupby import DecomposableCudfGroupbyAgg

    compared = Compared()
    every = ["sum", "count", "mean", "min", "max"]
    for said, frame in frames():
        if "x" not in keys:  # whether the least of NaN and numbers is NaN depends on the order of rows
            frame = frame.assign(x=frame["x"].nans_to_nulls())
        for label in {"i2", "i8", "x", "f32", "s2", "b2", "t2", "c"} - set(keys):
            for aggregations in (["sum"], ["count"], ["mean", "max"], every, ["std"]):
                graph = Graph(frame)
                options = {
                    "gb_cols": keys,
                    "aggs": {label: aggregations},
                    "columns": [label],
                    "dropna": dropna,
                }
                grouped = graph(
                    DecomposableCudfGroupbyAgg.chunk, graph.whole, *keys, **options, sort=None, sep="___"
                )
                compared(f"{said}: {label} {aggregations} by {keys}", graph, grouped, order=False)
        graph = Graph(frame)
        aggs = {"f32": ["mean"], "x": ["sum", "max"], "i32": ["count"]}
        for label in keys:
            aggs.pop(label, None)
        options = {"gb_cols": keys, "aggs": aggs, "columns": list(aggs), "dropna": dropna}
        grouped = graph(DecomposableCudfGroupbyAgg.chunk, graph.whole, *keys, **options, sort=None, sep="___")
        compared(f"{said}: several by {keys}", graph, grouped, order=False)
    compared.check(ran=keys not in (["x"], ["c"]))


@pytest.mark.parametrize("how", ["inner", "left", "leftsemi"])
def test_joins(how: str) -> None:
    compared = Compared()
    pairs: list[Any] = [
        ("i", "i"),
        ("i", "i2"),
        ("s", "s"),
        ("t", "t"),
        ("x", "x"),
        ("b", "b"),
        ("i", "i32"),
        ("c", "c"),
    ]
    pairs += [(["i", "s"], ["i2", "s"]), (["i8"], ["i8"]), (["s", "i"], ["i", "s"]), (["i", "b"], ["b", "i"])]
    kinds = [("full", "full"), ("nulls", "nulls"), ("full", "nulls"), ("empty", "full"), ("full", "empty")]
    for said, other in kinds:
        left, right = frame_of(said, 1), frame_of(other, 3)
        for keys, of_right in pairs:
            for dropped in (["c", "e"], ["e"]):
                if dropped == ["e"] and "c" not in (keys, of_right):
                    continue
                graph = Graph(left.drop(columns=dropped))
                graph.nodes["right"] = DataNode("right", right.drop(columns=dropped))
                options = {"how": how, "left_on": keys, "right_on": of_right, "suffixes": ("_x", "_r")}
                empty = left.drop(columns=dropped).head(0), right.drop(columns=dropped).head(0)
                meta = outcome(partial(empty[0].merge, empty[1], **options))
                if isinstance(meta, Exception):
                    continue
                joined = graph(merge_chunk, graph.whole, TaskRef("right"), result_meta=meta, **options)
                compared(f"{said} {how} {other}: {keys} {of_right}", graph, joined, order=False)
    compared.check()


@pytest.mark.parametrize("kind", [of_groups.Sum, of_groups.Count, of_groups.Min, of_groups.Max])
def test_groups_of_a_partition_by_index(kind: Any) -> None:
    compared = Compared(also_left=True)
    for said, frame in frames():
        frame = frame.assign(x=frame["x"].nans_to_nulls())
        for by, dropna in itertools.product([["s"], ["i", "s"], ["t"], ["x"], ["c"]], [None, False]):
            for columns in ("x", "i32", "s2", ["i2", "f32"], ["b2"]):
                graph = Graph(frame)
                options = {"chunk": kind.groupby_chunk, "columns": columns, "observed": True}
                options |= {} if dropna is None else {"dropna": dropna}
                grouped = graph(kind.chunk, graph.whole, *by, **options)
                again = graph(M.reset_index, grouped)
                compared(f"{said}: {kind.__name__} {columns} by {by}", graph, again, order=False)
                if by == ["i", "s"] or by == ["s"]:
                    sort = graph(M.sort_index, grouped)
                    compared(f"{said}: {kind.__name__} {columns} by {by}, sorted", graph, sort, order=False)
    compared.check()


@pytest.mark.parametrize("keys", [["s"], ["i", "s"], ["x"], ["t"]], ids=str)
def test_trees_of_groups(keys: list[str]) -> None:
    import cudf
    from dask_cudf._expr import groupby

    compared = Compared()
    interpreter = compared.interpreter
    for said, frame in frames():
        other = frame_of("full", 7)
        aggs = {"i2": ["sum", "mean"], "f32": ["min", "max", "mean"], "i32": ["count"], "u": ["sum"]}
        once = {"i2": ["mean"], "f32": ["max"], "i32": ["count"], "u": ["sum"]}
        options = {"gb_cols": keys, "dropna": True, "sort": None, "sep": "___"}
        whole, of_once = (
            cudf.concat(
                [
                    groupby._groupby_partition_agg(each, aggs=wanted, columns=list(wanted), **options)
                    for each in (frame.copy(deep=False), other.copy(deep=False))
                ]
            )
            for wanted in (aggs, once)
        )
        ends = {
            "aggs": once,
            "columns": list(once),
            "as_index": True,
            "str_cols_out": True,
            "aggs_renames": {},
        }
        for name, function, more in [
            ("groupby-again", groupby._tree_node_agg, {}),
            (
                "groupby-end",
                groupby._finalize_gb_agg,
                {**ends, "final_columns": pd.Index(["i2", "u", "f32", "i32"])},
            ),
            ("groupby-end", groupby._finalize_gb_agg, {**ends, "final_columns": ["u", "i2"]}),
            ("groupby-end", groupby._finalize_gb_agg, {**ends, "final_columns": "i2"}),
        ]:
            given = of_once if more else whole
            found = interpreter.call(
                name, lambda *args, **kwargs: None, (given.copy(deep=False),), options | more
            )
            if found is not None:
                compared.ran["columns"] += 1
                expected = function(given.copy(deep=False), **options, **more)
                if name == "groupby-end":
                    assert list(found.index.names) == list(expected.index.names)
                    found, expected = found.reset_index(), expected.reset_index()
                difference = differ(found, expected, order=False)
                compared.differences += [f"{said} {name} by {keys}: {difference}"] if difference else []
            compared.differences += [f"{said} {name} by {keys}: {error}" for error in compared.errors]
            compared.errors.clear()
    compared.check(ran=keys != ["x"])


def test_frames_made_of_columns_do_not_share_writes() -> None:
    frame = frame_of("full")
    before = frame.copy(deep=True)

    def write(given: Any) -> Any:
        given.loc[given["b"], "i"] = 99
        given["x"] = 0.0
        return given

    graph = Graph(frame)
    made = graph(Assign.operation, graph.whole, "new", graph(operator.add, graph.column("i"), 1))
    twice = graph(operator.getitem, graph(write, made), ["i", "new"])
    other = graph(operator.getitem, made, ["i", "new"])
    graph.nodes["both"] = Task("both", lambda a, b: (a, b), twice, other)
    Interpreter(LIBRARIES["cudf"].engine(), lambda name, error: None).run(graph.nodes, "both")
    assert differ(frame, before) is None


def test_variances_of_integers_do_not_wrap_around() -> None:
    dask_cudf = pytest.importorskip("dask_cudf", reason="dask_cudf is not installed")
    random = np.random.default_rng(0)
    numbers = random.integers(10**6, 2 * 10**6, 9000)
    rows = pd.DataFrame(
        {"k": random.integers(0, 3, 9000), "n": numbers, "i": (numbers % 300).astype("int16")}
    )
    patches = PatchSet()
    wrap_trees(patches, lambda name, function, args, kwargs: function(*args, **kwargs))
    try:
        groups = dask_cudf.from_cudf(
            importlib.import_module("cudf").from_pandas(rows), npartitions=3
        ).groupby("k")
        found = groups.agg({"n": ["std", "sum"], "i": ["var"]}).compute(scheduler="sync")
    finally:
        patches.restore()
    wanted = rows.groupby("k").agg({"n": ["std", "sum"], "i": ["var"]})
    pd.testing.assert_frame_equal(found.to_pandas().sort_index()[wanted.columns], wanted, check_dtype=False)


def test_groups_that_run_both_ways_are_compared_in_any_order() -> None:
    cudf, engine = importlib.import_module("cudf"), LIBRARIES["cudf"].engine()
    series = cudf.Series([1.0, 2.0], index=cudf.Index([5, 6], name="key"), name="value")
    for groups in (series, series.to_frame(), series.rename(None)):
        assert engine.difference(groups[::-1], groups, in_order=False) is None
        assert engine.difference(groups + 1, groups, in_order=False) is not None
    for other in (series.to_frame(), series.rename("other")):
        assert engine.difference(other, series, in_order=False) is not None
