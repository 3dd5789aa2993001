"""Serve the JSON API ``/gpurt/api/…`` on the scheduler's HTTP server.

Requests never block the event loop for long: lists that grow with the cluster are paged, figures of workers
come from their heartbeats, and the handler yields to the loop between two shuffles.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from dask.typing import Key
from distributed.http.utils import RequestHandler
from tornado.web import HTTPError

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.http import serve
from dask_gpurt.dask_hooks.shuffle import RunState, ShuffleId, barrier_key, runs_of
from dask_gpurt.dask_hooks.types import SchedulerTask
from dask_gpurt.monitor.json_replies import (
    API_VERSION,
    DecisionsReply,
    FallbackReply,
    HistoryReply,
    IndexReply,
    MemoryReply,
    Page,
    PastShuffleReply,
    PlaceReply,
    ProgressReply,
    ReportReply,
    ShuffleReply,
    ShufflesReply,
    TopologyReply,
    as_json,
    schemas,
)
from dask_gpurt.observe import Fallback
from dask_gpurt.protocol import WORKER_REPORT_HANDLER

if TYPE_CHECKING:
    from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin

T = TypeVar("T")

#: The path of the API, below the prefix of the scheduler's other pages.
ROOT = "/gpurt/api"
#: The default and maximum page size.
MAX_LIMIT = 100
#: The maximum number of workers in a page of memory by prefix, with up to some hundred rows each.
MAX_LIMIT_BY_PREFIX = 25
#: How many of the latest placement decisions are available.
MAX_DECISIONS = 500
#: The maximum number of workers with details in one reply.
MAX_DETAILS = 8
#: How long to wait for the details of workers, in seconds.
DETAILS_TIMEOUT_S = 10.0
#: The length of a key's text, in which a literal cannot be nested deeply enough to exhaust the parser, and
#: how much of a wrong text an error repeats.
MAX_KEY_LENGTH, MAX_ECHO = 1_000, 100
#: The fields of a worker that has left.
DEPARTED = ("address", "name", "left", "silent")


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
    key
        The key of a task; None if not given.
    """

    offset: int = 0
    limit: int = MAX_LIMIT
    worker: tuple[str, ...] = ()
    by: str = "tier"
    key: Key | None = None

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
            key=_key(given["key"][-1]) if "key" in given else None,
        )
        if found.by not in ("tier", "prefix"):
            raise Refused(HTTPStatus.BAD_REQUEST, f"by={found.by[:MAX_ECHO]}: expected tier or prefix")
        if len(found.worker) > MAX_DETAILS:
            raise Refused(HTTPStatus.BAD_REQUEST, f"expected at most {MAX_DETAILS} workers")
        return found

    def page(self, total: int) -> Page:
        """Return the fields that all pages share; ``total`` is the number of items."""
        return Page(api=API_VERSION, at=time.time(), total=total, offset=self.offset, limit=self.limit)

    def cut(self, whole: Sequence[T]) -> Sequence[T]:
        """Return this page of a sequence."""
        return whole[self.offset : self.offset + self.limit]


def _number(given: dict[str, list[str]], name: str, default: int) -> int:
    text = given.get(name, [str(default)])[-1]
    if not re.fullmatch("[0-9]{1,9}", text):
        message = f"{name}={text[:20]}: expected a whole number of at least 0, and at most 9 digits"
        raise Refused(HTTPStatus.BAD_REQUEST, message)
    return int(text)


#: Lists the last shuffles, the latest first.
Recorded = Callable[[], Sequence[Callable[[float], PastShuffleReply]]]
#: By scheduler: a process may have several.
_recorded: WeakKeyDictionary[Any, Recorded] = WeakKeyDictionary()


def serve_json(runtime: GpurtSchedulerPlugin, recorded: Recorded) -> Callable[[], None]:
    """Serve the API of a scheduler's runtime, if Dask supports that; return a function that ends it."""
    _recorded[runtime.scheduler] = recorded
    try:
        return serve(runtime.scheduler, __name__)
    except UnsupportedError as error:
        runtime.metrics.fallback(Fallback.OBSERVE_JSON_API, str(error))
        return lambda: None


class JsonApi:
    """Answer requests from the state of a scheduler's runtime. On the event loop.

    Parameters
    ----------
    runtime
        The scheduler's plugin.
    recorded
        Lists the last shuffles, the latest first: functions of the time that return the figures of one.
    """

    def __init__(self, runtime: GpurtSchedulerPlugin, recorded: Recorded = list):
        self.recorded = recorded
        self._runtime = runtime
        self._scheduler = runtime.scheduler

    async def report(self, query: Query) -> ReportReply:
        """Return the cluster's counters and fallbacks, and the full reports of the given workers."""
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

    async def memory(self, query: Query) -> MemoryReply:
        """Return the memory in use by tier or by prefix."""
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
        """Return the places of workers, their hosts, and the speeds of links."""
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
        """Return the progress of active shuffles."""
        active = self._runtime.shuffles.active()
        rows = []
        for shuffle_id, run in query.cut(list(active.items())):
            if (barrier := self._scheduler.tasks.get(barrier_key(shuffle_id))) is not None:
                rows.append(self._shuffle(shuffle_id, run, barrier))
            await asyncio.sleep(0)  # each shuffle iterates over thousands of tasks
        return {**query.page(len(active)), "rows": rows}

    def _shuffle(self, shuffle_id: ShuffleId, run: RunState, barrier: SchedulerTask) -> ShuffleReply:
        transferred = barrier.state == "memory"
        inputs = _progress([transferred or task.state == "memory" for task in barrier.dependencies])
        # Outputs that are released once the barrier is done were in memory before, or are not needed.
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

    async def history(self, query: Query) -> HistoryReply:
        """Return the figures of the last shuffles, running and past."""
        recorded, rows = self.recorded(), []
        for figures in query.cut(recorded):
            rows.append(figures(time.time()))
            await asyncio.sleep(0)  # each shuffle adds up the figures of its workers
        return {**query.page(len(recorded)), "rows": rows}

    async def decisions(self, query: Query) -> DecisionsReply:
        """Return the latest placement decisions, and the candidates of one of them."""
        placement = self._runtime.placement
        if placement is None:
            return {**query.page(0), "placement": False, "rows": [], "candidates": []}
        last = min(query.offset + query.limit, MAX_DECISIONS)
        return {
            **query.page(min(len(placement.history), MAX_DECISIONS)),
            "placement": True,
            "rows": as_json(placement.history.latest(last)[query.offset :]),
            "candidates": [] if query.key is None else as_json(placement.explain(query.key)),
        }


