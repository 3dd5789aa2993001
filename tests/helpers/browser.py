"""Drive a headless Chromium by the DevTools protocol over a websocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

from tests.helpers.in_process import until
from tests.helpers.waiting import LIMIT_S

#: Path of the program, or None if it is not installed.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "there is no chromium on the path: apt-get install chromium"
#: Console messages that report a fault.
WRONG = ("error", "assert")


class Page:
    """Drive an open page.

    ``errors``: errors and exceptions in its console, and requests that failed.
    """

    def __init__(self, connection: Any):
        self._connection = connection
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while (text := await self._connection.read_message()) is not None:
            message = json.loads(text)
            if (answer := self._answers.pop(message.get("id"), None)) is not None:
                answer.set_result(message)
            else:
                self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if told["type"] in WRONG:
                self.errors.append(json.dumps(told["args"])[:2000])
            case "Log.entryAdded" if told["entry"]["level"] in WRONG:
                self.errors.append(json.dumps(told["entry"])[:2000])

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        id_ = next(self._ids)
        self._answers[id_] = answer = asyncio.get_running_loop().create_future()
        await self._connection.write_message(json.dumps({"id": id_, "method": method, "params": params}))
        reply = await asyncio.wait_for(answer, LIMIT_S)
        assert "error" not in reply, reply
        return reply["result"]

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def holds(self, expression: str) -> None:
        """Wait until an expression in the page is true."""
        for _ in range(round(LIMIT_S / 0.05)):
            if await self.value(expression) is True:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{expression} never held; the console has {self.errors}")

    async def screenshot(self, path: Path) -> None:
        """Write a PNG file of the page."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Close the connection to the page."""
        self._reading.cancel()
        self._connection.close()


@contextlib.asynccontextmanager
async def browser(profile: Path, width: int = 1400, height: int = 1000) -> AsyncIterator[Any]:
    """Run a browser; yields a coroutine function that opens the page at an address."""
    assert CHROMIUM is not None, MISSING
    # The sandbox does not work as root or in containers; we open our own pages only.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *options,
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
        "about:blank",
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    pages: list[Page] = []
    try:
        port = profile / "DevToolsActivePort"
        await until(lambda: port.exists() and "\n" in port.read_text())
        host = f"127.0.0.1:{port.read_text().splitlines()[0]}"

        async def visit(url: str) -> Page:
            request = HTTPRequest(f"http://{host}/json/new?about:blank", method="PUT", body=b"")
            target = json.loads((await AsyncHTTPClient().fetch(request)).body)
            address = urlparse(target["webSocketDebuggerUrl"])._replace(netloc=host).geturl()
            page = Page(await websocket_connect(address, max_message_size=1 << 28))
            pages.append(page)
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await page.call("Emulation.setDeviceMetricsOverride", **size)
            await page.call("Page.navigate", url=url)
            return page

        yield visit
    finally:
        for page in pages:
            page.close()
        process.terminate()
        await process.wait()
