"""Serve the JSON API ``/gpurt/api/…`` on the scheduler's HTTP server.

Replies are the plain values that the report, the memory tables and the log of shuffles have;
``docs/reference/json-api.md`` lists their fields. They are made of what the scheduler knows from heartbeats,
in pages of at most 100 workers or shuffles, so that a request does not block the event loop for long.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from distributed.http.utils import RequestHandler
from tornado.web import HTTPError

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.http import serve
from dask_gpurt.observe import Fallback

if TYPE_CHECKING:
    from dask_gpurt.monitor.dashboard.shuffles import ShuffleLog
    from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin

Reply = dict[str, Any]

#: The path of the API, below the prefix of the scheduler's other pages.
ROOT = "/gpurt/api"
#: The version of the replies. It changes when a field changes its name, type or meaning.
API_VERSION = 1
#: The default and maximum page size.
MAX_LIMIT = 100
#: The most digits of a number in a request, and how much of a wrong text an error repeats.
MAX_DIGITS, MAX_ECHO = 9, 100


class Refused(Exception):
    """Reject a request with an HTTP status and a message that says what is expected."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


class Page(NamedTuple):
    """Hold the first item of a page, and the page size."""

    offset: int = 0
    limit: int = MAX_LIMIT

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Page:
        """Parse the arguments of a request.

        Raises Refused if an argument is unknown or invalid.
        """
        for name, text in given.items():
            if name not in cls._fields:
                message = f"{name[:MAX_ECHO]}: expected one of {', '.join(cls._fields)}"
                raise Refused(HTTPStatus.BAD_REQUEST, message)
            if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
                message = f"{name}={text[:MAX_ECHO]}: expected a whole number of at most {MAX_DIGITS} digits"
                raise Refused(HTTPStatus.BAD_REQUEST, message)
        page = cls(**{name: int(text) for name, text in given.items()})
        return page._replace(limit=min(page.limit, MAX_LIMIT))

    def cut(self, whole: Sequence[Any]) -> Sequence[Any]:
        """Return this page of a sequence."""
        return whole[self.offset : self.offset + self.limit]

    def reply(self, total: int, **fields: Any) -> Reply:
        """Return a reply with the fields that all pages share; ``total`` is the number of items."""
        return _reply(total=total, offset=self.offset, limit=self.limit, **fields)


class JsonApi:
    """Answer requests from the state of a scheduler's runtime. On the event loop.

    ``shuffles``: the last shuffles, running and past.
    """

    def __init__(self, runtime: GpurtSchedulerPlugin, shuffles: ShuffleLog):
        self._runtime = runtime
        self._shuffles = shuffles

    def report(self, page: Page) -> Reply:
        """Return the cluster's counters and fallbacks, and a page of the workers that have left."""
        report = self._runtime.reports.known()
        workers: dict[str, Reply] = report["workers"]
        departed = [
            {name: one[name] for name in ("address", "name", "left", "silent")} for one in report["departed"]
        ]
        return page.reply(
            len(departed),
            version=__version__,
            takeover=self._runtime.settings.takeover,
            counters=report["counters"],
            fallbacks=sum_of([report["fallbacks"], *(one["fallbacks"] for one in workers.values())]),
            workers=len(workers),
            silent=len(self._runtime.scheduler.workers) - len(workers),
            departed=page.cut(departed),
        )

    def memory(self, page: Page) -> Reply:
        """Return the memory in use by tier."""
        memory = self._runtime.reported_memory()
        workers = memory.workers()
        return page.reply(len(workers), totals=memory.totals(), rows=memory.rows(page.cut(workers)))

    def topology(self, page: Page) -> Reply:
        """Return the places of workers, their hosts, and the speeds of links."""
        whole = self._runtime.places.describe()
        workers = sorted(whole["workers"].items())
        places = dict(page.cut(workers))
        hosts = {place["host"] for place in places.values()}
        return page.reply(
            len(workers),
            speeds=whole["speeds"],
            hosts={name: host for name, host in whole["hosts"].items() if name in hosts},
            workers=places,
        )

    def queries(self, page: Page) -> Reply:
        """Return the last computations, running ones too, with what rules did and left."""
        found = self._runtime.computations.rows()[::-1]
        return page.reply(len(found), rows=page.cut(found))

    def shuffles(self, page: Page) -> Reply:
        """Return the last shuffles, running and past: progress, bytes, rows, skew, and repairs."""
        records = self._shuffles.latest()
        rows = [record.figures(time.time()) for record in page.cut(records)]
        return page.reply(len(records), rows=rows)


def _reply(**fields: Any) -> Reply:
    return {"api": API_VERSION, "at": time.time(), **fields}


def sum_of(counted: Sequence[dict[str, Any]]) -> Reply:
    """Sum the fallbacks of several processes, each with the reason of the last process that has it."""
    together: Reply = {}
    for fallbacks in counted:
        for id, known in fallbacks.items():
            count = known["count"] + (together[id]["count"] if id in together else 0)
            together[id] = {"text": known["text"], "reason": known["reason"], "count": count}
    return together


#: What each resource answers, by name.
RESOURCES: Mapping[str, Callable[[JsonApi, Page], Reply]] = {
    answer.__name__: answer
    for answer in (JsonApi.report, JsonApi.memory, JsonApi.topology, JsonApi.queries, JsonApi.shuffles)
}
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


class ApiHandler(RequestHandler):
    """Serve all resources, and the index of them, which is there even while the runtime is off."""

    def get(self, name: str | None) -> None:
        try:
            self.reply(self._answer(name))
        except Refused as refused:
            self.reply({"error": str(refused)}, refused.status)

    def _answer(self, name: str | None) -> Reply:
        if not name:
            return _reply(enabled=self.server in _apis, version=__version__, resources=list(RESOURCES))
        if name not in RESOURCES:
            message = f"no such resource: {name[:MAX_ECHO]}: expected one of {', '.join(RESOURCES)}"
            raise Refused(HTTPStatus.NOT_FOUND, message)
        page = Page.of({each: self.get_query_argument(each) for each in self.request.query_arguments})
        if (api := _apis.get(self.server)) is None:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the runtime is off: dask_gpurt.enable(client)")
        return RESOURCES[name](api, page)

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


#: The routes, in the format of Dask's own HTTP modules such as ``distributed.http.health``.
routes: list[tuple[str, type[RequestHandler], dict[str, Any]]] = [(f"{ROOT}(?:/(.*))?", ApiHandler, {})]