def _key(text: str) -> Key:
    """Parse a key: a tuple as a Python literal, else a string."""
    if len(text) > MAX_KEY_LENGTH:
        message = f"key={text[:MAX_ECHO]}…: expected at most {MAX_KEY_LENGTH} characters"
        raise Refused(HTTPStatus.BAD_REQUEST, message)
    if not text.startswith("("):
        return text
    with contextlib.suppress(SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        if isinstance(found := ast.literal_eval(text), tuple) and _is_key(found):
            return found
    message = f"key={text[:MAX_ECHO]}: expected a string, or a tuple of strings, numbers and tuples"
    raise Refused(HTTPStatus.BAD_REQUEST, message)


def _is_key(value: object) -> bool:
    return all(map(_is_key, value)) if isinstance(value, tuple) else isinstance(value, (str, int, float))


def _progress(done: Sequence[bool]) -> ProgressReply:
    return {"total": len(done), "done": sum(done)}


def _sum_of(counted: Sequence[dict[str, Any]]) -> dict[str, FallbackReply]:
    """Sum the fallbacks of several processes, each with the reason of the last process that has it."""
    together: dict[str, FallbackReply] = {}
    for fallbacks in counted:
        for id, known in fallbacks.items():
            count = known["count"] + (together[id]["count"] if id in together else 0)
            together[id] = {"text": known["text"], "reason": known["reason"], "count": count}
    return together


class Resource(NamedTuple):
    """Describe a resource: its name, a summary, its method and its arguments."""

    name: str
    tells: str
    answer: Callable[[JsonApi, Query], Coroutine[Any, Any, Any]]
    arguments: tuple[str, ...]


RESOURCES = (
    Resource(
        "report",
        "the counters and fallbacks of the cluster; with `worker`, up to 8 times, a worker's full report",
        JsonApi.report,
        ("worker",),
    ),
    Resource(
        "memory",
        "the memory in use, `by` `tier` or `prefix` of tasks; by prefix at most 25 workers",
        JsonApi.memory,
        ("offset", "limit", "by"),
    ),
    Resource("topology", "the places of workers and their links", JsonApi.topology, ("offset", "limit")),
    Resource("shuffles", "the progress of active shuffles", JsonApi.shuffles, ("offset", "limit")),
    Resource(
        "history",
        "the last 100 shuffles, running and past: time, bytes, rows, skew, and what was done again",
        JsonApi.history,
        ("offset", "limit"),
    ),
    Resource(
        "decisions",
        "the placement of the last 500 tasks, with reasons; with `key`, the cost on each worker",
        JsonApi.decisions,
        ("offset", "limit", "key"),
    ),
)


class _JsonHandler(RequestHandler):
    """Reply with JSON, including errors."""

    def runtime(self) -> GpurtSchedulerPlugin | None:
        """Return the runtime of the scheduler; None while it is off."""
        found: GpurtSchedulerPlugin | None = self.server.extensions.get("gpurt")
        return found if hasattr(found, "json_api") else None

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
    """Serve the JSON Schema of all replies."""

    def get(self) -> None:
        self.reply(schemas())


class UnknownHandler(_JsonHandler):
    """Refuse any other path below the API, with the names of the resources."""

    def get(self, path: str) -> None:
        known = ", ".join([*(one.name for one in RESOURCES), "schema"])
        message = f"no such resource: {path[:100]}: expected one of {known}"
        self.reply({"error": message}, HTTPStatus.NOT_FOUND)


class ResourceHandler(_JsonHandler):
    """Serve one resource."""

    async def get(self) -> None:
        resource: Resource = self.extra["resource"]
        try:
            given = {name: self.get_query_arguments(name) for name in self.request.query_arguments}
            query = Query.of(given, resource.arguments)
            if (runtime := self.runtime()) is None:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the runtime is off: dask_gpurt.enable(client)")
            api = JsonApi(runtime, _recorded.get(self.server, list))
            self.reply(await resource.answer(api, query))
        except Refused as refused:
            self.reply({"error": str(refused)}, refused.status)


#: The routes, in the format of Dask's own HTTP modules such as ``distributed.http.health``.
routes: list[tuple[str, type[RequestHandler], dict[str, Any]]] = [
    (f"{ROOT}/?", IndexHandler, {}),
    (f"{ROOT}/schema", SchemaHandler, {}),
    *((f"{ROOT}/{one.name}", ResourceHandler, {"extra": {"resource": one}}) for one in RESOURCES),
    (f"{ROOT}/(.*)", UnknownHandler, {}),  # the last, since the first match answers
]
