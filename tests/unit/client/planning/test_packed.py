"""Pickle a plan and create its graph once, and only a plan that stays the same."""

from __future__ import annotations

import enum
import gc
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import FinalizeCompute
from dask._task_spec import execute_graph
from dask.core import flatten
from distributed.protocol.pickle import dumps, loads
from fsspec.implementations.local import LocalFileSystem

from dask_gpurt.client.planning import packed
from dask_gpurt.client.planning.catalogue.schema import reduced_frames
from dask_gpurt.client.planning.files import source_of
from dask_gpurt.client.planning.packed import PackedPlan, forget_plans, pack
from dask_gpurt.dask_hooks.parquet_files import pickled
from dask_gpurt.dask_hooks.planning import graph_of
from dask_gpurt.observe import Fallback
from tests.helpers.planned import Planner, described


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget_plans()
    yield
    forget_plans()


def planned(query: Any) -> Any:
    return FinalizeCompute(query.expr).optimize()


@pytest.fixture(params=["fsspec", "arrow"])
def plan(table: str, request: pytest.FixtureRequest) -> Any:
    query = dd.read_parquet(table, filesystem=request.param).groupby("key").value.sum()
    return pack(planned(query))


def result(plan: Any) -> Any:
    """Compute a plan from its graph."""
    (key,) = flatten(plan.__dask_keys__())
    return execute_graph(graph_of(plan), keys=[key])[key]


def test_a_plan_is_pickled_once(plan: PackedPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "pickled", pytest.fail)
    assert plan.__reduce__()[1][0] in pickle.dumps(plan)


def test_another_process_unpickles_a_plan_once(plan: PackedPlan) -> None:
    sent = pickle.dumps(plan)
    forget_plans()
    received = pickle.loads(sent)
    assert received is not plan
    assert pickle.loads(sent) is received
    assert pickle.dumps(received) == sent  # and can send it on
    assert received.__dask_keys__() == plan.__dask_keys__()
    assert received.__dask_graph__().keys() == plan.plan.__dask_graph__().keys()
    pd.testing.assert_series_equal(result(received), result(plan.plan))


def test_the_tasks_of_a_plan_are_created_once(plan: PackedPlan) -> None:
    first, again = plan.__dask_graph__(), plan.__dask_graph__()
    assert first == again
    assert all(first[key] is again[key] for key in first)


def test_who_changes_a_graph_does_not_change_the_next_one(plan: PackedPlan) -> None:
    expected = set(plan.__dask_graph__())
    plan.__dask_graph__().clear()
    assert set(plan.__dask_graph__()) == expected


def test_a_plan_made_of_another_ones_is_pickled_too(plan: PackedPlan) -> None:
    other = loads(dumps(type(plan)(plan.plan)))  # as Dask sends it
    pd.testing.assert_series_equal(result(other), result(plan))


def test_empty_frames_are_pickled_as_what_describes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pd.DataFrame({"a": [1], "b": ["x"]}, index=pd.Index([2], name="c"))
    empty = [rows.iloc[:0], rows.iloc[:0].b, rows.iloc[:0].set_index("a", append=True)]
    for value in (rows, rows.a, *empty):
        assert described(pickle.loads(pickled(value, reduced_frames()))) == described(value)
    monkeypatch.setattr(pd.DataFrame, "__reduce_ex__", None)
    monkeypatch.setattr(pd.Series, "__reduce_ex__", None)
    for value in empty:
        assert pickled(value, reduced_frames())
    with pytest.raises(TypeError):
        pickled(rows, reduced_frames())


