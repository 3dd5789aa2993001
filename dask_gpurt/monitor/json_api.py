"""Serve the JSON API ``/gpurt/api/…`` on the scheduler's HTTP server.

Replies are the plain values that the report, the memory tables and the log of shuffles have;
``docs/reference/json-api.md`` lists their fields. Requests never block the event loop for long: lists that
grow with the cluster are paged, figures of workers come from their heartbeats, and the handler yields to the
loop between two shuffles.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from distributed.http.utils import RequestHandler
from tornado.web import HTTPError

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.http import serve
from dask_gpurt.observe import Fallback
from dask_gpurt.protocol import WORKER_REPORT_HANDLER

if TYPE_CHECKING:
    from dask_gpurt.monitor.dashboard.shuffles import ShuffleLog, ShuffleRecord
    from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin

Reply = dict[str, Any]

#: The path of the API, below the prefix of the scheduler's other pages.
ROOT = "/gpurt/api"
#: The version of the replies. It changes when a field changes its name, type or meaning.
API_VERSION = 1
#: The default and maximum page size.
MAX_LIMIT = 100
#: The maximum number of workers in a page of memory by prefix, with up to some hundred rows each.
MAX_LIMIT_BY_PREFIX = 25
#: The maximum number of workers with details in one reply.
MAX_DETAILS = 8
#: How long to wait for the details of workers, in seconds.
DETAILS_TIMEOUT_S = 10.0
#: How much of a wrong text an error repeats.
MAX_ECHO = 100


class Refused(Exception):
    """Reject a request with an HTTP status and a message that says what is expected."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


class Query(NamedTuple):
    """Hold the arguments of a request.

    Parameters
    ----------
    offset, limit
        The first item of the page, and the page size.
    worker
        The addresses of workers.
    by
        ``tier`` or ``prefix``: how to group memory.
    """

    offset: int = 0
    limit: int = MAX_LIMIT
    worker: tuple[str, ...] = ()
    by: str = "tier"

    @classmethod
    def of(cls, given: dict[str, list[str]], allowed: Sequence[str]) -> Query:
        """Parse and validate the arguments of a request.

        Raises
        ------
        Refused
            If an argument is unknown or invalid.
        """
        if unknown := given.keys() - set(allowed):
            names = ", ".join(sorted(unknown))[:MAX_ECHO]
            raise Refused(HTTPStatus.BAD_REQUEST, f"{names}: expected one of {', '.join(allowed)}")
        found = cls(
            offset=_number(given, "offset", 0),
            limit=min(_number(given, "limit", MAX_LIMIT), MAX_LIMIT),
            worker=tuple(given.get("worker", ())),
            by=given.get("by", ["tier"])[-1],
        )
        if found.by not in ("tier", "prefix"):
            raise Refused(HTTPStatus.BAD_REQUEST, f"by={found.by[:MAX_ECHO]}: expected tier or prefix")
        if len(found.worker) > MAX_DETAILS:
            raise Refused(HTTPStatus.BAD_REQUEST, f"expected at most {MAX_DETAILS} workers")
        return found

    def page(self, total: int, **more: Any) -> Reply:
        """Return a reply with the fields that all pages share; ``total`` is the number of items."""
        return _reply(total=total, offset=self.offset, limit=self.limit, **more)

    def cut(self, whole: Sequence[Any]) -> Sequence[Any]:
        """Return this page of a sequence."""
        return whole[self.offset : self.offset + self.limit]


def _number(given: dict[str, list[str]], name: str, default: int) -> int:
    text = given.get(name, [str(default)])[-1]
    if not re.fullmatch("[0-9]{1,9}", text):
        message = f"{name}={text[:20]}: expected a whole number of at least 0, and at most 9 digits"
        raise Refused(HTTPStatus.BAD_REQUEST, message)
    return int(text)


