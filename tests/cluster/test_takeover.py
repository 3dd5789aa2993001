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
from distributed import Client, wait

import dask_gpurt
from dask_gpurt.cli.doctor import print_facts
from dask_gpurt.cli.examine import examine
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


# ---- a program as dask-cuda's benchmarks are -----------------------------------------------------


def generate_chunk(part: int, size: int, parts: int) -> pd.DataFrame:
    random = np.random.default_rng(part)
    keys = random.permutation(np.arange(size * part, size * (part + 1), dtype="int64"))
    return pd.DataFrame({"key": keys, "shuffle": keys % parts, "payload": random.permutation(size)})


def benchmark_merge() -> Any:
    """Join a frame that ``set_index`` has shuffled with another, as ``local_cudf_merge`` does."""
    parts, meta = 3, generate_chunk(0, 4, 1)
    base = dd.from_map(generate_chunk, range(parts), size=500, parts=parts, meta=meta)
    base = base.set_index("shuffle", divisions=(*range(parts), parts)).persist()
    rest = dd.from_map(generate_chunk, range(1, parts + 1), size=500, parts=parts, meta=meta)
    rest = rest[["key", "payload"]].persist()
    wait([base, rest])
    joined = base.merge(rest, on=["key"], how="inner", broadcast=None).persist()
    wait(joined)
    return joined


def benchmark_groupby() -> Any:
    """Aggregate into several partitions, as ``local_cudf_groupby`` does with an argument."""
    parts, meta = 4, generate_chunk(0, 4, 1)
    frame = dd.from_map(generate_chunk, range(parts), size=500, parts=3, meta=meta)
    wanted = {"key": ["max", "count"], "payload": "mean"}
    summed = frame.groupby("shuffle", sort=False).agg(
        wanted, split_out=2, split_every=8, shuffle_method="tasks"
    )
    return summed.persist()


def test_benchmarks_of_dask_cuda_are_taken_over_and_counted(client: Client) -> None:
    before = counters(client)
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        joined, summed = benchmark_merge(), benchmark_groupby()
        ours = [partitions(joined), partitions(summed)]
        after = counters(client)
        with dask.config.set({"gpurt.takeover": False}):
            theirs = [partitions(benchmark_merge()), partitions(benchmark_groupby())]
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    # The index of the base, both sides of the join, and the groupby.
    assert added["shuffle.runs"] == 4
    assert added["shuffle.taken.configured-tasks"] == 3
    assert sum(len(part) for part in ours[0]) == 1000
    for mine, others in zip(ours, theirs, strict=True):
        assert_same_partitions(mine, others, in_order=False, index=False)


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


def test_a_local_scheduler_in_an_argument_keeps_its_tasks(client: Client) -> None:
    table = pd.DataFrame({"key": [1, 2, 3] * 8, "value": range(24)})
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        frame = dd.from_pandas(table, npartitions=4)
        for asked in (frame.shuffle("key").value.sum(), frame.merge(frame, on="key").key.sum()):
            before = counters(client).get("shuffle.runs", 0)
            result = asked.compute()
            between = counters(client)["shuffle.runs"]
            assert between > before
            assert asked.compute(scheduler="threads") == result
            assert asked.persist(scheduler="threads").compute() == result
            assert dask.compute([asked], scheduler="threads") == ([result],)
            assert counters(client)["shuffle.runs"] == between
            assert asked.compute(scheduler=client) == result
            assert counters(client)["shuffle.runs"] > between
