"""Answer programs over HTTP: ``/gpurt/api/…`` on the scheduler, as JSON.

No request blocks the event loop for long: lists that grow with the cluster are cut into pages, figures of
workers come from their heartbeats, and the loop is yielded between two shuffles.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dask.typing import Key
from distributed.http.utils import RequestHandler

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.shuffle import barrier_key, runs_of
from dask_gpurt.observe.json_replies import (
    API_VERSION,
    DecisionsReply,
    FallbackReply,
    IndexReply,
    MemoryReply,
    Page,
    PlaceReply,
    ProgressReply,
    ReportReply,
    ShuffleReply,
    ShufflesReply,
    TopologyReply,
    as_json,
    schemas,
)
from dask_gpurt.plugins.reports import REPORT

if TYPE_CHECKING:
    from dask_gpurt.plugins.scheduler import GpurtSchedulerPlugin

T = TypeVar("T")

#: Where the resources are, below the prefix of the scheduler's other pages.
ROOT = "/gpurt/api"
#: The most of what a resource counts that one reply has, and so many unless another number is asked for.
MAX_LIMIT = 100
#: The most workers that one reply has the prefixes of, which may be some hundred rows for each.
MAX_LIMIT_BY_PREFIX = 25
#: The last decisions that are told of.
MAX_DECISIONS = 500
#: The most workers whose details one reply has.
MAX_DETAILS = 8
#: Seconds after which workers whose details are asked for are not waited for.
DETAILS_TIMEOUT_S = 10.0
#: The fields of a worker that has left.
DEPARTED = ("address", "name", "left", "silent")


class Refused(Exception):
    """Refuse a request, with the status and what would be right."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


class Query(NamedTuple):
    """Hold the arguments of a request.

    Parameters
    ----------
    offset, limit
        The first and the most of what the resource counts.
    worker
        The addresses of workers.
    by
        What memory is told by.
    key
        Of a task.
    """

    offset: int = 0
    limit: int = MAX_LIMIT
    worker: tuple[str, ...] = ()
    by: str = "tier"
    key: str | None = None

    @classmethod
    def of(cls, given: dict[str, list[str]], allowed: Sequence[str]) -> Query:
        """Return what was given for the arguments that a resource has.

        Raises
        ------
        Refused
            When there are others, or values that make no sense.
        """
        if unknown := given.keys() - set(allowed):
            raise Refused(
                HTTPStatus.BAD_REQUEST, f"{', '.join(sorted(unknown))}: expected one of {', '.join(allowed)}"
            )
        found = cls(
            offset=_number(given, "offset", 0),
            limit=min(_number(given, "limit", MAX_LIMIT), MAX_LIMIT),
            worker=tuple(given.get("worker", ())),
            by=given.get("by", ["tier"])[-1],
            key=given["key"][-1] if "key" in given else None,
        )
        if found.by not in ("tier", "prefix"):
            raise Refused(HTTPStatus.BAD_REQUEST, f"by={found.by}: expected tier or prefix")
        if len(found.worker) > MAX_DETAILS:
            raise Refused(HTTPStatus.BAD_REQUEST, f"expected at most {MAX_DETAILS} workers")
        return found

    def page(self, total: int) -> Page:
        """Return what all pages have, of so many in all."""
        return Page(api=API_VERSION, at=time.time(), total=total, offset=self.offset, limit=self.limit)

    def cut(self, whole: Sequence[T]) -> Sequence[T]:
        """Return this page of a whole."""
        return whole[self.offset : self.offset + self.limit]


def _number(given: dict[str, list[str]], name: str, default: int) -> int:
    text = given.get(name, [str(default)])[-1]
    if not re.fullmatch("[0-9]{1,9}", text):
        message = f"{name}={text[:20]}: expected a whole number of at least 0, and at most 9 digits"
        raise Refused(HTTPStatus.BAD_REQUEST, message)
    return int(text)