class JsonApi:
    """Answer requests from the state of a scheduler's runtime. On the event loop.

    Parameters
    ----------
    runtime
        The scheduler's plugin, switched on.
    shuffles
        The last shuffles, running and past.
    """

    def __init__(self, runtime: GpurtSchedulerPlugin, shuffles: ShuffleLog):
        self._runtime = runtime
        self._scheduler = runtime.scheduler
        self._shuffles = shuffles

    async def report(self, query: Query) -> Reply:
        """Return the cluster's counters and fallbacks, and the full reports of up to 8 workers."""
        report = self._runtime.reports.known()
        workers: dict[str, Reply] = report["workers"]
        return _reply(
            version=__version__,
            takeover=self._runtime.settings.takeover,
            counters=report["counters"],
            fallbacks=_sum_of([report["fallbacks"], *(one["fallbacks"] for one in workers.values())]),
            workers=len(workers),
            silent=len(self._scheduler.workers) - len(workers),
            departed=[
                {name: one[name] for name in ("address", "name", "left", "silent")}
                for one in report["departed"]
            ],
            details=_plain(await self._details(query.worker)) if query.worker else {},
        )

    async def _details(self, workers: Sequence[str]) -> Reply:
        if unknown := [worker for worker in workers if worker not in self._scheduler.workers]:
            names = ", ".join(worker[:MAX_ECHO] for worker in unknown)
            raise Refused(HTTPStatus.NOT_FOUND, f"no such worker: {names}")
        try:
            async with asyncio.timeout(DETAILS_TIMEOUT_S):
                replies = await self._scheduler.broadcast(
                    msg={"op": WORKER_REPORT_HANDLER}, workers=list(workers), on_error="return"
                )
        except TimeoutError as error:
            message = f"a worker did not answer within {DETAILS_TIMEOUT_S:g} s"
            raise Refused(HTTPStatus.GATEWAY_TIMEOUT, message) from error
        return {name: one if isinstance(one, dict) else {"error": str(one)} for name, one in replies.items()}

    async def memory(self, query: Query) -> Reply:
        """Return the memory in use by tier, or by prefix of tasks with at most 25 workers to a page."""
        memory = self._runtime.reported_memory()
        workers, rows = memory.workers(), memory.rows
        if query.by == "prefix":
            query = query._replace(limit=min(query.limit, MAX_LIMIT_BY_PREFIX))
            rows = memory.rows_by_prefix
        return query.page(len(workers), by=query.by, totals=memory.totals(), rows=rows(query.cut(workers)))

    async def topology(self, query: Query) -> Reply:
        """Return the places of workers, their hosts, and the speeds of links."""
        whole = self._runtime.places.describe()
        workers = sorted(whole["workers"].items())
        page = {name: {"host": place["host"], "gpu": place.get("gpu")} for name, place in query.cut(workers)}
        hosts = {place["host"] for place in page.values()}
        return query.page(
            len(workers),
            speeds=whole["speeds"],
            hosts={name: host for name, host in whole["hosts"].items() if name in hosts},
            workers=page,
        )

    async def shuffles(self, query: Query) -> Reply:
        """Return the active shuffles, the latest first: as in the history."""
        active = {str(shuffle) for shuffle in self._runtime.shuffles.active()}
        latest = self._shuffles.latest()
        return await self._figures(query, [record for record in latest if record.shuffle in active])

    async def history(self, query: Query) -> Reply:
        """Return the last 100 shuffles, running and past: progress, bytes, rows, skew, and repairs."""
        return await self._figures(query, self._shuffles.latest())

    async def _figures(self, query: Query, records: Sequence[ShuffleRecord]) -> Reply:
        rows = []
        for record in query.cut(records):
            rows.append(record.figures(time.time()))
            await asyncio.sleep(0)  # each shuffle adds up the figures of its workers
        return query.page(len(records), rows=rows)


def _reply(**fields: Any) -> Reply:
    return {"api": API_VERSION, "at": time.time(), **fields}


