"""Check that the planning cache holds no data, detects changes, is bounded, and ends with the runtime."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations, compress
from pathlib import Path
from types import ModuleType
from typing import Any

import dask
import dask.dataframe as dd
import fsspec
import numpy as np
import pandas as pd
import pytest
from dask.base import collections_to_expr
from dask.dataframe.dask_expr._expr import Filter, Projection
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine
from dask.tokenize import tokenize
from pyarrow.fs import LocalFileSystem

from dask_gpurt.client.planning import cache as module
from dask_gpurt.client.planning.catalogue.schema import CATEGORIES_LIMIT, schema_of
from dask_gpurt.client.planning.keys import frozen, text_of_frame
from dask_gpurt.client.planning.origins import Origins, named
from dask_gpurt.client.planning.packed import LRU
from dask_gpurt.client.planning.rules import PartitionSizes
from dask_gpurt.dask_hooks import planning, replacing
from dask_gpurt.dask_hooks.comparison import Seam, SeamGroup
from tests.helpers.planned import Planner


def write(folder: Path, rows: int = 8, **columns: Any) -> str:
    frame = pd.DataFrame({"key": np.arange(rows) % 3, "value": np.arange(rows), **columns})
    dd.from_pandas(frame, npartitions=2).to_parquet(folder)
    return str(folder)


def query(path: str) -> Any:
    table = dd.read_parquet(path)
    joined = table[table.value > 1].merge(table.groupby("key").value.sum().reset_index(), on="key")
    return joined.assign(twice=joined.value_x * 2)


def test_a_step_that_makes_no_sense_fails_each_time(planner: Planner, tmp_path: Path) -> None:
    """Dask leaves wrong metadata on such an expression, and would use them if it were cached."""
    table = dd.read_parquet(write(tmp_path / "table"))
    grouped = table.groupby("key").agg({"value": ["min", "max"]})
    for _ in range(3):
        with pytest.raises(ValueError, match="Not all columns are categoricals"):
            grouped.astype({"value": "category"})
        gc.collect()


#: The ways to name the files of a folder, as arguments of ``read_parquet``.
WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "folder": lambda folder: {"path": folder},
    "files": lambda folder: {"path": sorted(map(str, Path(folder).iterdir()))},
    "pattern": lambda folder: {"path": f"{folder}/*.parquet"},
    "arrow": lambda folder: {"path": folder, "filesystem": "arrow"},
    "arrow's own": lambda folder: {"path": folder, "filesystem": LocalFileSystem(use_mmap=True)},
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_name_files_is_read_once(planner: Planner, tmp_path: Path, way: str) -> None:
    arguments = WAYS[way](write(tmp_path / "table"))
    tables = [dd.read_parquet(**arguments) for _ in range(2)]
    assert tables[0]._name == tables[1]._name
    assert (planner.count("files.read"), planner.count("files.reused")) == (1, 1)
    first = tables[0].assign(new=1).optimize()
    assert tables[1].assign(new=1).optimize().expr is first.expr
    with dask.config.set(scheduler="sync"):
        assert len(first.compute()) == 8


@pytest.mark.parametrize("given", ["a file system of the user's", "options of Arrow's"])
def test_other_file_systems_are_left_to_dask(planner: Planner, tmp_path: Path, given: str) -> None:
    folder = write(tmp_path / "table")
    options: dict[str, Any] = {"filesystem": fsspec.filesystem("file")}
    if given == "options of Arrow's":
        options = {"filesystem": "arrow", "storage_options": {"region": "x", "use_mmap": True}}
    for _ in range(2):
        with suppress(TypeError):  # Arrow's local file system has no region
            dd.read_parquet(folder, **options)
    assert planner.count("files.read") == planner.count("files.reused") == 0


def test_file_systems_with_other_options_differ() -> None:
    mapped = LocalFileSystem(use_mmap=True)
    assert frozen(LocalFileSystem()) == frozen(LocalFileSystem()) is not None
    assert frozen(mapped) == frozen(LocalFileSystem(use_mmap=True)) != frozen(LocalFileSystem())


@pytest.mark.usefixtures("planner")
def test_a_read_that_is_pickled_does_not_empty_the_wrappers_of_another(tmp_path: Path) -> None:
    """A thread may be using them: for a moment Dask's wrapper of a file that is pickled has no file."""
    folder = write(tmp_path / "table")
    wrappers = [
        dd.read_parquet(folder, columns=columns, filesystem="arrow").expr._dataset_info["fragments"][0]
        for columns in (["key"], ["value"])
    ]
    pickle.dumps(wrappers[0])
    assert wrappers[0]._fragment is None
    assert wrappers[1]._fragment is not None


