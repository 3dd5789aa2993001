"""Measure the cost of the dashboard for the scheduler, with simulated workers.

    python -m benchmarks.observe.dashboard --workers 2,64,256 --json dashboard.json

Before each sample each worker reports new figures for full tiers, 20 task prefixes and 8 runs; the histories
are full, 100 shuffles are known, and each worker has sent bytes to every worker. It prints the CPU time in
milliseconds of a sample, of a reply to those who look at the page, of unpacking the addition to a heartbeat,
and of a thousand task transitions; and the shares of a core at their intervals.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from distributed.protocol.core import dumps, loads

from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from dask_gpurt.memory.ledger import PARTITIONS, SHARDS, Label, Ledger, Tier
from dask_gpurt.monitor.dashboard.collector import MAX_SHARE, SAMPLE_INTERVAL_S, Collector
from dask_gpurt.monitor.dashboard.page import INTERVAL_S, drawn
from dask_gpurt.monitor.dashboard.page import MAX_SHARE as PAGE_SHARE
from dask_gpurt.monitor.dashboard.sampler import MAX_POINTS
from dask_gpurt.monitor.dashboard.shuffles import MAX_SHUFFLES
from dask_gpurt.observe.metrics import METRICS, combine
from dask_gpurt.observe.progress import MAX_RUNS, Figures
from dask_gpurt.protocol import HEARTBEAT_METRIC

PER_HOST, CAPACITY, PREFIXES = 8, 80 << 30, 20
#: The counters of a worker.
COUNTERS = {metric.name: 1.0 for metric in METRICS.values() if not metric.labels}
#: Timed transitions of tasks that the dashboard does not show.
TRANSITIONS = 100_000


class Reports:
    """Feed a collector with the reports of simulated workers.

    Attributes
    ----------
    collector
        Receives the reports.
    """

    def __init__(self, workers: int):
        self._rng = np.random.default_rng(0)
        addresses = [f"tcp://10.0.0.{n // PER_HOST}:{4000 + n}" for n in range(workers)]
        self._ledgers = {address: Ledger(dict.fromkeys(Tier, CAPACITY)) for address in addresses}
        self._states = {address: SimpleNamespace(name=n, metrics={}) for n, address in enumerate(addresses)}
        self._round = 0
        self.runtime: Any = SimpleNamespace(
            beats=lambda: {each: state.metrics[HEARTBEAT_METRIC] for each, state in self._states.items()},
            scheduler=SimpleNamespace(workers=self._states, tasks={}),
            clients=SimpleNamespace(planned=lambda: 1, unplanned=[]),
            computations=SimpleNamespace(rows=lambda most: [], purpose=lambda outputs, label: label),
            reports=SimpleNamespace(known=self.known),
        )
        self.collector = Collector(self.runtime)
        for number in range(MAX_SHUFFLES):
            inputs, outputs = ([f"{kind}-{number}-{n}" for n in range(workers)] for kind in ("in", "out"))
            shuffle = f"{number:032}"
            self.collector.sampler.shuffles.begins(shuffle, number, 0.0, inputs, f"barrier-{number}", outputs)

    def known(self) -> Mapping[str, Any]:
        """Return the counters of the cluster, which are summed for each reply."""
        workers = {worker: {"counters": COUNTERS, "fallbacks": {}} for worker in self._states}
        counters = combine([COUNTERS] * len(workers))
        return {"workers": workers, "departed": [], "counters": counters, "fallbacks": {}}

    def report(self) -> None:
        """Report new figures for each worker."""
        self._round += 1
        for number, (address, ledger) in enumerate(self._ledgers.items()):
            for tier in Tier:
                ledger.set(tier, SHARDS, int(self._rng.integers(CAPACITY // 2)))
                for prefix in range(PREFIXES):
                    ledger.add(tier, Label(PARTITIONS, f"prefix-{prefix}"), 1)
            beat = {**self.progress(number), "memory": ledger.snapshot()}
            self._states[address].metrics[HEARTBEAT_METRIC] = beat

    def progress(self, worker: int) -> Mapping[str, Any]:
        """Return a worker's report on its runs."""
        n = self._round
        figures = vars(Figures(n, n, n, 0.1, 0.2, 0.3, 2, 10, worker, 6))
        latest = range(MAX_SHUFFLES - MAX_RUNS, MAX_SHUFFLES)
        return {
            "runs": [[f"{number:032}", number, figures] for number in latest],
            "counters": {
                "memory.spill.bytes.device.pinned": n << 30,
                "memory.spill.bytes.pinned.device": n << 29,
            },
        }


