"""Compute dataframes on Dask's local schedulers while the runtime is on: the same rows as with ``tasks``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import dask
import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from dask_gpurt.client.lowering import choose, leave
from dask_gpurt.client.planning.fusing import fuse
from dask_gpurt.client.session import SESSIONS, register_method
from dask_gpurt.dask_hooks.shuffle import P2PBarrierTask

LEFT = pd.DataFrame({"k": np.arange(400) % 10, "x": np.arange(400)[::-1], "c": list("abcd") * 100})
RIGHT = pd.DataFrame({"k": np.arange(12), "y": np.arange(12)})
Build = Callable[[], Any]


def left() -> Any:
    return dd.from_pandas(LEFT, npartitions=5)


def right() -> Any:
    return dd.from_pandas(RIGHT, npartitions=3)


def joined_on_index() -> Any:
    sides = left().set_index("k"), right().set_index("k")
    return sides[0].merge(sides[1], left_index=True, right_index=True, broadcast=False)


OPERATIONS: dict[str, Build] = {
    "shuffle": lambda: left().shuffle("k"),
    "join": lambda: left().merge(right(), on="k", broadcast=False),
    "semi join": lambda: left().merge(right(), on="k", how="leftsemi", broadcast=False),
    "join on the index": joined_on_index,
    "sort": lambda: left().sort_values("x"),
    "groups": lambda: left().groupby("k").x.sum(split_out=3).to_frame(),
    "categories": lambda: left().assign(c=left().c.astype("category")).shuffle("c", npartitions=4),
    "two shuffles": lambda: left().shuffle("k").shuffle("x").map_partitions(lambda part: part.head(1_000)),
}


def local_get(graph: Any, keys: Any, **options: Any) -> Any:
    return dask.get(graph, keys, **options)


def together(parts: Any) -> pd.DataFrame:
    return pd.concat(parts)


#: Ways to compute. Those that name no scheduler plan without knowing it.
PROGRAMS: dict[str, Callable[[Build], pd.DataFrame]] = {
    "by argument": lambda build: build().compute(scheduler="threads"),
    "by an executor": lambda build: dask.compute(build(), scheduler=ThreadPoolExecutor(2))[0],
    "persisted": lambda build: build().persist(scheduler="threads").compute(scheduler="sync"),
    "optimised": lambda build: build().optimize().compute(scheduler="threads"),
    "delayed": lambda build: together(dask.compute(*build().to_delayed(), scheduler="threads")),
    "its graph": lambda build: together(dask.get((frame := build()).dask, frame.__dask_keys__())),
    "fused for a computation": lambda build: together(
        dask.get((plan := fuse(build().optimize().expr)).__dask_graph__(), plan.__dask_keys__())
    ),
}
#: The session of a client that does not plan, and whose choices nobody counts.
SESSION = SimpleNamespace(planning=SimpleNamespace(optimise=False), report_choice=lambda *choice: None)
#: Values of the setting ``scheduler``.
SCHEDULERS = ("threads", "Synchronous", "single-threaded", local_get)


@pytest.fixture(autouse=True)
def runtime_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan as a client with the runtime does, where Dask's own default is p2p."""
    monkeypatch.setattr(distributed, "default_client", lambda: None)
    # Idempotent: a test before this one may have made the method known, as clients do.
    register_method()
    monkeypatch.setattr(SESSIONS, "current", lambda: SESSION)
    choose(lambda: True)
    yield
    leave()


def ordered(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in an order that only their values determine."""
    plain = frame.reset_index().astype({name: object for name in frame.columns if name == "c"})
    plain = plain.drop(columns=[name for name in plain.columns if name == "index"])
    return plain.sort_values(list(plain.columns), ignore_index=True)


@functools.cache
def by_tasks(build: Build) -> pd.DataFrame:
    with dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": False}):
        return ordered(build().compute(scheduler="sync"))


@pytest.mark.parametrize("build", OPERATIONS.values(), ids=OPERATIONS)
def test_rows_are_those_of_tasks(build: Build) -> None:
    for name, program in PROGRAMS.items():
        assert_frame_equal(ordered(program(build)), by_tasks(build), obj=name)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    "make", [lambda frame: frame.optimize(), lambda frame: frame], ids=["before", "once"]
)
def test_a_configured_scheduler_plans_by_tasks(scheduler: Any, make: Callable[[Any], Any]) -> None:
    with dask.config.set(scheduler="distributed"), dask.config.set(scheduler=scheduler):
        for build in OPERATIONS.values():
            graph = make(build()).__dask_graph__()
            assert not [task for task in graph.values() if isinstance(task, P2PBarrierTask)]


def test_partitions_and_the_order_of_their_rows_are_those_of_tasks() -> None:
    def build() -> Any:
        return left().shuffle("k", npartitions=9, ignore_index=True)

    found = dask.compute(*build().to_delayed(), scheduler="threads")
    leave()
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        expected = dask.compute(*build().to_delayed(), scheduler="threads")
    for ours, theirs in zip(found, expected, strict=True):
        assert_frame_equal(ours, theirs)


def test_processes_compute_a_graph_that_was_made_before() -> None:
    build = OPERATIONS["join"]
    found = build().optimize().compute(scheduler="processes", num_workers=1)
    assert_frame_equal(ordered(found), by_tasks(build))