def test_frames_of_the_user_do_not_stay(planner: Planner) -> None:
    frame = pd.DataFrame({"key": [1, 2, 3], "value": [1.0, 2.0, 3.0]})
    gone = weakref.ref(frame)
    table = dd.from_pandas(frame, npartitions=2, sort=False)
    expression = weakref.ref(table.expr)
    merged = table.merge(table, on="key")
    merged.optimize()
    assert planner.count("expressions.not-kept") > 0
    del frame, table, merged
    gc.collect()
    assert (gone(), expression()) == (None, None)


def test_settings_by_which_dask_plans_drop_what_was_kept(planner: Planner, tmp_path: Path) -> None:
    path = write(tmp_path / "table")
    plans = []
    for method in ("tasks", "disk", "tasks"):
        with dask.config.set({"dataframe.shuffle.method": method}):
            shuffled = dd.read_parquet(path).shuffle("key").optimize(fuse=False)
            plans.append([type(expr).__name__ for expr in shuffled.expr.walk()])
    assert plans[0] == plans[2] != plans[1]
    for setting in ("scheduler", "explicit-comms"):
        with dask.config.set({setting: "sync"}):
            dd.read_parquet(path).shuffle("key").optimize(fuse=False)
    assert planner.count("plans.reused") == 0


def test_where_it_is_not_usable_dask_plans(planner: Planner, tmp_path: Path) -> None:
    path = write(tmp_path / "table")
    planner.usable = False
    before = planner.metrics.snapshot()
    query(path).optimize()
    query(path).optimize()
    assert planner.metrics.snapshot() == before


def test_results_that_stay_have_the_partitions_of_their_collections(planner: Planner, tmp_path: Path) -> None:
    """Dask makes collections of the results with those; it tunes eight files into fewer partitions."""
    table = dd.from_pandas(pd.DataFrame({name: np.arange(16) for name in "abcdefghi"}), npartitions=8)
    table.to_parquet(tmp_path / "table")
    wide = dd.read_parquet(tmp_path / "table")
    rows = wide.merge(wide[["a", "b"]], on="a")
    narrow, later, left = wide[["a"]], wide.b + 1, rows[rows.c > 12][["d"]]
    planner.sizes = PartitionSizes(2, 4)
    plan = collections_to_expr([narrow, later, left]).optimize()
    assert [len(keys) for keys in plan.__dask_keys__()] == [8, 8, left.npartitions]
    filters = left.optimize(fuse=False).expr.find_operations(Filter)
    assert not [each for each in filters if list(each.find_operations(Merge))]
    graph = plan.__dask_graph__()
    found = [pd.concat(dask.get(graph, keys)) for keys in plan.__dask_keys__()]
    pd.testing.assert_frame_equal(found[0].reset_index(drop=True), pd.DataFrame({"a": np.arange(16)}))
    assert list(found[1]) == list(range(1, 17))
    assert sorted(found[2].d) == [13, 14, 15]


def test_dask_is_as_it_was_afterwards(tmp_path: Path) -> None:
    # Known bodies and one constant are replaced; the other functions are called.
    seams = replacing.PLANNING.seams
    replaced = [part for part in seams if part.bodies or part.attribute == "_CACHED_PLAN_SIZE"]
    before = [vars(each.owner())[each.attribute] for each in replaced]
    planner = Planner()
    planner.cache.install()
    planner.cache.install()
    during = [vars(each.owner())[each.attribute] for each in replaced]
    planner.cache.remove()
    after = [vars(each.owner())[each.attribute] for each in replaced]
    # The constant is the same if a client that another test has left still plans here.
    functions = [bool(part.bodies) for part in replaced]
    assert all(one is not other for one, other in compress(zip(before, during, strict=True), functions))
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_all_is_dropped_when_it_goes(tmp_path: Path) -> None:
    planner = Planner()
    planner.cache.install()
    with planner.used():
        table = query(write(tmp_path / "table"))
        expression = weakref.ref(table.expr)
        table.optimize()
        del table
        gc.collect()
        assert expression() is not None
    planner.cache.remove()
    gc.collect()
    assert expression() is None


