"""Sample the stacks of the workers' threads."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

from dask.utils import key_split
from distributed import Client, Worker, WorkerPlugin

INTERVAL = 0.005
#: Seconds without a sample that count as a gap: another thread held the GIL.
GAP = 0.03
#: Innermost functions of idle threads.
IDLE = ("_worker (thread.py", "select (selectors.py", "_watch (profile.py", "_recv (connection.py")
#: Number of frames of the package to name.
DEPTH = 3


class Samples(WorkerPlugin):
    """Count where each kind of thread is: its innermost frame, and the nearest frames of this package."""

    name = "samples"

    def setup(self, worker: Worker) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.gaps: list[dict[str, Any]] = []
        self.stopped = threading.Event()
        threading.Thread(target=self._sample, name=self.name, daemon=True).start()

    def teardown(self, worker: Worker) -> None:
        self.stopped.set()

    def take(self) -> tuple[Counter[tuple[str, str]], list[dict[str, Any]]]:
        """Return the counts and the gaps since the last call."""
        counts, self.counts = self.counts, Counter()
        gaps, self.gaps = self.gaps, []
        return counts, gaps

    def _sample(self) -> None:
        me, before = threading.get_ident(), time.perf_counter()
        while not self.stopped.wait(INTERVAL):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            places = [
                (_kind(names.get(ident, "")), _place(frame))
                for ident, frame in sys._current_frames().items()
                if ident != me
            ]
            self.counts.update(places)
            self.counts["", "all"] += 1
            before, seconds = time.perf_counter(), time.perf_counter() - before
            if seconds > GAP:
                self.gaps.append({"seconds": seconds, "places": [at for at in places if _busy(at)]})


def _kind(name: str) -> str:
    return name.partition("_")[0].strip("0123456789-") or "?"


def _busy(at: tuple[str, str]) -> bool:
    return not at[1].startswith(IDLE)


def _place(frame: FrameType) -> str:
    place = [_named(frame)]
    at: FrameType | None = frame.f_back
    while at is not None and len(place) <= DEPTH:
        if "dask_gpurt" in at.f_code.co_filename:
            place.append(_named(at))
        at = at.f_back
    return " < ".join(place)


def _named(frame: FrameType) -> str:
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


def take_samples(client: Client) -> dict[str, Any]:
    """Return the busiest places of all workers since the last call, and the longest gaps between samples.

    The ``share`` of a place is the mean number of threads there per worker: 2.0 means two threads of a pool
    all the time. ``gaps`` are the longest times for which the sampler could not take the GIL, with the places
    of the threads right afterwards.
    """
    taken = client.run(lambda dask_worker: dask_worker.plugins[Samples.name].take()).values()
    counts = sum((counts for counts, _ in taken), Counter())
    total = max(1, counts.pop(("", "all"), 1))
    busy = [(at, n) for at, n in counts.most_common() if _busy(at)]
    gaps = sorted((gap for _, gaps in taken for gap in gaps), key=lambda gap: -gap["seconds"])
    return {
        "places": [{"thread": kind, "place": place, "share": n / total} for (kind, place), n in busy[:40]],
        "gaps": gaps[:6],
    }


def take_tasks(client: Client, since: float) -> list[dict[str, Any]]:
    """Return count, total seconds, first start and last stop of each kind of step, relative to ``since``."""
    found: dict[str, dict[str, Any]] = {}
    for task in client.get_task_stream(start=since):
        for step in task["startstops"]:
            name = f"{key_split(task['key'])}, {step['action']}"
            start, stop = step["start"] - since, step["stop"] - since
            one = found.setdefault(
                name, {"step": name, "count": 0, "seconds": 0.0, "first": start, "last": stop}
            )
            one["count"] += 1
            one["seconds"] += stop - start
            one["first"], one["last"] = min(one["first"], start), max(one["last"], stop)
    return sorted(found.values(), key=lambda one: float(one["first"]))