class JsonApi:
    """Answer what is asked of a scheduler's runtime. On the event loop.

    Parameters
    ----------
    runtime
        Of the scheduler.
    """

    def __init__(self, runtime: GpurtSchedulerPlugin):
        self._runtime = runtime
        self._scheduler = runtime.scheduler

    async def report(self, query: Query) -> ReportReply:
        """Return what the cluster did and fell back from, and all that some workers report."""
        report = self._runtime.reports.known()
        workers: dict[str, dict[str, Any]] = report["workers"]
        counted = [report["fallbacks"], *(one["fallbacks"] for one in workers.values())]
        departed: Any = [{name: one[name] for name in DEPARTED} for one in report["departed"]]
        return {
            "api": API_VERSION,
            "at": time.time(),
            "version": __version__,
            "takeover": self._runtime.settings.takeover,
            "counters": report["counters"],
            "fallbacks": _sum_of(counted),
            "workers": len(workers),
            "silent": len(self._scheduler.workers) - len(workers),
            "departed": departed,
            "details": as_json(await self._details(query.worker)) if query.worker else {},
        }

    async def _details(self, workers: Sequence[str]) -> dict[str, Any]:
        if unknown := [worker for worker in workers if worker not in self._scheduler.workers]:
            raise Refused(HTTPStatus.NOT_FOUND, f"no such worker: {', '.join(unknown)}")
        try:
            async with asyncio.timeout(DETAILS_TIMEOUT_S):
                replies = await self._scheduler.broadcast(
                    msg={"op": REPORT}, workers=list(workers), on_error="return"
                )
        except TimeoutError as error:
            message = f"a worker did not answer within {DETAILS_TIMEOUT_S:g} s"
            raise Refused(HTTPStatus.GATEWAY_TIMEOUT, message) from error
        return {name: one if isinstance(one, dict) else {"error": str(one)} for name, one in replies.items()}

    async def memory(self, query: Query) -> MemoryReply:
        """Return what the tiers hold."""
        if query.by == "prefix":
            query = query._replace(limit=min(query.limit, MAX_LIMIT_BY_PREFIX))
        memory = self._runtime.reported_memory()
        workers = memory.workers()
        page = query.cut(workers)
        rows: Any = memory.rows(page) if query.by == "tier" else memory.rows_by_prefix(page)
        totals: Any = memory.totals()
        by: Any = query.by
        return {**query.page(len(workers)), "by": by, "totals": totals, "rows": rows}

    async def topology(self, query: Query) -> TopologyReply:
        """Return where workers are, and how fast links are."""
        whole = self._runtime.places.describe()
        workers = sorted(whole["workers"].items())
        page: dict[str, PlaceReply] = {
            name: {"host": place["host"], "gpu": place.get("gpu")} for name, place in query.cut(workers)
        }
        hosts = {place["host"] for place in page.values()}
        return {
            **query.page(len(workers)),
            "speeds": whole["speeds"],
            "hosts": {name: host for name, host in whole["hosts"].items() if name in hosts},
            "workers": page,
        }

    async def shuffles(self, query: Query) -> ShufflesReply:
        """Return how far the shuffles are that run."""
        active = self._runtime.shuffles.active()
        rows = []
        for shuffle_id, run in query.cut(list(active.items())):
            if (barrier := self._scheduler.tasks.get(barrier_key(shuffle_id))) is not None:
                rows.append(self._shuffle(shuffle_id, run, barrier))
            await asyncio.sleep(0)  # thousands of tasks are looked through for each
        return {**query.page(len(active)), "rows": rows}

    def _shuffle(self, shuffle_id: Any, run: Any, barrier: Any) -> ShuffleReply:
        transferred = barrier.state == "memory"
        inputs = _progress([transferred or task.state == "memory" for task in barrier.dependencies])
        # Outputs that are released after the barrier were in memory before, or are not needed.
        done = ("memory", "released", "forgotten") if transferred else ("memory",)
        outputs = _progress([task.state in done for task in barrier.dependents])
        is_done = transferred and outputs["done"] == outputs["total"]
        return {
            "id": str(shuffle_id),
            "run": run.run_id,
            "runs": len(list(runs_of(self._scheduler.extensions["shuffle"], shuffle_id))),
            "phase": "done" if is_done else "unpack" if transferred else "transfer",
            "inputs": inputs,
            "outputs": outputs,
            "workers": len(run.participating_workers),
        }

    async def decisions(self, query: Query) -> DecisionsReply:
        """Return the last decisions of placement, and the reasons for one of them."""
        placement = self._runtime.placement
        if placement is None:
            return {**query.page(0), "placement": False, "rows": [], "candidates": []}
        last = min(query.offset + query.limit, MAX_DECISIONS)
        return {
            **query.page(min(len(placement.history), MAX_DECISIONS)),
            "placement": True,
            "rows": as_json(placement.history.latest(last)[query.offset :]),
            "candidates": [] if query.key is None else as_json(placement.explain(_key(query.key))),
        }


