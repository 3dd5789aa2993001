"""Record a trace of a cluster from a client, and write it to a file."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distributed import Client, default_client

from dask_gpurt.client import session
from dask_gpurt.monitor.trace import ProcessTrace, Trace, chrome_trace
from dask_gpurt.observe.recording import RING_EVENTS, Event

#: Seconds between two requests for events.
INTERVAL_S = 0.5
#: Events of all servers in one reply, and the least limit for a single server.
BATCH_EVENTS, LEAST_EVENTS = 20_000, 200
#: The most events of a trace; later ones are only counted.
MAX_EVENTS = 5_000_000


class Collector:
    """Collect a trace in batches while it is recorded, on the event loop of a client.

    ``client``: a client of the cluster.
    """

    def __init__(self, client: Client):
        self._scheduler: Any = client.scheduler
        self._token = uuid.uuid4().hex
        self._ending = asyncio.Event()
        self._collecting: asyncio.Task[None] | None = None
        self._events = 0
        self.trace = Trace()

    async def begin(self) -> None:
        """Start recording on all servers.

        Raises RuntimeError if another trace of the cluster is being recorded.
        """
        began = await self._scheduler.gpurt_trace_begin(token=self._token)
        self.trace.began = began["time"]
        self._collecting = asyncio.create_task(self._collect())

    async def end(self) -> Trace:
        """Stop recording; return the trace."""
        assert self._collecting is not None
        self._ending.set()
        try:
            await self._collecting
        finally:
            await self._scheduler.gpurt_traces_end(token=self._token)
        return self.trace

    async def _collect(self) -> None:
        while not self._ending.is_set():
            if not await self._take():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), INTERVAL_S)
        # This many rounds collect all events recorded up to now; later ones do not matter.
        for _ in range(RING_EVENTS // LEAST_EVENTS):
            if not await self._take():
                return

    async def _take(self) -> bool:
        """Collect the next events of all servers; return whether there are more."""
        limit = max(LEAST_EVENTS, BATCH_EVENTS // max(1, len(self.trace.processes)))
        replies = await self._scheduler.gpurt_traces_take(token=self._token, limit=limit)
        for gone in self.trace.processes.keys() - replies.keys():
            self.trace.unanswered.setdefault(gone, "the worker has left")
        for address, reply in replies.items():
            if "error" in reply:
                self.trace.unanswered[address] = reply["error"]
            else:
                self.trace.unanswered.pop(address, None)
                self._add(self.trace.processes.setdefault(address, ProcessTrace()), reply)
        return any(reply.get("more") for reply in replies.values())

    def _add(self, process: ProcessTrace, reply: dict[str, Any]) -> None:
        process.name, process.process = reply["name"], reply["process"]
        process.threads |= {int(thread): name for thread, name in reply["threads"].items()}
        # Not in seconds since the epoch, of which a float could not tell nanoseconds.
        shift = reply["epoch"] - self.trace.began
        found = (Event(*event) for event in json.loads(reply["events"]))
        events = [event._replace(at=event.at + shift) for event in found]
        process.receive(reply["began"], len(events), reply["taken"], reply["lost"])
        kept = events[: max(0, MAX_EVENTS - self._events)]
        process.events += kept
        self._events += len(kept)
        self.trace.left_out += len(events) - len(kept)


class trace:
    """Record a trace of the cluster while the body runs, and write it to a file for https://ui.perfetto.dev.

    The trace has tasks by thread, the steps of shuffles, spilling and unspilling, waits, decisions and
    faults, of all workers and the scheduler. See ``docs/guides/traces.md``.

    Parameters
    ----------
    path
        The file; gzipped if its name ends in ``.gz``, which Perfetto reads too.
    client
        The client, by default the current one. With an asynchronous client, use ``async with``.

    Raises
    ------
    RuntimeError
        If the runtime is off on the cluster, or another trace of it is being recorded.
    FileNotFoundError, IsADirectoryError
        If the folder of the file does not exist, or the path is a folder.

    Attributes
    ----------
    found
        The trace, after the body has ended.

    Examples
    --------
    >>> with dask_gpurt.trace("trace.json") as trace:  # doctest: +SKIP
    ...     frame.merge(other, on="key").compute()
    >>> trace.found.summary()  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, client: Client | None = None):
        self._path = Path(path)
        self._client = client
        self.found = Trace()

    def __enter__(self) -> Self:
        self._client = self._client or default_client()
        self._client.sync(self.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._client is not None
        self._client.sync(self.__aexit__, kind, error, traceback)

    async def __aenter__(self) -> Self:
        self._client = self._client or default_client()
        _require_folder(self._path)
        # Awaited here, on the client's event loop, where its own methods return awaitables.
        if not (await session.ask_report(self._client, connect=False)).enabled:
            raise RuntimeError(
                "the runtime is off on this cluster, and records nothing: switch it on with "
                "dask_gpurt.enable(client)"
            )
        self._collector = Collector(self._client)
        await self._collector.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.found = await self._collector.end()
        await asyncio.to_thread(write, self.found, self._path)


def _require_folder(path: Path) -> None:
    """Raise an error early, not after the program whose trace would be lost."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} for the trace does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file in it for the trace")


def write(found: Trace, path: Path) -> None:
    """Write a trace in the Trace Event Format."""
    text = json.dumps(chrome_trace(found), allow_nan=False).encode()
    path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)