def measure(workers: int, repeat: int) -> dict[str, Any]:
    """Return milliseconds of CPU time with ``workers`` workers."""
    reports = Reports(workers)
    collector = reports.collector
    found: dict[str, list[float]] = {"sample": [], "page": []}
    reports.report()
    for at in range(MAX_POINTS + 1):
        collector.sample(float(at))
    for at in range(repeat + 1):  # the first round creates state and is discarded
        reports.report()
        began = time.thread_time()
        collector.sample(float(MAX_POINTS + 1 + at))
        found["sample"].append(time.thread_time() - began)
        began = time.thread_time()
        size = len(json.dumps(drawn(collector), allow_nan=False))
        found["page"].append(time.thread_time() - began)
    return {
        "workers": workers,
        "page_bytes": size,
        **{name: 1e3 * median(seconds[1:]) for name, seconds in found.items()},
        "heartbeat": _heartbeat(reports.progress(0)),
        "transition": _transition(collector),
    }


def _heartbeat(report: Mapping[str, Any]) -> float:
    """Return the milliseconds that a report adds to unpacking a heartbeat."""
    frames = dumps(report)
    began = time.thread_time()
    for _ in range(1000):
        loads(frames)
    return time.thread_time() - began


def _transition(collector: Collector) -> float:
    """Return the milliseconds for a thousand transitions of other tasks."""
    began = time.thread_time()
    for number in range(TRANSITIONS):
        collector.transition(("other", number), "processing", "memory")
    return 1e6 * (time.thread_time() - began) / TRANSITIONS


def shares(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of a core of samples, of an open page, and of heartbeats.

    Dask limits heartbeats to two per second and worker, and to 200 per second in total.
    """
    pause = max(SAMPLE_INTERVAL_S, row["sample"] / 1e3 / MAX_SHARE)
    heartbeats = min(2 * row["workers"], 200)
    return {
        "heartbeats": heartbeats * row["heartbeat"] / 1e3,
        "sampling": row["sample"] / 1e3 / pause,
        "share_page": row["page"] / 1e3 / max(INTERVAL_S, row["page"] / 1e3 / PAGE_SHARE),
    }


@click.command(help=__doc__.partition("\n")[0])
@click.option("--workers", default="2,64,256", show_default=True, help="Numbers of workers.")
@click.option("--repeat", type=click.IntRange(min=1), default=21, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(workers: str, repeat: int, output: Path | None) -> None:
    rows = []
    for number in map(int, workers.split(",")):
        row = measure(number, repeat)
        rows.append({**row, **shares(row)})
        click.echo(f"{number} workers, milliseconds of processor time:")
        for name, value in rows[-1].items():
            if name not in ("workers", "page_bytes", "sampling", "share_page", "heartbeats"):
                click.echo(f"  {name:36}{value:8.3f}")
        told = (f"{name} {rows[-1][name]:.2%}" for name in ("sampling", "heartbeats", "share_page"))
        click.echo(f"  of a core: {', '.join(told)}")
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"repeat": repeat},
        "load": os.getloadavg()[0],
        **environment(),
        "rows": rows,
    }
    write(results, output)


if __name__ == "__main__":
    main()
