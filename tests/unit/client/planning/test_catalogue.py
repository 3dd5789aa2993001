"""Check that the catalogue describes each operation as Dask does: labels, dtypes, categories and index."""

from __future__ import annotations

import gc
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._task_spec import execute_graph
from dask.dataframe.dask_expr import _reductions
from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine

from dask_gpurt.client.planning.catalogue.schema import frame_of, schema_of
from dask_gpurt.client.planning.catalogue.shapes import rule_of
from dask_gpurt.dask_hooks import parquet_files
from dask_gpurt.dask_hooks.comparison import Seam
from dask_gpurt.dask_hooks.planning import graph_of
from tests.helpers.clusters import Library
from tests.helpers.examples import FACTOR
from tests.helpers.planned import COLUMNS, Planner, described, tables

#: What is compared with columns of each dtype: values of each type that programs write.
VALUES = (1, 0.5, -300, True, "ant", pd.Timestamp("2013-01-02"), np.int8(2), pd.Timedelta("1D"), None)
#: One of how many operations a test tries by day; every night it tries most of them.
EVERY = max(1, round(17 / FACTOR))
AGGREGATIONS = ("sum", "mean", "min", "max", "count", "size", "nunique", "std", "var", "first", "median")


def of_columns(left: Any, right: Any) -> Iterator[Any]:
    """Yield a thunk for each operation on columns of each dtype, with others and with values."""
    for name in COLUMNS:
        one = left[name]
        for value in VALUES:
            yield from (
                lambda one=one, value=value, how=how: getattr(one, how)(value)
                for how in ("__lt__", "__eq__", "__add__", "__mul__", "__truediv__", "__rsub__", "__and__")
            )
            yield lambda one=one, value=value: one.fillna(value)
            yield lambda one=one, value=value: one.where(one.notnull(), value)
            yield lambda one=one, value=value: one.isin([value])
            yield lambda name=name, value=value: left.assign(**{name: value, "new": value})
            yield lambda one=one, value=value: left[one > value]
        for other in COLUMNS:
            yield from (
                lambda one=one, other=other, how=how: getattr(one, how)(left[other])
                for how in ("__ge__", "__ne__", "__sub__", "__mul__", "__or__")
            )
            yield lambda name=name, other=other: left.assign(**{name: left[other], "new": left[other]})
        for dtype in ("float32", "int64", "Int64", "str", "category", "bool", "datetime64[ns]"):
            yield lambda one=one, dtype=dtype: one.astype(dtype)
            yield lambda name=name, dtype=dtype: left.astype({name: dtype})
        yield from (
            lambda one=one, how=how: getattr(one, how)() for how in ("isnull", "notnull", "abs", "round")
        )
        yield from (lambda one=one, how=how: getattr(one.dt, how) for how in ("year", "date", "dayofweek"))
        yield from (lambda one=one, how=how: getattr(one.str, how)() for how in ("upper", "len", "isdigit"))
        yield lambda one=one: one.str.contains("a")
        yield lambda one=one: one.str.slice(0, 2)
        yield lambda one=one: one.between(1, 2)
        yield lambda one=one: ~one
        yield lambda one=one: -one
        yield lambda one=one: one.to_frame()
        yield lambda one=one: one.rename("other") + one