def test_a_dask_that_differs_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = Seam("dask._expr:optimize_until", "expr stage", bodies=("of another",))
    monkeypatch.setattr(
        replacing,
        "PLANNING",
        SeamGroup("planning", (other, *replacing.PLANNING.seams[:1], *replacing.PLANNING.seams[2:])),
    )
    planner = Planner()
    planner.cache.install()
    with planner.used():
        query(write(tmp_path / "table")).optimize()
    snapshot = planner.metrics.snapshot()
    assert snapshot["counters"] == {}
    assert "optimize_until" in snapshot["fallbacks"]["planning.unsupported"]["reason"]


def test_the_planning_cache_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "EXPRESSIONS_LIMIT", 10)
    planner = Planner()
    planner.cache.install()
    path = write(tmp_path / "table")
    with planner.used():
        table = dd.read_parquet(path)
        filtered = [weakref.ref((~(table.value > number)).expr.frame) for number in range(30)]
    gc.collect()
    assert 0 < sum(expression() is not None for expression in filtered) <= 10
    planner.cache.remove()


def test_the_value_that_was_not_used_for_longest_goes_first() -> None:
    kept: LRU[int] = LRU(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]


FRAME = pd.DataFrame({"a": pd.Categorical([], categories=["x", "y"]), "b": pd.Series([], dtype="int64")})


OTHERS = [
    FRAME.rename(columns={"b": "c"}),
    FRAME.astype({"b": "Int64"}),
    FRAME.astype({"b": "int32"}),
    FRAME.assign(a=FRAME.a.cat.reorder_categories(["y", "x"])),
    FRAME.assign(a=FRAME.a.cat.as_ordered()),
    FRAME.set_index("b"),
    FRAME.rename_axis(index="named"),
    FRAME.rename_axis(columns="named"),
    FRAME[["b", "a"]],
    FRAME[["b"]],
    FRAME.b,
    FRAME.set_index(["a", "b"]),
]


@pytest.mark.parametrize("key_of", [schema_of, text_of_frame])
def test_empty_frames_that_differ_have_different_keys(key_of: Callable[[Any], Any]) -> None:
    keys = [*map(key_of, (FRAME, *OTHERS))]
    assert None not in keys
    assert all(one != other for one, other in combinations(keys, 2))
    assert keys == [*map(key_of, (FRAME.copy(), *OTHERS))]


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [1]}),
        FRAME.rename(columns={"b": 1}),
        FRAME.assign(a=pd.Categorical([], categories=range(CATEGORIES_LIMIT + 1))),
        FRAME.assign(a=pd.Series([], dtype="datetime64[ns, UTC]")),
        FRAME.set_flags(allows_duplicate_labels=False),
        1,
    ],
)
def test_frames_that_are_not_compared(frame: Any) -> None:
    assert schema_of(frame) is None


def test_frames_with_rows_have_no_text() -> None:
    assert text_of_frame(pd.DataFrame({"a": [1]})) is text_of_frame("a") is None


def test_operands_that_python_takes_for_equal_have_different_keys() -> None:
    assert len({frozen(1), frozen(1.0), frozen(True), frozen("1"), frozen([1]), frozen((1,))}) == 6
    assert frozen({"a": [1]}) == frozen({"a": [1]}) != frozen([("a", [1])])
    assert frozen(lambda: 0) is None
    assert frozen([pd.Series([1])]) is None


class _Own: ...


def test_classes_of_dask_are_pickled_once_for_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, pickled = [Projection, _Own], list[object]()
    expected = [tokenize(kind) for kind in kinds]
    original = dask.tokenize._normalize_pickle

    def counting(value: object) -> tuple[object, ...]:
        pickled.append(value)
        return original(value)

    monkeypatch.setattr(dask.tokenize, "_normalize_pickle", counting)
    planner = Planner()
    planner.cache.install()
    try:
        assert [[tokenize(kind) for kind in kinds] for _ in range(3)] == [expected] * 3
    finally:
        planner.cache.remove()
    assert pickled.count(Projection) <= 1
    assert pickled.count(_Own) == 3


