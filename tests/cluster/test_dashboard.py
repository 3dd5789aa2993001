"""Show the runtime on a scheduler's dashboard: its pages, and the data that they draw."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

pytest.importorskip("bokeh", reason="the dashboard needs it")

from distributed import Client, LocalCluster, Worker, wait
from distributed.dashboard.components.scheduler import Shuffling, TaskProgress
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from dask_gpurt.monitor.dashboard.collector import NAME, Collector
from dask_gpurt.monitor.dashboard.page import PAGE, PARTS, drawn
from tests.helpers import browser
from tests.helpers.clusters import QUICK
from tests.helpers.in_process import on_cluster, until

#: Dask's pages about shuffles, and all of ours.
ALL_PAGES = (f"/{PAGE}", *PARTS, "/shuffle")

#: Whether the page has drawn data, and no error.
DRAWN = "document.body.dataset.at > 0 && !document.querySelector('#state .failed')"
#: The states of shuffles in the page's table.
STATES = "[...document.querySelectorAll('#shuffles td:nth-child(2)')].map(cell => cell.innerText)"


def frame(part: int, rows: int = 2000) -> pd.DataFrame:
    rng = np.random.default_rng(part)
    return pd.DataFrame({"key": rng.integers(0, 50, rows), "value": rng.random(rows)})


def collection(parts: int = 6) -> Any:
    return dd.from_map(frame, range(parts), meta=frame(0).iloc[:0])


def collector(scheduler: Any) -> Collector:
    found: Collector = scheduler.plugins[NAME]
    return found


def test_a_shuffle_is_shown_as_it_was() -> None:
    @on_cluster(workers=2)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        shuffled = client.persist(collection().shuffle("key"))
        await wait(shuffled)
        for worker in (a, b):
            await worker.heartbeat()
        now = collector(scheduler)
        now.sample(now.sampler.at + 1)
        (row,) = now.sampler.shuffles.rows(0.0)
        assert row["state"] == "done"
        assert row["inputs"] == row["outputs"] == {"total": 6, "done": 6}
        assert row["rows"] == 6 * 2000
        assert row["bytes"] > 0
        lengths = client.compute(shuffled.map_partitions(len, meta=(None, "int")))
        largest = max(await lengths)
        assert row["skew"] == pytest.approx(largest / 2000)
        shown = drawn(now)
        assert [query["state"] for query in shown["queries"]] == ["done", "done"]
        assert [shuffle["label"] for shuffle in shown["shuffles"]] == [row["label"]]
        # Other tests of this process may have shuffled by the same key, and their lines are named, too.
        assert re.fullmatch(r"shuffle by key \(.*test_dashboard.py:\d+\)", row["label"])
        assert list(shown["memory"]["series"]) == ["memory", "shared memory", "disk"]
        assert {name for name, _ in shown["workers"]["rows"]} == {str(a.name), str(b.name)}

    run()


JOIN: dict[str, Any] = {"on": "key", "broadcast": False}
#: The kinds of operation that shuffle, by the label of their shuffles.
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "group by key": lambda frame: frame.groupby("key").agg({"value": "mean"}, split_out=3),
    "sort by value": lambda frame: frame.sort_values("value"),
    "deduplicate by key": lambda frame: frame.drop_duplicates("key", split_out=3),
    "inner join on key": lambda frame: frame.merge(frame.assign(more=1), **JOIN),
    # The condition makes it an inner join.
    "left join on key": lambda frame: frame.merge(frame.assign(more=1), how="left", **JOIN).query("more > 0"),
    "apply size by key": lambda frame: frame.groupby("key").apply(np.size, meta=(None, "int")),
}


@on_cluster(workers=2)
async def test_shuffles_are_named_by_operation_keys_and_line(client: Any, scheduler: Any, *_: Any) -> None:
    shuffles = collector(scheduler).sampler.shuffles
    for label, operation in OPERATIONS.items():
        before = len(shuffles)
        line = f"test_dashboard.py:{operation.__code__.co_firstlineno})"
        await wait(await asyncio.to_thread(lambda do=operation: client.persist(do(collection(4)))))
        labels = [row["label"] for row in shuffles.rows(0.0)][: len(shuffles) - before]
        assert labels
        assert all(found.startswith(f"{label} (") and found.endswith(line) for found in labels), labels
    ones = da.ones((40, 40), chunks=(40, 10))
    await wait(client.persist(ones.rechunk((10, 40), method="p2p")))
    assert shuffles.rows(0.0)[0]["label"] == "rechunk"


@on_cluster(workers=1)
async def test_dasks_own_page_and_progress_show_our_shuffles(client: Any, scheduler: Any, a: Any) -> None:
    page, progress = Shuffling(scheduler), TaskProgress(scheduler)
    async with Worker(scheduler.address, nthreads=1) as b:
        await until(lambda: b.address in scheduler.extensions["gpurt"].workers.ready)
        shuffled = client.persist(collection().shuffle("key"))
        await wait(shuffled)
        for worker in (a, b):
            await worker.heartbeat()
        page.update()
        progress.update()
        sent, received, written, read = page.totals_source.data["values"]
        assert (sent, written, read) == (received, 0, 0)
        # Transfers count the headers of shards as well.
        metrics = [worker.plugins["gpurt"].metrics for worker in (a, b)]
        assert 0 < sent <= sum(sum(one.total("exchange.bytes.{path}").values()) for one in metrics)
        assert set(page.source.data["worker"]) == {a.address, b.address}
        done = dict(zip(progress.source.data["name"], progress.source.data["done"], strict=True))
        assert {done[name] for name in done if "transfer" in name} == {"6 / 6"}
    # The run continues without the worker that left, which Dask's own page would look up.
    await until(lambda: b.address not in scheduler.workers)
    await wait(shuffled)
    page.update()
    assert b.address not in page.source.data["worker"]


# ---- over HTTP -----------------------------------------------------------------------------


def served(test: Any) -> None:
    """Run a coroutine with a client of a cluster that serves a dashboard, and the dashboard's address."""

    async def body() -> None:
        with dask.config.set(QUICK):
            async with (
                LocalCluster(
                    n_workers=2,
                    threads_per_worker=1,
                    processes=False,
                    dashboard_address=":0",
                    asynchronous=True,
                ) as local,
                Client(local, asynchronous=True) as client,
            ):
                await dask_gpurt.enable(client)
                try:
                    await test(client, local.scheduler, local.dashboard_link.removesuffix("/status"))
                finally:
                    await dask_gpurt.disable(client)

    asyncio.run(body())


