"""Run programs that set Dask's method ``tasks`` through the runtime unchanged, with the same rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.cli.doctor import examine, print_facts
from tests.helpers.clusters import assert_same_partitions, counters, partitions
from tests.helpers.nightly import only_by_day

ROWS, PARTS = 200, 4


def frame_of(part: int) -> pd.DataFrame:
    random = np.random.default_rng(part)
    index = pd.Index(np.arange(ROWS) + part * ROWS, name="id")
    numbers = {"key": random.integers(0, 30, ROWS), "value": random.random(ROWS)}
    return pd.DataFrame(numbers | {"name": random.choice(["ant", "bee", "cat"], ROWS)}, index=index)


def collection() -> Any:
    return dd.from_map(frame_of, range(PARTS), meta=frame_of(0).iloc[:0])


def other() -> Any:
    return dd.from_map(frame_of, range(7, 10), meta=frame_of(0).iloc[:0]).rename(columns={"value": "more"})


PROGRAMS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: collection().shuffle("key"),
    "without its index": lambda: collection().shuffle("key", ignore_index=True),
    "merge": lambda: collection().merge(other(), on="key", how="left"),
    "groupby": lambda: collection().groupby("key").agg({"value": ["max", "count"]}, split_out=3),
    "drop_duplicates": lambda: collection().drop_duplicates(["key", "name"], split_out=3)[["key", "name"]],
    "sort_values": lambda: collection().sort_values(["key", "value"]),
}


@pytest.mark.parametrize("program", only_by_day(PROGRAMS, ["merge", "groupby"]))
def test_configured_tasks_give_the_rows_of_tasks(client: Client, program: str) -> None:
    build = PROGRAMS[program]
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        before = counters(client).get("shuffle.runs", 0)
        ours = partitions(build())
        between = counters(client)["shuffle.runs"]
        with dask.config.set({"gpurt.takeover": False}):
            theirs = partitions(build())
    assert between > before
    assert counters(client)["shuffle.runs"] == between
    keeps_index = program not in ("merge", "merge on two", "merge after a shuffle", "without its index")
    assert_same_partitions(ours, theirs, in_order=False, index=keeps_index)
    if program == "without its index":
        assert [part.index.name for part in ours] == [part.index.name for part in theirs]


# ---- arguments, and reports ----------------------------------------------------------------------


def told(client: Client, name: str) -> float:
    return counters(client).get(name, 0)


def test_an_argument_is_taken_over_only_where_all_are(client: Client, capsys: Any) -> None:
    runs, left = told(client, "shuffle.runs"), told(client, "shuffle.left.only-configured")
    named = collection().shuffle("key", shuffle_method="tasks", npartitions=6)
    partitions(named)
    assert told(client, "shuffle.runs") == runs
    assert told(client, "shuffle.left.only-configured") == left + 1
    taken = told(client, "shuffle.taken.argument-tasks")
    with dask.config.set({"gpurt.takeover": "all"}):
        partitions(named)
    assert told(client, "shuffle.runs") > runs
    assert told(client, "shuffle.taken.argument-tasks") == taken + 1
    print_facts(examine(client))
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("'gpurt.takeover' is not 'all'", "'gpurt.takeover' is 'all'"):
        assert re.search(rf"shuffles?: 'tasks' is an argument, and {text}", printed)
    assert "shuffle.left.only-configured" in repr(dask_gpurt.report(client))
