"""Read a recorded trace with Perfetto's own trace processor.

The other tests of traces check the file against the format (``tests/helpers/trace_format.py``); this one
proves that Perfetto understands it the same way.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import wait

import dask_gpurt
from tests.helpers import browser, perfetto
from tests.helpers.clusters import cluster
from tests.helpers.perfetto import NUMBER, TEXT
from tests.helpers.trace_format import slices

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING),
    pytest.mark.skipif(perfetto.FOLDER is None, reason=perfetto.MISSING),
]

SLICES = """
    select slice.name, process.name as process, count() as number, sum(slice.dur) as dur
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
    join process using (upid) group by slice.name, process.name"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def make(part: int) -> pd.DataFrame:
    draw = np.random.default_rng(part)
    return pd.DataFrame({"key": draw.integers(0, 2**62, 20_000), "payload": np.arange(20_000)})


def record(path: Path) -> None:
    """Record a trace of a shuffle whose shards are pulled, with spilling beside it."""
    tiers = {"memory__device": "1 MiB", "memory__pinned": "512 KiB", "memory__host": "512 KiB"}
    with cluster("pandas", exchange__paths=["comms"], **tiers), dask_gpurt.trace(path):
        wait(dd.from_map(make, range(6), meta=make(0).iloc[:0]).shuffle("key").persist())


def test_perfetto_reads_every_slice(tmp_path: Path) -> None:
    record(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    (tmp_path / "page").mkdir()

    async def read() -> None:
        async with perfetto.opened(tmp_path / "trace.json", tmp_path / "page") as found:
            rows = await found.query(SLICES, name=TEXT, process=TEXT, number=NUMBER, dur=NUMBER)
            read = {(name, process): (number, duration) for name, process, number, duration in rows}
            names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
            marks = Counter(
                (e["name"], names[e["pid"]]) for e in trace["traceEvents"] if e["ph"] == "i"
            )  # instants are slices without a duration
            written = Counter((one.name, names[one.pid]) for one in slices(trace)) + marks
            assert {which: number for which, (number, _) in read.items()} == written
            for (name, process), (_, duration) in read.items():
                lasted = [s.end - s.begin for s in slices(trace) if (s.name, names[s.pid]) == (name, process)]
                assert duration == pytest.approx(sum(lasted), abs=1000 * len(lasted) + 1)

            assert await found.query(PROBLEMS, name=TEXT, value=NUMBER) == []

    asyncio.run(read())
