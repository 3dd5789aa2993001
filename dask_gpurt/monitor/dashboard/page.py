"""Serve the page of the runtime, and the plain values that it draws in the browser.

All who look at the page share one reply, which is made at most once a second.

Decisions and their figures: ``docs/decisions/monitor.md``.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from distributed.http.utils import RequestHandler

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.http import menu_of
from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.sampler import ALL, SPILLED, UNSPILLED, WorkerSample
from dask_gpurt.observe import MethodChoice
from dask_gpurt.observe.metrics import SHOWN

#: The path of the page, and those of its parts alone, which Dask's JupyterLab extension lists.
PAGE = "gpurt"
PARTS = tuple(
    f"/individual-gpurt-{name}" for name in ("state", "queries", "shuffles", "memory", "spilling", "workers")
)
#: The most rows of a table, and the most workers with a row each: the fullest ones.
MAX_ROWS, MAX_WORKERS = 50, 32
#: The least seconds between two replies, and the most of a core that making them may take.
INTERVAL_S, MAX_SHARE = 1.0, 0.01

#: The collector of each scheduler whose runtime is on.
collectors: WeakKeyDictionary[Any, Collector] = WeakKeyDictionary()
#: The last reply of each collector by worker, with the time until which it serves.
_replies: WeakKeyDictionary[Collector, dict[str, tuple[float, str]]] = WeakKeyDictionary()


def drawn(collector: Collector, worker: str = ALL) -> dict[str, Any]:
    """Return what the page draws.

    ``worker``: the address of the worker whose tiers are drawn over time.
    """
    return {
        "at": time.time(),
        "state": _state(collector),
        "queries": collector.runtime.computations.rows(MAX_ROWS)[::-1],
        "shuffles": collector.sampler.shuffles.rows(time.time(), MAX_ROWS),
        **_over_time(collector, worker),
        "workers": _workers(collector),
    }


def _state(collector: Collector) -> dict[str, Any]:
    """Say for whom the runtime is on, what it left to Dask, and what fell back."""
    clients, known = collector.runtime.clients, collector.runtime.reports.known()
    counted = ((choice, choice.counted(known["counters"])) for choice in MethodChoice)
    shuffles = [(choice.taken, choice.text, count) for choice, count in counted if count]
    processes = [known, *known["workers"].values()]
    return {
        "version": __version__,
        "workers": len(known["workers"]),
        "departed": len(known["departed"]),
        "clients": clients.planned(),
        "unplanned": clients.unplanned,
        "taken": sum(count for taken, _, count in shuffles if taken),
        "left": [[text, count] for taken, text, count in shuffles if not taken],
        "fallbacks": _sum(one["fallbacks"] for one in processes),
    }


def _sum(counted: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum the fallbacks of several processes, each with the reason of the last process that has it."""
    together: dict[str, dict[str, Any]] = {}
    for fallbacks in counted:
        for id, known in fallbacks.items():
            before = together.get(id, {"count": 0})["count"]
            together[id] = {**known, "count": before + known["count"]}
    return list(together.values())


def _over_time(collector: Collector, worker: str) -> dict[str, Any]:
    """Return the bytes in tiers, and the rates of moves between them, of one worker or of all."""
    sampler = collector.sampler
    series = {tier: _whole(sampler.used.values((worker, tier))) for tier in SHOWN}
    moves = {way: _whole(sampler.rates.values((worker, way))) for way in (SPILLED, UNSPILLED)}
    return {
        "memory": {
            "times": sampler.used.times,
            "series": {tier: values for tier, values in series.items() if any(v is not None for v in values)},
            "limits": {tier: sampler.capacity(tier, worker) for tier in SHOWN},
        },
        "spilling": {
            "times": sampler.rates.times,
            "series": moves,
            "totals": {way: int(sampler.moved(way, worker)) for way in moves},
        },
    }


def _whole(values: list[float]) -> list[int | None]:
    return [None if math.isnan(value) else int(value) for value in values]


def _workers(collector: Collector) -> dict[str, Any]:
    """Return how full the tiers of the fullest workers are, and the names of all."""
    workers = collector.sampler.workers
    named = labels(workers)
    fullest = sorted(workers, key=lambda address: -_fullness(workers[address]))[:MAX_WORKERS]
    return {
        "named": named,
        "rows": [[named[address], workers[address].levels] for address in fullest],
    }


def _fullness(worker: WorkerSample) -> float:
    """Return the fraction used of a worker's fullest tier."""
    return max((level.used / max(1, level.capacity) for level in worker.levels.values()), default=0.0)


def labels(workers: Mapping[str, WorkerSample]) -> dict[str, str]:
    """Return a unique label for each worker, by address."""
    count = Counter(worker.name for worker in workers.values())
    return {
        address: worker.name if count[worker.name] == 1 else f"{worker.name} {address.rpartition('/')[2]}"
        for address, worker in workers.items()
    }


def reply(collector: Collector, worker: str) -> str:
    """Return what the page draws as JSON, the last one if it is too early for another.

    ``worker``: an address, or :data:`~dask_gpurt.monitor.dashboard.sampler.ALL`, also for unknown ones.
    """
    if worker not in collector.sampler.workers:
        worker = ALL
    known = _replies.setdefault(collector, {})
    until, text = known.get(worker, (0.0, ""))
    if time.monotonic() >= until:
        began = time.thread_time()
        text = json.dumps(drawn(collector, worker), allow_nan=False)
        took = time.thread_time() - began
        for other in [each for each, (ends, _) in known.items() if ends < time.monotonic() - 60]:
            del known[other]
        known[worker] = (time.monotonic() + max(INTERVAL_S / 2, took / MAX_SHARE), text)
    return text


class DataHandler(RequestHandler):
    """Serve what the page draws."""

    def get(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        if (collector := collectors.get(self.server)) is None:
            self.set_status(HTTPStatus.SERVICE_UNAVAILABLE)
            self.write({"error": "the runtime is off: dask_gpurt.enable(client)"})
        else:
            self.write(reply(collector, self.get_query_argument("worker", ALL)))


class PageHandler(RequestHandler):
    """Serve the page; it is the same for all of its parts, and while the runtime is off."""

    def get(self) -> None:
        text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        try:
            menu = menu_of(self.server)
        except ImportError:  # without bokeh Dask has no other pages
            menu = [PAGE]
        links = (f'<a href="{html.escape(page)}">{html.escape(page.title())}</a>' for page in menu)
        self.write(text.replace("{{menu}}", "\n".join(links)))


#: The routes, in the format of Dask's own HTTP modules such as ``distributed.http.health``.
routes: list[tuple[str, type[RequestHandler], dict[str, Any]]] = [
    (f"/{PAGE}/data", DataHandler, {}),
    *((path, PageHandler, {}) for path in (f"/{PAGE}", *PARTS)),
]
