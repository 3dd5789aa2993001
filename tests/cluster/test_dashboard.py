"""Show the runtime on a scheduler's dashboard: its pages, and the data that they draw."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

pytest.importorskip("bokeh", reason="the dashboard needs it")

from bokeh.document import Document
from distributed import Client, LocalCluster, Worker, wait
from distributed.dashboard.components.scheduler import Shuffling, TaskProgress
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.seams import DASHBOARD
from dask_gpurt.monitor.dashboard.collector import NAME, Collector
from dask_gpurt.monitor.dashboard.pages import PAGE, PARTS, pages
from dask_gpurt.tools.testing import differing_links
from tests.helpers import browser
from tests.helpers.clusters import QUICK
from tests.helpers.in_process import on_cluster, until

#: Dask's pages about shuffles, and all of ours.
ALL_PAGES = (f"/{PAGE}", *PARTS, "/shuffle")

#: Reads the tooltips of the second column of a page's table, the state of shuffles.
CELLS = """(() => {
    const found = []
    const walk = (node) => {
        if (node.matches?.(".slick-cell.l1")) found.push(node.querySelector("span").title)
        for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) walk(child)
    }
    walk(document.body)
    return found
})()"""


def frame(part: int, rows: int = 2000) -> pd.DataFrame:
    rng = np.random.default_rng(part)
    return pd.DataFrame({"key": rng.integers(0, 50, rows), "value": rng.random(rows)})


def collection(parts: int = 6) -> Any:
    return dd.from_map(frame, range(parts), meta=frame(0).iloc[:0])


def collector(scheduler: Any) -> Collector:
    found: Collector = scheduler.plugins[NAME]
    return found


def drawn(scheduler: Any) -> dict[str, Any]:
    """Return the components of all individual pages by path, updated once more."""
    documents = {}
    for path, page in pages(lambda _: scheduler.plugins.get(NAME)).items():
        document = documents[path] = Document()
        page(scheduler, {}, document)
    found = {}
    for path in PARTS:
        (component,) = documents[path].components
        component.update_now()
        found[path.removeprefix("/individual-gpurt-")] = component
    return found


def test_this_dashboard_is_known() -> None:
    assert differences(DASHBOARD.seams) == []


def test_a_shuffle_is_shown_as_it_was() -> None:
    @on_cluster(workers=2, **{"gpurt.placement.enabled": True})
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        shuffled = client.persist(collection().shuffle("key"))
        await wait(shuffled)
        for worker in (a, b):
            await worker.heartbeat()
        now = collector(scheduler)
        now.sampler.sample(now.sampler.at + 1, now)
        (row,) = now.sampler.shuffles.rows(0.0)
        assert row["state"] == "done"
        assert row["inputs"] == row["outputs"] == {"total": 6, "done": 6}
        assert row["rows"] == 6 * 2000
        assert row["bytes"] > 0
        lengths = client.compute(shuffled.map_partitions(len, meta=(None, "int")))
        largest = max(await lengths)
        assert row["skew"] == pytest.approx(largest / 2000)
        parts = drawn(scheduler)
        assert parts["shuffle-table"].source.data["state"] == ["done"]
        assert parts["shuffles"].source.data["text"][::2] == ["6 / 6", "6 / 6"]
        (legend,) = parts["memory"].figure.legend
        in_legend = [item.label.value for item in legend.items if item.visible]
        assert in_legend == ["memory", "shared memory", "disk"]
        assert " of " in parts["memory"].heading.text
        assert set(parts["workers"].source.data["worker"]) == {str(a.name), str(b.name)}
        await until(lambda: bool(list(now.sampler.traffic.flows())))
        assert sum(flow.nbytes for _, _, flow in now.sampler.traffic.flows()) > 0

    with differing_links():
        run()


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
        before = len(scheduler.http_application.applications)
        await dask_gpurt.disable(client)
        await dask_gpurt.enable(client)
        assert len(scheduler.http_application.applications) == before
        for path in ALL_PAGES:
            assert "Dask" in await fetch(base + path)
        assert '<a href="gpurt">Gpurt</a>' in await fetch(base + "/status")
        listed = json.loads(await fetch(base + "/individual-plots.json"))  # as the JupyterLab extension does
        assert set(PARTS) <= set(listed.values())
        assert "/individual-progress" in listed.values()
        await wait(shuffled)

    served(test)


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_each_page_opens_in_a_browser_beside_a_running_shuffle(tmp_path: Path) -> None:
    async def test(client: Any, scheduler: Any, base: str) -> None:
        kept: list[Any] = []
        async with browser.browser(tmp_path / "profile") as visit:
            for path in ALL_PAGES:
                kept.append(client.persist(collection(40).shuffle("key")))
                page = await visit(base + path)
                await page.holds("window.Bokeh !== undefined && Bokeh.documents.length > 0")
                await page.holds("Bokeh.documents[0].roots().length > 0 && Bokeh.documents[0].is_idle")
                await page.screenshot(tmp_path / "page.png")
                assert (tmp_path / "page.png").stat().st_size > 0
                assert page.errors == [], path
                page.close()
            missing = await visit(base + "/individual-gpurt-nothing")
            await until(lambda: bool(missing.errors))  # proves that errors are detected
            # A table is redrawn also if the number of rows stays the same.
            kept.append(client.persist(collection(40).shuffle("key")))
            page = await visit(base + "/individual-gpurt-shuffle-table")
            await page.holds(f"({CELLS}).length > 0")
            await wait(kept)
            await page.holds(f"({CELLS}).every(text => text === 'done')")

    served(test)
