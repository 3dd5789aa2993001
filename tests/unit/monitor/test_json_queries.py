"""Requests of the JSON API are parsed with bounds: whatever they hold, the reply is JSON with a reason."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application

from dask_gpurt.memory.ledger import ClusterMemory
from dask_gpurt.monitor import json_api
from dask_gpurt.monitor.dashboard.shuffles import ShuffleLog
from dask_gpurt.monitor.json_api import RESOURCES, ROOT, JsonApi, Page, routes

ARGUMENTS = Page._fields
#: Texts that have broken a parser, or could.
NASTY = ("([1],)", "(" * 900, "(" * 100_000, "(\0,)", "9" * 900, "-1", "", "x" * 50_000)


class Server:
    """Serve the API of an empty scheduler in this process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        runtime: Any = SimpleNamespace(
            scheduler=SimpleNamespace(workers={}),
            settings=SimpleNamespace(takeover=True),
            reports=SimpleNamespace(
                known=lambda: {"workers": {}, "fallbacks": {}, "departed": [], "counters": {}}
            ),
            reported_memory=ClusterMemory,
            computations=SimpleNamespace(rows=list),
            places=SimpleNamespace(describe=lambda: {"workers": {}, "speeds": {}, "hosts": {}}),
        )
        json_api._apis[self] = JsonApi(runtime, ShuffleLog())
        self._server = HTTPServer(
            Application([(path, handler, {"dask_server": self, **more}) for path, handler, more in routes])
        )
        sockets = bind_sockets(0, "127.0.0.1")
        self._server.add_sockets(sockets)
        self._root = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    def ask(self, path: str, **options: Any) -> tuple[int, Any]:
        """Return the status and the body of a reply, which must be JSON."""

        async def fetch() -> Any:
            return await AsyncHTTPClient().fetch(self._root + path, raise_error=False, **options)

        found = self.loop.run_until_complete(fetch())
        assert found.headers["Content-Type"] == "application/json", found.body
        return found.code, json.loads(found.body)

    def close(self) -> None:
        self._server.stop()
        self.loop.run_until_complete(self._server.close_all_connections())
        self.loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if anything is logged with a traceback, or as an error."""
    yield
    assert not [one for one in caplog.records if one.exc_info or one.levelno >= logging.ERROR]


def assert_told(status: int, said: Any) -> None:
    assert status in (200, 400, 404)
    if status != 200:
        assert isinstance(said["error"], str)
        assert 0 < len(said["error"]) < 1_200


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_nasty_argument_is_answered(server: Server, name: str, text: str) -> None:
    if len(text) < 60_000:  # Tornado refuses longer headers itself, by closing the connection
        assert_told(*server.ask(f"{ROOT}/memory?{name}={quote(text)}"))


def test_an_invalid_query_is_refused_with_the_valid_values(server: Server) -> None:
    expected = "limit=ten: expected a whole number of at most 9 digits"
    assert server.ask(f"{ROOT}/memory?limit=ten") == (400, {"error": expected})
    assert server.ask(f"{ROOT}/topology?by=tier") == (400, {"error": "by: expected one of offset, limit"})
    expected = "no such resource: shufles: expected one of report, memory, topology, queries, shuffles"
    assert server.ask(f"{ROOT}/shufles") == (404, {"error": expected})
    for path in ("", "/"):
        assert server.ask(f"{ROOT}{path}")[1]["enabled"]


@given(
    resource=st.sampled_from(list(RESOURCES)) | st.binary(max_size=40).map(quote_from_bytes),
    arguments=st.lists(
        st.tuples(
            st.sampled_from(ARGUMENTS).map(quote) | st.binary(max_size=10).map(quote_from_bytes),
            st.binary(max_size=60).map(quote_from_bytes)
            | st.text("()[]{}-1,.'ejx ", max_size=60).map(quote)
            | st.integers().map(str),
        ),
        max_size=4,
    ),
)
def test_any_request_is_answered(server: Server, resource: str, arguments: list[tuple[str, str]]) -> None:
    query = "&".join(f"{name}={value}" for name, value in arguments)
    assert_told(*server.ask(f"{ROOT}/{resource.replace('/', '')}?{query}"))


def test_another_method_than_get_is_refused_as_json(server: Server) -> None:
    for path in ("", "/report", "/nothing"):
        assert server.ask(ROOT + path, method="POST", body="x")[0] == 405
