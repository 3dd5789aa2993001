"""Query a scheduler's JSON API: replies have the documented fields, and are bounded as documented."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import dask
import dask.dataframe as dd
import pandas as pd
from distributed import Client, Scheduler
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from benchmarks.common.faults import differing_links
from dask_gpurt.memory.ledger import ClusterMemory, Label, Ledger
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.monitor.dashboard.shuffles import ShuffleLog
from dask_gpurt.monitor.json_api import MAX_LIMIT, RESOURCES, JsonApi, Page
from dask_gpurt.observe import Fallback
from tests.helpers.in_process import all_placed, on_cluster, on_plain_cluster, until

MODULE = "dask_gpurt.monitor.json_api"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json-api.md"
KINDS: dict[str, Any] = {
    "integer": int, "number": (int, float), "string": str, "boolean": bool, "null": type(None),
    "list": list, "object": dict,
}  # fmt: skip


async def ask(scheduler: Any, resource: str = "", prefix: str = "", **arguments: Any) -> tuple[int, Any]:
    """Return the status and the body of a resource."""
    path = f"{prefix}/gpurt/api{resource and '/' + resource}"
    url = f"http://127.0.0.1:{scheduler.http_server.port}{path}?{urlencode(arguments, doseq=True)}"
    found = await AsyncHTTPClient().fetch(url, raise_error=False)
    is_json = found.headers["Content-Type"] == "application/json"
    return found.code, json.loads(found.body) if is_json else None


def documented(section: str) -> dict[str, str]:
    """Return the fields of a section of the reference page, with their types."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+?) \|", text, re.MULTILINE))


def assert_documented(value: dict[str, Any], fields: dict[str, str], within: str = "") -> None:
    """Assert that a reply, or the part of it within a field, has the documented fields and types."""
    inner = {name.removeprefix(within): kind for name, kind in fields.items() if name.startswith(within)}
    assert value.keys() == {name for name in inner if not re.search(r"[.\[]", name)}, within
    for name, found in value.items():
        kinds = [KINDS[kind] for kind in inner[name].split(" or ")]
        assert any(isinstance(found, kind) for kind in kinds), (within + name, found)
        if isinstance(found, list):
            for row in filter(lambda one: isinstance(one, dict), found):
                assert_documented(row, fields, f"{within}{name}[].")
        elif any(field.startswith(f"{name}.*.") for field in inner):
            for row in found.values():
                assert_documented(row, fields, f"{within}{name}.*.")
        elif any(field.startswith(f"{name}.") for field in inner):
            assert_documented(found, fields, f"{within}{name}.")


async def reply(scheduler: Any, resource: str, **arguments: Any) -> Any:
    """Return the reply of a resource, with the fields and types of the reference page."""
    status, found = await ask(scheduler, resource, **arguments)
    assert status == 200
    fields = documented(resource or "index")
    paged = documented("All pages") if resource else {}
    assert_documented(found, documented("All replies") | paged | fields)
    return found


async def heard_of(scheduler: Any, counter: str, value: float) -> None:
    """Wait until heartbeats report this total over all workers."""
    reports = scheduler.extensions["gpurt"].reports
    await until(lambda: reports.known()["counters"].get(counter) == value)


def known_fallbacks(scheduler: Any) -> set[str]:
    workers = scheduler.extensions["gpurt"].reports.known()["workers"]
    return {id for one in workers.values() for id in one["fallbacks"]}


async def shuffled(client: Any) -> Any:
    frame = dd.from_pandas(pd.DataFrame({"key": range(1000)}), npartitions=4)
    result = client.persist(frame.shuffle("key"))
    assert await client.compute(result.key.sum()) == sum(range(1000))
    return result


def test_replies_are_as_documented() -> None:
    @on_cluster(**{"gpurt.placement.enabled": True})
    async def run(client: Any, scheduler: Any, *crew: Any) -> None:
        kept = await shuffled(client)
        await all_placed(scheduler)
        workers = sorted(worker.address for worker in crew)

        index = await reply(scheduler, "")
        assert index["enabled"]
        assert list(index["resources"]) == list(RESOURCES)

        await heard_of(scheduler, "shuffle.rows", 1000)
        report = await reply(scheduler, "report")
        assert (report["workers"], report["silent"], report["departed"]) == (2, 0, [])

        memory = await reply(scheduler, "memory")
        assert [row["worker"] for row in memory["rows"]] == [w for w in workers for _ in Tier]
        totals = {row["tier"]: row for row in memory["totals"]}
        assert totals["device"]["capacity"] == sum(
            row["capacity"] for row in memory["rows"] if row["tier"] == "device"
        )

        topology = await reply(scheduler, "topology")
        assert sorted(topology["workers"]) == workers
        assert {place["host"] for place in topology["workers"].values()} == set(topology["hosts"])

        (shuffle,) = (await reply(scheduler, "shuffles"))["rows"]
        assert (shuffle["state"], shuffle["phase"], shuffle["runs"]) == ("done", "done", 1)
        assert shuffle["inputs"] == shuffle["outputs"] == {"total": 4, "done": 4}
        assert (await reply(scheduler, "shuffles", offset=1))["rows"] == []

        (query, *_) = (await reply(scheduler, "queries"))["rows"]
        assert (query["state"], query["done"]) == ("done", query["tasks"])
        del kept

    with differing_links():
        run()