async def fetch(url: str) -> str:
    reply = await AsyncHTTPClient().fetch(url, request_timeout=60)
    assert reply.code == 200
    return reply.body.decode()


def test_each_page_is_served_also_after_switching_on_twice() -> None:
    async def test(client: Any, scheduler: Any, base: str) -> None:
        shuffled = client.persist(collection().shuffle("key"))
        await wait(shuffled)
        before = len(scheduler.http_application.applications)
        assert json.loads(await fetch(f"{base}/{PAGE}/data"))["state"]["workers"] <= 2
        await dask_gpurt.disable(client)
        off = await AsyncHTTPClient().fetch(f"{base}/{PAGE}/data", raise_error=False)
        assert (off.code, json.loads(off.body)["error"].partition(":")[0]) == (503, "the runtime is off")
        assert "Dask" in await fetch(f"{base}/{PAGE}")  # which says so
        await dask_gpurt.enable(client)
        assert len(scheduler.http_application.applications) == before
        for path in ALL_PAGES:
            assert "Dask" in await fetch(base + path)
        assert '<a href="gpurt">Gpurt</a>' in await fetch(base + "/status")
        listed = json.loads(await fetch(base + "/individual-plots.json"))  # as the JupyterLab extension does
        assert set(PARTS) <= set(listed.values())
        assert "/individual-progress" in listed.values()

    served(test)


def test_a_scheduler_without_a_dashboard_needs_no_fallback() -> None:
    options = {"dashboard": False, "dashboard_address": ":0"}
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, processes=False, scheduler_kwargs=options)
    with cluster, Client(cluster) as client:
        dask_gpurt.enable(client)
        assert not dask_gpurt.report(client).fallbacks
        dask_gpurt.disable(client)


def test_without_bokeh_the_page_comes_and_goes_with_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Any, scheduler: Any, base: str) -> None:
        assert "Queries" in await fetch(f"{base}/{PAGE}")
        assert json.loads(await fetch(f"{base}/{PAGE}/data"))["state"]["fallbacks"] == []
        await dask_gpurt.disable(client)
        assert (await AsyncHTTPClient().fetch(f"{base}/{PAGE}", raise_error=False)).code == 404

    # As where bokeh is missing: these modules need it.
    for module in ("distributed.dashboard.scheduler", "bokeh.server.tornado"):
        monkeypatch.setitem(sys.modules, module, None)
    served(test)


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_each_page_opens_in_a_browser_beside_a_running_shuffle(tmp_path: Path) -> None:
    async def test(client: Any, scheduler: Any, base: str) -> None:
        kept: list[Any] = []
        async with browser.browser(tmp_path / "profile") as visit:
            for path in (f"/{PAGE}", *PARTS):
                kept.append(client.persist(collection(40).shuffle("key")))
                page = await visit(base + path)
                await page.holds(DRAWN)
                await page.screenshot(tmp_path / "page.png")
                assert (tmp_path / "page.png").stat().st_size > 0
                assert page.errors == [], path
                page.close()
            missing = await visit(base + "/individual-gpurt-nothing")
            await until(lambda: bool(missing.errors))  # proves that errors are detected
            page = await visit(f"{base}/{PAGE}")
            await page.holds(f"{STATES}.length > 0")
            await wait(kept)
            await page.holds(f"{STATES}.every(text => text === 'done')")
            for width in (390, 1400):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
                await page.call("Emulation.setDeviceMetricsOverride", **size)
                await page.holds("document.documentElement.scrollWidth <= innerWidth")
            before = await page.value("getComputedStyle(document.body).backgroundColor")
            await page.value("document.querySelector('#theme').click()")
            assert await page.value("getComputedStyle(document.body).backgroundColor") != before
            await dask_gpurt.disable(client)
            await page.holds("document.querySelector('#state .failed')?.innerText === 'off'")
            await dask_gpurt.enable(client)
            await page.holds(DRAWN)
            assert [error for error in page.errors if "503" not in error] == []

    served(test)