def of_frames(left: Any, right: Any) -> Iterator[Any]:
    """Yield a thunk for each operation on frames."""
    few = ["name", "key", "when"]
    yield lambda: left[few]
    yield lambda: left[["key"]][few[:1]]
    yield lambda: left[[]]
    yield lambda: left[[]].assign(new=left.key, more=1)[["more"]]
    yield lambda: left[["key", "key"]]
    yield lambda: left[["key", "key"]].key
    yield lambda: left.drop(columns=few)
    yield lambda: left.drop(columns="key")
    yield lambda: left.drop(columns=["missing"])
    yield lambda: left["missing"]
    yield lambda: left[left.key > 1][left.flag]
    yield lambda: left[left.key > 1].key
    yield lambda: left.dropna()
    yield lambda: left.dropna(subset=["key"])
    yield lambda: left.rename(columns={"key": "other", "name": "more"})
    yield lambda: left.rename(columns={"key": "name"})
    yield lambda: left.rename(columns={"key": 1})[1]
    yield lambda: left.rename(columns=str.upper)
    yield lambda: left.rename_axis(columns="other")
    if isinstance(left._meta, pd.DataFrame):  # cudf renames the index of `left`, too
        for names in ("other", None, 1, {"index": "other"}, {"index": str.upper}):
            yield lambda names=names: left.rename_axis(
                **names if isinstance(names, dict) else {"mapper": names}
            )
        yield lambda: left.key.rename_axis("other")
        yield lambda: left[few].set_index("key").rename_axis(index="other").reset_index()
        yield lambda: left[[]].rename_axis("other")
    for by in ("key", ["name", "when"]):
        yield lambda by=by: left.shuffle(by).optimize(fuse=False)
        yield lambda by=by: left[few].shuffle(by, ignore_index=True).optimize(fuse=False)
    yield lambda: left.assign(_partitions=1).shuffle("key").optimize(fuse=False)
    yield lambda: left.rename(columns={"key": "other", "missing": "name"}).reset_index()
    yield lambda: left.assign(index=1, name="x").rename(columns={"key": "level_0"}).reset_index()
    yield lambda: left.set_index("key").reset_index()
    yield lambda: left.set_index("name")[["small"]].rename(columns={"small": "name"}).reset_index()
    yield lambda: left[few].groupby(["key", "name"]).agg({"when": "max"}).reset_index(drop=True)
    yield lambda: left.rename(columns={"key": 1}).assign(new=1)
    yield lambda: left[few].add_prefix("a")
    yield lambda: left[few].drop_duplicates()
    yield lambda: left.drop_duplicates(subset=["key"])
    yield lambda: left.nlargest(3, "key")
    yield lambda: left.nsmallest(1, ["ratio", "key"])
    for number in (1, 3):
        yield lambda n=number: left.sort_values("name", ascending=False).head(n, compute=False).simplify()
    yield (
        lambda: left.sort_values(["kind", "when"], ascending=[True, False]).head(7, compute=False).simplify()
    )
    yield lambda: left.sort_values("key").head(3, compute=False)
    yield lambda: left.head(3, compute=False)[few]
    yield lambda: left.assign(key=left.key * 2, new=left.ratio).assign(more=lambda x: x.new)
    yield lambda: left.assign(new=left.key.sum())
    yield lambda: left[few].assign(one=left.small, two=left.small * 2, three=left.ratio, four="x", five="x")
    yield lambda: left.set_index("key").assign(new=left.small)
    yield lambda: left[left.key > 10**12].assign(
        new=left.when < pd.Timestamp("1500-01-01"), old=left.small > 400
    )
    yield lambda: left[["when"]].assign(new=left.when < pd.Timestamp("2013-01-02", tz="UTC"))
    yield lambda: left.assign(v0=left.key, a=1, key="x")
    yield lambda: left[few].assign(new=left.index)
    yield lambda: left[["key", "key"]].assign(new=1)
    yield lambda: left.key + left.ratio.rename("key") * left.small
    yield lambda: (left.key.rename(None) + left.ratio).rename("key") + left.key.rename(None)
    yield lambda: (left.name.rename(None) == "x") & (left.text != "y")
    yield lambda: left.repartition(npartitions=1).key + left.repartition(npartitions=1).small
    yield lambda: left.shuffle("key")[few].assign(new=1)
    yield lambda: left.assign(index=1).reset_index()
    yield lambda: left.index
    yield lambda: left[left.index > left.index]
    yield lambda: left.set_index("key")
    yield lambda: left + 1
    yield lambda: left[["key"]] * left[["key"]]
    yield lambda: dd.concat([left, right[few]])
    yield lambda: dd.concat([left[few], right[few]]).key
    yield lambda: left[few].repartition(npartitions=1)[["key"]]
    yield lambda: left.map_partitions(lambda x: x)[few]
    for drop in (True, False):
        yield lambda drop=drop: left.reset_index(drop=drop)
        yield lambda drop=drop: left[left.key > 1].reset_index(drop=drop).reset_index(drop=drop)
        yield lambda drop=drop: left.key.reset_index(drop=drop)
    yield from (
        lambda how=how: getattr(left.key, how)() for how in ("sum", "max", "mean", "count", "nunique")
    )
    yield from (lambda how=how: getattr(left[few], how)() for how in ("count", "max"))