def test_a_large_plan_is_not_packed(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PAYLOAD_LIMIT_BYTES", 100)
    plan = planned(dd.read_parquet(table).key.sum())
    assert pack(plan) is plan


class Key(enum.IntEnum):
    ONE = 1


def test_a_plan_with_classes_that_are_sent_by_value_is_not_packed(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = dd.read_parquet(table)
    plan = planned(frame[frame.key == Key.ONE].value.sum())
    assert isinstance(pack(plan), PackedPlan)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        assert pack(plan) is plan
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(Key, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Key", Key, raising=False)
    assert pack(plan) is plan


def test_a_graph_of_many_tasks_is_not_kept(plan: PackedPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "TASKS_LIMIT", 1)
    (key, *_) = first = plan.__dask_graph__()
    assert plan.__dask_graph__()[key] is not first[key]


# ---- which plans are packed, and names of reads ------------------------------------------------------


FACTOR = 2


def times_factor(frame: pd.DataFrame) -> pd.DataFrame:
    return frame * FACTOR


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize(
    ("query", "is_packed"),
    [
        (lambda frame: frame.groupby("key").value.sum(), True),
        (lambda frame: frame[frame.key > 1], True),
        (lambda frame: frame.map_partitions(times_factor), False),
        (lambda frame: frame.merge(pd.DataFrame({"key": [1]}), on="key"), False),
    ],
)
def test_only_plans_without_data_and_functions_of_the_user_are_packed(
    table: str, query: Any, is_packed: bool
) -> None:
    plans = [planned(query(dd.read_parquet(table))) for _ in range(2)]
    assert [isinstance(plan, PackedPlan) for plan in plans] == [is_packed] * 2
    pd.testing.assert_frame_equal(*(pd.DataFrame(result(plan)) for plan in plans))


def test_cloudpickle_takes_what_is_known_of_files_on_arrows_file_systems(table: str) -> None:
    """With it Dask sends a plan that calls functions of ``__main__``, whoever has made the plan."""
    read = dd.read_parquet(table, filesystem="arrow")
    assert read.npartitions == cloudpickle.loads(cloudpickle.dumps(read.expr)).npartitions


def test_a_plan_that_cannot_be_pickled_is_left_to_dask(
    planner: Planner, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "PAYLOAD_LIMIT_BYTES", None)  # raises where the two are compared
    plan = planned(dd.read_parquet(table).key.sum())
    assert not isinstance(plan, PackedPlan)
    assert planner.metrics.snapshot()["fallbacks"][Fallback.PLANNING_PICKLED_ANEW.id]
    assert result(plan) == dd.read_parquet(table).key.sum().compute(scheduler="sync")


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
@pytest.mark.parametrize("columns", [None, ["value"]])
def test_a_read_has_the_name_that_dask_gives_it(
    table: str, filesystem: str, columns: list[str] | None, planner: Planner
) -> None:
    def name() -> str:
        found: str = dd.read_parquet(table, filesystem=filesystem, columns=columns).expr._name
        gc.collect()  # or Dask would find the same expression again
        return found

    names = [name() for _ in range(3)]
    planner.cache.remove()
    assert names == [name()] * 3


@pytest.mark.usefixtures("planner")
def test_reads_that_differ_in_the_sign_of_zero_have_other_names(table: str) -> None:
    names = {dd.read_parquet(table, filters=[("value", "in", [zero])]).expr._name for zero in (0.0, -0.0)}
    assert len(names) == 2


# ---- listing files --------------------------------------------------------------------------------


def listed(folder: Path) -> dict[str, dict[str, Any]] | None:
    source = source_of({"path": str(folder), "filesystem": "fsspec", "storage_options": None})
    assert source is not None
    return source.states()


def test_files_in_folders_are_listed_as_fsspec_lists_them(table: str) -> None:
    inner = Path(table, "year=2026")
    inner.mkdir()
    Path(inner, "part.9.parquet").write_bytes(b"1")
    source: Any = source_of({"path": table, "filesystem": "fsspec", "storage_options": None})
    assert set(source.states()) == set(LocalFileSystem().find(table))


@pytest.mark.parametrize("change", ["content", "time", "removed", "added", "replaced"])
def test_a_change_of_a_file_changes_its_state(table: str, change: str) -> None:
    path = Path(table, "part.0.parquet")
    before = listed(Path(table))
    assert before is not None
    if change == "content":
        content = path.read_bytes()
        path.write_bytes(content[::-1])
        os.utime(path, ns=(1, before[str(path)]["mtime_ns"]))  # only the time of the change tells
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "removed":
        path.unlink()
    elif change == "added":
        Path(table, "part.7.parquet").write_bytes(path.read_bytes())
    else:
        other = Path(table, "other")
        other.write_bytes(path.read_bytes())
        other.rename(path)
    assert listed(Path(table)) != before