def _sum_of(counted: Sequence[dict[str, Any]]) -> Reply:
    """Sum the fallbacks of several processes, each with the reason of the last process that has it."""
    together: Reply = {}
    for fallbacks in counted:
        for id, known in fallbacks.items():
            count = known["count"] + (together[id]["count"] if id in together else 0)
            together[id] = {"text": known["text"], "reason": known["reason"], "count": count}
    return together


def _plain(value: Any) -> Any:
    """Return a JSON-serialisable value, with None in place of infinities and NaN."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


class Resource(NamedTuple):
    """Describe a resource: its method, from which its name and summary are taken, and its arguments."""

    answer: Callable[[JsonApi, Query], Coroutine[Any, Any, Reply]]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the resource."""
        return self.answer.__name__

    @property
    def summary(self) -> str:
        """Return what the resource tells."""
        return (self.answer.__doc__ or "").removeprefix("Return ").removesuffix(".").replace("``", "`")


RESOURCES = (
    Resource(JsonApi.report, ("worker",)),
    Resource(JsonApi.memory, ("offset", "limit", "by")),
    Resource(JsonApi.topology, ("offset", "limit")),
    Resource(JsonApi.shuffles, ("offset", "limit")),
    Resource(JsonApi.history, ("offset", "limit")),
)

#: The API of each scheduler whose runtime is on: a process may have several.
_apis: WeakKeyDictionary[Any, JsonApi] = WeakKeyDictionary()


def serve_json(runtime: GpurtSchedulerPlugin, shuffles: ShuffleLog) -> Callable[[], None]:
    """Serve the API of a scheduler's runtime, if Dask supports that; return a function that ends it."""
    with contextlib.ExitStack() as undo:
        _apis[runtime.scheduler] = JsonApi(runtime, shuffles)
        undo.callback(_apis.pop, runtime.scheduler, None)
        try:
            undo.callback(serve(runtime.scheduler, __name__))
        except UnsupportedError as error:
            runtime.metrics.fallback(Fallback.OBSERVE_JSON_API, str(error))
        return undo.pop_all().close


class _JsonHandler(RequestHandler):
    """Reply with JSON, including errors."""

    def reply(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Write a value as JSON, marked as not cacheable."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.write(json.dumps(value, allow_nan=False))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Reply with the reason of an error that Tornado raises, as for a text that is not UTF-8."""
        status, (_, error, _) = HTTPStatus(status_code), kwargs.get("exc_info", (None, None, None))
        self.reply({"error": str(error) if isinstance(error, HTTPError) else status.phrase}, status)


class IndexHandler(_JsonHandler):
    """List the resources, even while the runtime is off."""

    def get(self) -> None:
        resources = {one.name: one.summary for one in RESOURCES}
        self.reply(_reply(enabled=self.server in _apis, version=__version__, resources=resources))


class UnknownHandler(_JsonHandler):
    """Refuse any other path below the API, with the names of the resources."""

    def get(self, path: str) -> None:
        known = ", ".join(one.name for one in RESOURCES)
        message = f"no such resource: {path[:100]}: expected one of {known}"
        self.reply({"error": message}, HTTPStatus.NOT_FOUND)


class ResourceHandler(_JsonHandler):
    """Serve one resource."""

    async def get(self) -> None:
        resource: Resource = self.extra["resource"]
        try:
            given = {name: self.get_query_arguments(name) for name in self.request.query_arguments}
            query = Query.of(given, resource.arguments)
            if (api := _apis.get(self.server)) is None:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the runtime is off: dask_gpurt.enable(client)")
            self.reply(await resource.answer(api, query))
        except Refused as refused:
            self.reply({"error": str(refused)}, refused.status)


#: The routes, in the format of Dask's own HTTP modules such as ``distributed.http.health``.
routes: list[tuple[str, type[RequestHandler], dict[str, Any]]] = [
    (f"{ROOT}/?", IndexHandler, {}),
    *((f"{ROOT}/{one.name}", ResourceHandler, {"extra": {"resource": one}}) for one in RESOURCES),
    (f"{ROOT}/(.*)", UnknownHandler, {}),  # the last, since the first match answers
]