def of_joins(left: Any, right: Any) -> Iterator[Any]:
    """Yield a thunk for each way to join, by keys of each dtype."""
    few, small = left[["key", "name", "small"]], right[["key", "ratio", "when", "flag"]]
    for how in ("inner", "left", "right", "outer", "leftsemi"):
        for name in COLUMNS:
            yield lambda how=how, name=name: left.merge(right, on=name, how=how)
            yield lambda how=how, name=name: few.merge(right, left_on="key", right_on=name, how=how)
        yield lambda how=how: few.merge(right, on=["key", "name"], how=how)
        yield lambda how=how: few.merge(small, how=how, left_on="small", right_on="key")
        yield lambda how=how: few.merge(small, how=how, left_on="small", right_on="key", suffixes=("", "_r"))
        yield lambda how=how: few.merge(small, how=how, left_on="small", right_on="key", suffixes=("", ""))
        yield lambda how=how: few.merge(small, how=how, left_index=True, right_index=True)
        yield lambda how=how: few.merge(small, how=how, left_on="key", right_index=True)
        yield lambda how=how: few.merge(small, how=how, left_index=True, right_on="key")
        yield lambda how=how: few.merge(small, how=how, on="key", indicator=True)
        groups = right.groupby("key").agg({"ratio": "sum"})
        yield lambda how=how, groups=groups: few.merge(groups, how=how, left_on="key", right_index=True)
        yield lambda how=how, groups=groups: few.merge(groups.reset_index(), how=how, on="key")


def of_groups(left: Any, right: Any) -> Iterator[Any]:
    """Yield a thunk for each aggregation of each dtype, by one and by two keys."""
    for name in COLUMNS:
        for by in ("key", ["key", "flag"], "kind", name):
            groups = left.groupby(by)
            yield from (
                lambda groups=groups, name=name, how=how: groups.agg({name: how}) for how in AGGREGATIONS
            )
            yield lambda groups=groups, name=name: groups.agg({name: ["min", "max"]})
            yield lambda groups=groups, name=name: groups.agg({name: ["count", "first"]}).reset_index()
            yield lambda groups=groups, name=name: groups.agg({name: ["max"], "small": ["sum", "median"]})
            yield lambda groups=groups, name=name: groups[name].agg(["min", "count"])
            yield lambda groups=groups, name=name: groups[[name, "small"]].agg("count")
            yield lambda groups=groups, name=name: groups.agg({name: "max", "small": "sum"}).reset_index()
        yield from (
            lambda name=name, how=how: getattr(left.groupby("key")[name], how)() for how in AGGREGATIONS
        )
    several = left.groupby("name").agg({"small": ["sum", "mean"], "key": ["max"]})
    yield lambda: several[[("key", "max"), ("small", "mean")]]
    yield lambda: several[("key", "max")]
    yield lambda: several["small"]
    yield lambda: several[several[("key", "max")] > 1].reset_index()
    yield lambda: several.iloc[:, [2, 0]].rename(columns={"small": "other"})
    yield lambda: several.assign(new=1).drop(columns=[("small", "sum")])
    yield lambda: several.merge(several, left_index=True, right_index=True)
    yield lambda: several.reset_index().merge(left, left_on=[("name", "")], right_on=["name"])
    yield lambda: several.groupby(("key", "max")).agg({("small", "sum"): "sum"})
    yield lambda: left.groupby("name").agg({"small": ["sum"], "key": "max", "ratio": ["std", "var"]})
    yield lambda: left.groupby("name").agg(["min", "count"])
    yield lambda: left.groupby("name").agg("count")
    yield lambda: left.groupby("name")[["key", "small"]].agg({"key": ["max", "min"]})
    yield lambda: left.groupby(left.key > 1).agg({"small": ["sum", "mean"]})
    yield lambda: left.groupby("name").agg(b=("small", "sum"), a=("key", "max"), c=("small", "mean")).b
    yield lambda: left.groupby("name").small.agg(a="sum", b="max").reset_index()
    yield lambda: left.groupby("name").size().reset_index()
    yield lambda: left.groupby(["name", "flag"], sort=False, dropna=False).agg({"key": "count"})
    yield lambda: left.groupby(left.key > 1).agg({"small": "sum"})
    yield lambda: left.groupby("key", observed=True).agg({"small": "sum", "key": "count"})


