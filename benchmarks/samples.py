"""Where the threads of the workers are, sampled while something is timed."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

from distributed import Client, Worker, WorkerPlugin

INTERVAL = 0.005
#: What a thread that has nothing to do is in.
IDLE = ("_worker (thread.py", "select (selectors.py", "worker (_concurrent_futures_thread.py")
#: How many frames of the package are named.
DEPTH = 3


class Samples(WorkerPlugin):
    """Count the places of each kind of thread, the innermost frame and the nearest ones of this package."""

    name = "samples"

    def setup(self, worker: Worker) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.stopped = threading.Event()
        threading.Thread(target=self._sample, name=self.name, daemon=True).start()

    def teardown(self, worker: Worker) -> None:
        self.stopped.set()

    def take(self) -> Counter[tuple[str, str]]:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def _sample(self) -> None:
        me = threading.get_ident()
        while not self.stopped.wait(INTERVAL):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            self.counts["", "all"] += 1
            for ident, frame in sys._current_frames().items():
                name = names.get(ident, "")
                if ident != me and name != "peak-memory":
                    self.counts[_kind(name), _place(frame)] += 1


def _kind(name: str) -> str:
    return name.partition("_")[0].rstrip("0123456789-") or "?"


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


def take_samples(client: Client) -> list[dict[str, Any]]:
    """Return the busiest places of all workers since the last call: the thread, the place, the share of time.

    A share is of one thread and one worker: 2.0 of a pool is two threads all the time.
    """
    taken = client.run(lambda dask_worker: dask_worker.plugins[Samples.name].take())
    counts = sum(taken.values(), Counter())
    total = max(1, counts.pop(("", "all"), 1))
    busy = [(at, n) for at, n in counts.most_common() if not at[1].startswith(IDLE)]
    return [{"thread": thread, "place": place, "share": n / total} for (thread, place), n in busy[:40]]
