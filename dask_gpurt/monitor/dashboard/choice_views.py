"""Draw decisions and their reasons: overlap of compute and communication, and placement of tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from dask.utils import format_bytes

from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.components import MAX_ROWS, TableComponent, short_time
from dask_gpurt.monitor.dashboard.sampler import WorkerSample

#: The counters that the table of overlap shows also where no compute is confined.
SEEN = ("reads.seconds.reading", "reads.seconds.beside", "memory.waits")
NO_OVERLAP = "none yet; overlap is off, as on every worker without a GPU, and no task has read or waited"


class OverlapTable(TableComponent):
    """Show compute beside communication and reads on each worker where there is any."""

    title = "Compute beside communication and reads"
    columns: ClassVar[Mapping[str, str]] = {
        "worker": "Worker", "mode": "Mode", "confined": "Confined", "reading": "Reading",
        "beside": "Reading beside compute", "waits": "Waits for memory",
    }  # fmt: skip
    widths: ClassVar[Mapping[str, int]] = {"mode": 170, "beside": 160, "waits": 130}

    def show(self, collector: Collector) -> None:
        there = [worker for worker in collector.sampler.workers.values() if is_seen(worker)]
        self.put_rows([self._texts(worker) for worker in there[:MAX_ROWS]])
        left = len(there) > MAX_ROWS
        self.say(f"the first {MAX_ROWS} of {len(there)} workers" if left else "" if there else NO_OVERLAP)

    def _texts(self, worker: WorkerSample) -> dict[str, str]:
        counters = worker.counters
        return {
            "worker": worker.name,
            "mode": str(worker.overlap["mode"]),
            "confined": str(counters.get("overlap.confined", 0)),
            "reading": short_time(counters.get("reads.seconds.reading", 0)),
            "beside": short_time(counters.get("reads.seconds.beside", 0)),
            "waits": str(counters.get("memory.waits", 0)),
        }


def is_seen(worker: WorkerSample) -> bool:
    """Return whether a current worker confines compute, or has read beside it or waited for memory."""
    if worker.gone_at is not None or not worker.overlap:
        return False
    return worker.overlap["mode"] != "off" or any(map(worker.counters.get, SEEN))


class DecisionTable(TableComponent):
    """Show the last placement decisions, with the cost terms of the chosen worker and the reason."""

    title = "Placement decisions, the latest on top"
    columns: ClassVar[Mapping[str, str]] = {
        "key": "Task", "worker": "Worker", "why": "Why", "seconds": "Expected", "waiting": "Waiting",
        "moving": "Moving", "running": "Running", "missing": "Missing",
        "candidates": "Compared",
    }  # fmt: skip
    widths: ClassVar[Mapping[str, int]] = {"key": 260, "worker": 110, "why": 220}

    def show(self, collector: Collector) -> None:
        rows = collector.decisions(MAX_ROWS)
        workers = collector.sampler.workers
        self.put_rows([
            {
                **{n: short_time(row[n]) for n in ("seconds", "waiting", "moving", "running")},
                "key": _short(row["key"]), "why": row["why"], "candidates": str(row["candidates"]),
                "worker": workers[row["worker"]].name if row["worker"] in workers else row["worker"],
                "missing": format_bytes(row["missing"]),
            }
            for row in rows
        ])  # fmt: skip
        self.say("" if rows else self._why_none(collector))

    def _why_none(self, collector: Collector) -> str:
        placement = collector.runtime.placement
        if placement is None:
            return "Dask chooses: gpurt.placement.enabled is false"
        return "none yet" if placement.is_choosing else "Dask chooses: workers do not differ enough to matter"


def _short(key: str) -> str:
    """Return a key with its hash shortened, as on Dask's own pages."""
    return re.sub(r"([0-9a-f]{8})[0-9a-f]{24}", r"\1", key)
