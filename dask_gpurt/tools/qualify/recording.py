"""Read what stock Dask records of its own accord: the task stream, and the arrivals of graphs.

The module is also a preload of clients, for programs that make a cluster of their own: what the scheduler
has recorded is taken as a client closes, since the scheduler may be gone after that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client

from dask_gpurt.client.session import is_on_cluster

#: The actions of a task in Dask's performance reports, by their color; other colors are computing.
ACTIONS = {"red": "transfer", "orange": "disk", "gray": "deserialize"}


@dataclass(frozen=True)
class Recording:
    """Hold what was recorded of one cluster."""

    #: Rows of Dask's task stream.
    rows: list[Mapping[str, Any]]
    #: When graphs have arrived at the scheduler, in order; empty if that is unknown.
    graphs: list[float]
    #: The number of task threads.
    threads: int
    #: When recording began and ended, on the scheduler's clock.
    began: float
    ended: float
    #: Whether the runtime was on at the end.
    has_runtime: bool = False


async def begin(client: Client) -> float:
    """Have the scheduler record tasks from now on, as its dashboard does, and return the time."""
    scheduler: Any = client.scheduler
    await scheduler.get_task_stream(count=0)
    return time.time()


async def take(client: Client, began: float) -> Recording:
    """Return what the scheduler has recorded since a time."""
    scheduler: Any = client.scheduler
    events = [event for _, event in await scheduler.events(topic="scheduler") if isinstance(event, dict)]
    arrivals = [event["metrics"] for event in events if "metrics" in event]
    return Recording(
        rows=list(await scheduler.get_task_stream(start=began)),
        graphs=sorted(
            each["start_timestamp_seconds"] for each in arrivals if each["start_timestamp_seconds"] >= began
        ),
        threads=sum((await scheduler.ncores(workers=None)).values()),
        began=began,
        ended=time.time(),
        has_runtime=await is_on_cluster(client),
    )


# ---- clients that a program makes -----------------------------------------------------------------------

#: When each open client of this process began, and what was recorded of clusters, by scheduler.
_OPEN: dict[Client, float] = {}
_TAKEN: dict[str, Recording] = {}


async def dask_setup(client: Client) -> None:
    """Begin to record the cluster of a client."""
    _OPEN[client] = await begin(client)


async def dask_teardown(client: Client) -> None:
    """Take what was recorded while the scheduler is there."""
    if (began := _OPEN.pop(client, None)) is not None:
        scheduler: Any = client.scheduler
        before = _TAKEN.get(scheduler.address)  # of another client of the same scheduler
        began = began if before is None else min(began, before.began)
        _TAKEN[scheduler.address] = await take(client, began)


def taken() -> list[Recording]:
    """Return what has been recorded of the clusters of this process, and end recording."""
    for client in list(_OPEN):
        if client.status == "running" and not client.asynchronous:  # others take theirs as they close
            client.sync(dask_teardown, client)
    found = sorted(_TAKEN.values(), key=lambda each: each.began)
    _OPEN.clear()
    _TAKEN.clear()
    return found


# ---- performance reports --------------------------------------------------------------------------------


def of_report(path: Path) -> Recording:
    """Read the task stream of a performance report of Dask.

    Raises ValueError if there is none in the file.
    """
    text = path.read_text(errors="replace")
    documents = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    streams = (found for each in documents for found in _task_streams(json.loads(each)))
    if not (rows := _rows(next(streams, {}))):
        raise ValueError(f"{path} has no task stream with tasks: is it a performance report of Dask?")
    spans = [span for row in rows for span in row["startstops"]]
    said = re.search(r"Threads: (\d+)", text)
    threads = int(said[1]) if said else len({row["thread"] for row in rows})
    began, ended = min(span["start"] for span in spans), max(span["stop"] for span in spans)
    return Recording(rows, [], threads, began, ended)


def _task_streams(node: Any) -> Iterator[dict[str, list[Any]]]:
    """Find sources of data of Bokeh that have what a task stream has."""
    if isinstance(node, Mapping):
        entries = node.get("entries")
        if isinstance(entries, list) and {"start", "worker_thread"} <= {str(each[0]) for each in entries}:
            yield dict(entries)
    if isinstance(node, (Mapping, list)):
        for each in node.values() if isinstance(node, Mapping) else node:
            yield from _task_streams(each)


def _rows(data: Mapping[str, list[Any]]) -> list[Mapping[str, Any]]:
    """Put rectangles together again: one for each action of a task, in ms, at their centers."""
    columns = (data.get(name, []) for name in ("start", "duration", "key", "color", "worker_thread"))
    tasks: dict[tuple[str, str], dict[str, Any]] = {}
    for center, duration, key, color, thread in zip(*columns, strict=True):
        key = tuple(key) if isinstance(key, list) else key
        task = tasks.setdefault((str(key), thread), {"key": key, "thread": thread, "startstops": []})
        start, stop = (center - duration / 2) / 1e3, (center + duration / 2) / 1e3
        task["startstops"].append({"action": ACTIONS.get(color, "compute"), "start": start, "stop": stop})
    return list(tasks.values())