def metadata(root: Any) -> list[Any]:
    """Return the columns, dimensions and metadata of all expressions of a plan."""
    found = []
    for expr in root.walk():
        if not isinstance(expr, dd.dask_expr._expr.Expr):
            continue
        try:
            found.append((list(expr.columns), expr.ndim, described(expr._meta)))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def outcomes(thunks: Iterator[Any], chosen: range) -> list[Any]:
    found = []
    for number, thunk in enumerate(thunks):
        if number not in chosen:
            continue
        try:
            found.append(metadata(thunk().expr))
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.fixture
def planner(library: Library) -> Iterator[Planner]:
    planner = Planner()
    planner.cache.install()
    with dask.config.set({"dataframe.shuffle.method": "tasks", "dataframe.backend": library.name}):
        yield planner
    planner.cache.remove()


@pytest.mark.parametrize("programs", [of_columns, of_frames, of_joins, of_groups])
@pytest.mark.parametrize("number", range(4))
def test_operations_are_described_as_dask_does(
    library: Library, planner: Planner, programs: Callable[..., Iterator[Any]], number: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frames = [dd.from_pandas(each, npartitions=2).to_backend(library.name) for each in tables()]
        left, right = frames[number], frames[(number + 1) % 4]
        every = 1 if programs is of_frames else EVERY
        chosen = range((number * 5) % every, len([*programs(left, right)]), every)
        expected = outcomes(programs(left, right), chosen)
        gc.collect()
        with planner.used():
            first, again = (outcomes(programs(left, right), chosen) for _ in range(2))
    assert differences(first, expected) == []
    assert differences(again, expected) == []
    assert number == 3 or planner.count("metadata.derived") > 0  # the last index has a frequency
    assert planner.metrics.snapshot()["fallbacks"] == {}


def test_keys_that_do_not_go_together_are_named_as_the_user_did(library: Library, planner: Planner) -> None:
    frame = dd.from_pandas(tables()[0], npartitions=2).to_backend(library.name)

    def refusal() -> str:
        with pytest.raises(Exception) as caught:
            _ = frame[["key", "small"]].merge(frame.assign(key=frame.when), on="key")._meta
        return repr(caught.value)

    known = refusal()
    gc.collect()  # Dask shares equal expressions
    with planner.used():
        assert refusal() == known


def test_joins_of_frames_without_columns_are_described_as_dask_does(
    library: Library, planner: Planner
) -> None:
    left, right = (dd.from_pandas(each, npartitions=2).to_backend(library.name) for each in tables()[:2])

    def joined() -> list[Any]:
        return metadata(left[[]].merge(right[[]], left_index=True, right_index=True).expr)

    known = joined()
    gc.collect()  # Dask shares equal expressions
    with planner.used():
        assert differences(joined(), known) == []


def test_an_aggregate_that_is_refused_alone_is_left_to_dask(library: Library, planner: Planner) -> None:
    frame = dd.from_pandas(tables()[1], npartitions=2).to_backend(library.name)

    def outcome() -> Any:
        try:  # cudf leaves out the maximum of categories beside a sum, but raises where it is alone
            return described(frame.groupby("key").agg({"kind": "max", "small": "sum"})._meta)
        except Exception as error:
            return repr(error)

    known = outcome()
    gc.collect()  # Dask shares equal expressions
    with planner.used():
        assert outcome() == known


def differences(found: list[Any], expected: list[Any]) -> list[Any]:
    assert len(found) == len(expected)
    return [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize("number", range(3))  # not the index with a frequency
def test_a_frame_is_made_of_its_schema_alone(library: Library, number: int) -> None:
    frame = library.frame(tables()[number])[:0]
    levels = frame.groupby("name").agg({"small": ["sum", "max"], "key": ["count"]}).iloc[:, [2, 0]]
    for each in (frame, frame[["key"]], frame.name, frame.set_index(["key", "name"]), levels):
        schema = schema_of(each)
        assert schema is not None
        dtypes = each.dtypes if each.ndim == 2 else [each.dtype]
        assert [(type(dtype), dtype) for dtype in schema.dtypes] == [(type(dtype), dtype) for dtype in dtypes]
        made = frame_of(schema)
        assert described(made) == described(each)
        assert schema_of(made) == schema == pickle.loads(pickle.dumps(schema))
        made.index.name = "own"
        assert described(frame_of(schema)) == described(each)


@pytest.mark.parametrize("number", range(4))
def test_reads_are_described_as_dask_does(
    library: Library, planner: Planner, number: int, tmp_path: Path
) -> None:
    tables()[number].to_parquet(tmp_path / "rows.parquet")
    known = described(dd.read_parquet(tmp_path / "rows.parquet")._meta)
    gc.collect()  # Dask shares equal reads
    with planner.used():
        assert described(dd.read_parquet(tmp_path / "rows.parquet")._meta) == known


#: The columns that have been converted by :func:`converted`.
CONVERTED: list[str] = []


def converted(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert a frame to "another library", one column by one."""
    CONVERTED.extend(frame)
    return frame.astype({label: "Int64" for label in frame if frame[label].dtype == "int64"})


class Converting(ArrowDatasetEngine):  # type: ignore[misc]
    """Describe files as dask_cudf does."""

    @classmethod
    def _create_dd_meta(cls, dataset_info: Any, **kwargs: Any) -> Any:
        return converted(super()._create_dd_meta(dataset_info, **kwargs))


@pytest.mark.parametrize("library", ["pandas"], indirect=True)  # in place of cudf
def test_columns_of_files_are_converted_once_for_each_dtype(
    planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{__name__}:Converting._create_dd_meta"
    monkeypatch.setattr(parquet_files, "_META_OF_CUDF", Seam(name, "cls dataset_info kwargs"))
    monkeypatch.setitem(sys.modules, "cudf", SimpleNamespace(from_pandas=converted))
    pd.DataFrame({f"c{at}": [at] for at in range(9)}).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame({"c": [1], "key": [2], "name": ["a"]}).to_parquet(tmp_path / "b.parquet")

    def read(file: str) -> Any:
        return dd.read_parquet(tmp_path / file, engine=Converting)

    files = ("a.parquet", "b.parquet")
    known = [described(read(file)._meta) for file in files]
    gc.collect()  # Dask shares equal reads
    CONVERTED.clear()
    with planner.used():
        assert [described(read(file)._meta) for file in files] == known
    assert CONVERTED == ["a", "a"]  # integers and text


def test_several_aggregates_of_a_column_are_asked_about_once(library: Library, planner: Planner) -> None:
    frame = dd.from_pandas(tables()[0], npartitions=2).to_backend(library.name)
    several = {"small": ["sum", "max"], "key": ["count"]}
    with planner.used():
        metadata(frame.groupby("name").agg(several).expr.lower_completely())
        asked = planner.count("metadata.computed")
        for number, columns in enumerate((["name", "small", "key"], ["key", "flag", "small", "name"])):
            metadata(frame[columns].groupby("name").agg(several, split_out=number + 1).expr)
    assert planner.count("metadata.computed") == asked


@pytest.mark.parametrize("library", ["pandas"], indirect=True)  # in place of cudf
def test_extremes_of_one_partition_need_no_rows_to_be_described(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def largest(frame: pd.DataFrame, **options: Any) -> Any:
        if frame.empty:
            raise ValueError("cannot convert float NaN to integer")  # as cudf
        return frame.max(**options)

    monkeypatch.setattr(_reductions.Max, "reduction_chunk", largest)
    pd.DataFrame({"key": [3, 5, 4]}).to_parquet(tmp_path / "rows.parquet")
    with planner.used():
        plan = pickle.dumps(dd.read_parquet(tmp_path / "rows.parquet")[["key"]].max().expr.optimize())
    gc.collect()  # Dask shares equal expressions
    planner.cache.remove()
    sent = pickle.loads(plan)  # as a scheduler has it, which plans nothing
    (value,) = execute_graph(graph_of(sent), keys=sent.__dask_keys__()).values()
    assert value.to_dict() == {"key": 5}


def test_first_rows_ask_about_the_columns_of_their_order(library: Library, planner: Planner) -> None:
    frame = dd.from_pandas(tables()[0], npartitions=2).to_backend(library.name)
    with planner.used():
        for few, number in ((["key", "small"], 5), (["small", "ratio", "flag", "key"], 10)):
            rows = frame[few].rename(columns={"key": few[0].upper()}).sort_values(few[0].upper())
            asked = planner.count("metadata.computed")
            metadata(rows.head(number, compute=False).simplify().expr)
    assert planner.count("metadata.computed") == asked


@pytest.mark.parametrize("library", ["pandas"], indirect=True)
def test_first_rows_by_a_column_that_is_named_as_a_level_are_refused(planner: Planner) -> None:
    frame = tables()[0][["key", "ratio"]]
    named = dd.from_pandas(frame.rename_axis("key"), npartitions=2)
    with planner.used(), pytest.raises(ValueError, match="ambiguous"):
        metadata(named.nlargest(3, ["key", "ratio"]).expr)


@pytest.mark.parametrize("library", ["pandas"], indirect=True)  # what a scheduler asks of any library
def test_a_graph_of_several_partitions_asks_nothing_of_the_library(planner: Planner, tmp_path: Path) -> None:
    for number in range(2):
        pd.DataFrame({"key": [3, 5, 4]}).to_parquet(tmp_path / f"{number}.parquet")
    with planner.used():
        plan = pickle.dumps(dd.read_parquet(tmp_path)[["key"]].max().expr.optimize(fuse=False))
    gc.collect()  # Dask shares equal expressions
    planner.cache.remove()
    sent = pickle.loads(plan)
    graph_of(sent)
    assert not [each for each in sent.walk() if "ndim" in vars(each)]


def test_subclasses_of_operations_are_left_to_dask() -> None:
    class Own(dd.dask_expr._expr.Projection): ...

    assert rule_of(Own) is None


def test_names_of_columns_and_indexes_make_no_new_questions(library: Library, planner: Planner) -> None:
    frame = dd.from_pandas(tables()[0], npartitions=2).to_backend(library.name)
    with planner.used():
        for names in (("name", "key"), ("a", "b")):
            text, number = (
                frame[each].rename(name) for each, name in zip(("name", "key"), names, strict=True)
            )
            groups = frame.assign(**{names[1]: frame.key})[[names[1], "ratio"]].groupby(names[1])
            asked = planner.count("metadata.computed")
            found = [text.str.upper(), text.isin(["n1"]), number.between(1, 2), number.astype("float64")]
            assert [each.name for each in found] == [names[0]] * 2 + [names[1]] * 2
            found = groups.agg({"ratio": "sum"}).reset_index()
            assert list(found.columns) == [names[1], "ratio"]
    assert planner.count("metadata.computed") == asked


@pytest.mark.parametrize("library", ["pandas"], indirect=True)  # cudf has neither
def test_names_that_count_are_asked_about(library: Library, planner: Planner) -> None:
    frame = dd.from_pandas(tables()[0], npartitions=2)
    with planner.used():
        assert frame.key.astype({"key": "float64"}).dtype == "float64"
        with pytest.raises(KeyError, match="Only the Series name can be used"):
            frame.key.astype({"small": "float64"})
        assert list(frame.name.str.extract("(?P<n0>n)(?P<key>.)").columns) == ["n0", "key"]