def _key(text: str) -> Key:
    """Return the key that is written so: a tuple as Python writes it, or a string."""
    try:
        found = ast.literal_eval(text) if text.startswith("(") else text
    except (SyntaxError, ValueError):
        return text
    return found if isinstance(found, tuple) else text


def _progress(done: Sequence[bool]) -> ProgressReply:
    return {"total": len(done), "done": sum(done)}


def _sum_of(counted: Sequence[dict[str, Any]]) -> dict[str, FallbackReply]:
    """Return the fallbacks of several processes together, each with the reason that came last in order."""
    together: dict[str, FallbackReply] = {}
    for fallbacks in counted:
        for id, known in fallbacks.items():
            count = known["count"] + (together[id]["count"] if id in together else 0)
            together[id] = {"text": known["text"], "reason": known["reason"], "count": count}
    return together


class Resource(NamedTuple):
    """Name a resource, what it tells, and the arguments that it takes."""

    name: str
    tells: str
    answer: Callable[[JsonApi, Query], Coroutine[Any, Any, Any]]
    arguments: tuple[str, ...]


RESOURCES = (
    Resource(
        "report",
        "what the runtime did and fell back from; with `worker`, up to 8 times, all of a worker's report",
        JsonApi.report,
        ("worker",),
    ),
    Resource(
        "memory",
        "what the tiers hold, `by` `tier` or `prefix` of tasks; by prefix 25 workers at most",
        JsonApi.memory,
        ("offset", "limit", "by"),
    ),
    Resource("topology", "where workers are, and what joins them", JsonApi.topology, ("offset", "limit")),
    Resource("shuffles", "how far the shuffles are that run", JsonApi.shuffles, ("offset", "limit")),
    Resource(
        "decisions",
        "where the last 500 tasks were placed, and why; with `key`, what each worker would have cost",
        JsonApi.decisions,
        ("offset", "limit", "key"),
    ),
)


class _JsonHandler(RequestHandler):
    """Write JSON, and errors as JSON too."""

    def runtime(self) -> GpurtSchedulerPlugin | None:
        """Return the runtime of the scheduler; None while it is off."""
        found: GpurtSchedulerPlugin | None = self.server.extensions.get("gpurt")
        return found if hasattr(found, "json_api") else None

    def reply(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Write a value as JSON, not to be kept by caches."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.write(json.dumps(value, allow_nan=False))


class IndexHandler(_JsonHandler):
    """List the resources; also where the runtime is off."""

    def get(self) -> None:
        index: IndexReply = {
            "api": API_VERSION,
            "at": time.time(),
            "enabled": self.runtime() is not None,
            "version": __version__,
            "resources": {one.name: one.tells for one in RESOURCES}
            | {"schema": "JSON Schema of all replies"},
        }
        self.reply(index)


class SchemaHandler(_JsonHandler):
    """Answer how replies look."""

    def get(self) -> None:
        self.reply(schemas())


class ResourceHandler(_JsonHandler):
    """Answer what one resource tells."""

    async def get(self) -> None:
        resource: Resource = self.extra["resource"]
        try:
            given = {name: self.get_query_arguments(name) for name in self.request.query_arguments}
            query = Query.of(given, resource.arguments)
            if (runtime := self.runtime()) is None:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the runtime is off: dask_gpurt.enable(client)")
            self.reply(await resource.answer(runtime.json_api, query))
        except Refused as refused:
            self.reply({"error": str(refused)}, refused.status)


#: In the form of Dask's own modules of pages, such as ``distributed.http.health``.
routes: list[tuple[str, type[RequestHandler], dict[str, Any]]] = [
    (ROOT, IndexHandler, {}),
    (f"{ROOT}/schema", SchemaHandler, {}),
    *((f"{ROOT}/{one.name}", ResourceHandler, {"extra": {"resource": one}}) for one in RESOURCES),
]