@on_plain_cluster()
async def test_it_comes_and_goes_with_the_runtime(client: Any, scheduler: Any, *_: Any) -> None:
    applications = list(scheduler.http_application.applications)
    assert (await ask(scheduler))[0] == 404
    await dask_gpurt.enable(client)
    assert (await ask(scheduler))[0] == 200
    await dask_gpurt.disable(client)
    assert (await ask(scheduler))[0] == 404
    assert scheduler.http_application.applications == applications


def own(scheduler: Any) -> list[Any]:
    """Return the applications of a scheduler that are not its dashboard's."""

    def is_dashboard(application: Any) -> bool:
        return any(kind.__module__.startswith("bokeh.") for kind in type(application).__mro__)

    return [one for one in scheduler.http_application.applications if not is_dashboard(one)]


def test_a_scheduler_that_is_told_to_has_it_from_its_start_at_its_prefix() -> None:
    async def run() -> None:
        routes = [*dask.config.get("distributed.scheduler.http.routes"), MODULE]
        with dask.config.set({"distributed.scheduler.http.routes": routes}):
            async with Scheduler(dashboard_address=":0", http_prefix="/here") as scheduler:
                status, index = await ask(scheduler, prefix="/here")
                assert (status, index["enabled"]) == (200, False)
                status, said = await ask(scheduler, "report", prefix="/here")
                assert (status, said) == (503, {"error": "the runtime is off: dask_gpurt.enable(client)"})
                applications = own(scheduler)
                async with Client(scheduler.address, asynchronous=True) as client:
                    await dask_gpurt.enable(client)
                    assert own(scheduler)[:-1] == applications  # the last one is the page
                    assert (await ask(scheduler, prefix="/here"))[1]["enabled"]
                    await dask_gpurt.disable(client)

    asyncio.run(run())


@on_cluster()
async def test_a_report_keeps_what_workers_did_that_have_left(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    a.plugins["gpurt"].metrics.add("shuffle.rows", 5)
    b.plugins["gpurt"].metrics.fallback(Fallback.MEMORY_UNPICKLABLE, "a reason")
    await heard_of(scheduler, "shuffle.rows", 5)
    await until(lambda: "memory.unpicklable" in known_fallbacks(scheduler))
    await a.close()
    report = await reply(scheduler, "report")
    assert (report["counters"]["shuffle.rows"], report["workers"]) == (5, 1)
    assert [one["address"] for one in report["departed"]] == [a.address]
    assert report["fallbacks"]["memory.unpicklable"] == {
        "text": Fallback.MEMORY_UNPICKLABLE.text,
        "reason": "a reason",
        "count": 1,
    }


def test_replies_of_256_workers_are_bounded() -> None:
    memory = ClusterMemory()
    for number in range(256):
        ledger = Ledger(dict.fromkeys(Tier, 2**40))
        for tier in Tier:
            for prefix in range(10):
                ledger.add(tier, Label("partitions", f"prefix-{prefix}"), 2**30)
        memory.apply(f"tcp://10.0.{number // 16}.{number % 16}:40000", ledger.snapshot())
    runtime: Any = SimpleNamespace(scheduler=None, reported_memory=lambda: memory)
    api = JsonApi(runtime, ShuffleLog())

    whole, seen = 256 * len(Tier), list[str]()
    for offset in range(0, 256, MAX_LIMIT):
        found = api.memory(Page(offset))
        assert found["total"] == 256
        assert len(json.dumps(found)) < 2**17
        seen += [row["worker"] for row in found["rows"]]
    assert len(seen) == whole
    assert set(seen) == set(memory.workers())
    (device, *_) = found["totals"]
    assert (device["capacity"], device["partitions"]) == (256 * 2**40, 256 * 10 * 2**30)