def test_another_dask_cudf_looks_at_files_itself_which_counts(
    planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CudfEngine(ArrowDatasetEngine):  # type: ignore[misc]
        @classmethod
        def _create_dd_meta(cls, dataset_info: Any, something_new: Any = None) -> Any:
            return super()._create_dd_meta(dataset_info)

    name = "dask_cudf._legacy.io.parquet"
    CudfEngine.__module__, CudfEngine.__qualname__ = name, "CudfEngine"
    *parents, module_ = (ModuleType(name.rsplit(".", up)[0]) for up in (3, 2, 1)), ModuleType(name)
    for each in (*parents[0], module_):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    module_.CudfEngine = CudfEngine  # type: ignore[attr-defined]
    table = dd.read_parquet(write(tmp_path / "table"), engine=CudfEngine)
    assert list(table.columns) == ["key", "value"]
    found = planner.metrics.fallbacks()["planning.files"]
    assert found["count"] == 1
    assert "_create_dd_meta takes (" in found["reason"]


def test_frames_are_told_without_their_dtypes(
    planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On cudf, a look at dtypes takes a millisecond, and an empty frame half of one."""
    table = dd.read_parquet(write(tmp_path / "table", other=1.5))
    combined = table.value.expr * 2 + table.key.expr
    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "dtypes", None)
        chosen = table[["value", "key"]][["key"]].simplify()
    assert chosen.expr.columns == ["key"]
    assert combined.npartitions == 2
    assert "_meta" not in vars(combined) | vars(combined.left)


def test_settings_that_are_equal_but_of_other_types_differ() -> None:
    found = set()
    for value in (1, True, 1.0, "1", [1], (1,), {"a": 1}, {"a": True}, object):
        with dask.config.set({"annotations": value}):
            assert repr(value) in planning.settings()
            found.add(planning.settings())
    assert len(found) == 9


def test_collections_of_known_kinds_are_made_without_metadata(planner: Planner) -> None:
    rows = dd.from_pandas(pd.DataFrame({"a": [1, 2], "b": [1.5, 2.5]}), npartitions=1)
    for kind, make in ((dd.DataFrame, lambda of: of[["a"]] + 1), (dd.Series, lambda of: of.a + of.b)):
        made = [make(rows), make(rows.assign(c=1))]
        assert [type(each) for each in made] == [kind, kind]
        assert "_meta" not in vars(made[1].expr)
        assert made[1]._meta.shape[1:] == ((1,) if kind is dd.DataFrame else ())
    assert type(rows.a.sum()) is not dd.Series
    assert type(rows.index) is dd.Index


# ---- names of operations, and what is told of a plan --------------------------------------------------

TIMES = pd.DataFrame({"time": np.arange(20), "name": np.arange(20) % 3, "price": np.arange(20) / 2})


def trades_and_quotes() -> tuple[dd.DataFrame, dd.DataFrame]:
    return dd.from_pandas(TIMES[1::2], npartitions=3), dd.from_pandas(TIMES[::2], npartitions=2)


@pytest.mark.parametrize("how", ["inner", "asof"])
def test_joins_are_named_by_kind_and_keys(how: str) -> None:
    trades, quotes = trades_and_quotes()
    join = dd.merge_asof if how == "asof" else dd.merge
    assert named(join(trades, quotes, on="time").expr) == f"{how} join on time"
    indexed = join(trades.set_index("time"), quotes.set_index("time"), left_index=True, right_index=True)
    assert named(indexed.expr) == f"{how} join on index = index"


def test_a_join_by_the_last_row_before_is_told(planner: Planner) -> None:
    """Its class derives from that of other joins, and lacks their parameters."""
    trades, quotes = trades_and_quotes()
    dd.merge_asof(trades, quotes, on="time", by="name").optimize()
    assert planner.told["shuffles"] == {}


def test_a_plan_that_cannot_be_told_is_computed(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, str]:
        raise AttributeError("expressions of other libraries may lack anything")

    monkeypatch.setattr(Origins, "of_shuffles", fail)
    planned = dd.from_pandas(TIMES, npartitions=3).price.sum().optimize()
    assert "planning.not-told" in planner.metrics.snapshot()["fallbacks"]
    with dask.config.set(scheduler="sync"):
        assert planned.compute() == TIMES.price.sum()
