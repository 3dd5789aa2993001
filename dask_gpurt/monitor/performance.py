"""Render a performance report: Dask's own page, and a second part about the runtime."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from dask.utils import format_bytes, format_time

from dask_gpurt.monitor.chrome_trace import chrome_trace
from dask_gpurt.monitor.trace import Trace
from dask_gpurt.observe.metrics import METRICS, Kind, Unit, UnknownMetricError, find
from dask_gpurt.observe.recording import Kind as EventKind
from dask_gpurt.observe.report import RuntimeReport, shown_name
from dask_gpurt.observe.shown_tiers import shown_columns

#: Maximum size of a compressed trace that is embedded in the page.
MAX_TRACE_BYTES = 50_000_000
#: Maximum number of faults and fallbacks listed; the rest are only counted.
MAX_LISTED = 200


@dataclass(frozen=True)
class Observed:
    """Hold observations of the runtime during a program.

    Parameters
    ----------
    before, after
        The reports of the cluster at the begin and the end.
    memory
        A row for each worker and tier at the end, as returned by :func:`dask_gpurt.memory_usage`.
    """

    trace: Trace
    before: RuntimeReport
    after: RuntimeReport
    memory: Sequence[Mapping[str, Any]]


class PageTable(NamedTuple):
    """Hold a table of the page.

    Attributes
    ----------
    texts
        How many of the first columns are texts; the others are numbers, and aligned to the right.
    """

    heading: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int


def page(dask_report: str, observed: Observed | None) -> str:
    """Return the page.

    Parameters
    ----------
    dask_report
        Dask's own page, which is embedded unchanged.
    observed
        None if the runtime is off.
    """
    text = Path(__file__).with_name("performance.html").read_text()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
    return template.render(
        dask_report=dask_report,
        tables=[] if observed is None else tables(observed),
        lacks=[] if observed is None else lacks(observed.trace),
        trace=None if observed is None else _download(observed.trace),
        on=observed is not None,
    )


def tables(observed: Observed) -> list[PageTable]:
    """Return the tables about the runtime, with cells as text."""
    return [
        _steps(observed.trace),
        _workers(observed.trace),
        _transfers(observed.trace),
        _memory(observed.memory),
        _counters(observed.before, observed.after),
        _faults(observed.trace),
    ]


def lacks(trace: Trace) -> list[str]:
    """Return a sentence for each thing that is missing from a trace."""
    found = [f"{address} did not answer: {reason}" for address, reason in trace.unanswered.items()]
    if trace.lost:
        found.append(f"{trace.lost:,} events were lost, so the figures of steps are too small")
    unknown = [a for a, process in trace.processes.items() if process.clock is None and a != "scheduler"]
    if unknown:
        found.append(f"the clocks of {', '.join(sorted(unknown))} are not known, and were not aligned")
    return found


def _steps(trace: Trace) -> PageTable:
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    nbytes: Counter[str] = Counter()
    longest: defaultdict[str, float] = defaultdict(float)
    for row in trace.summary():
        counts[row.step] += row.times
        seconds[row.step] += row.seconds
        nbytes[row.step] += row.nbytes
        longest[row.step] = max(longest[row.step], row.longest)
    rows = [
        (
            step,
            f"{counts[step]:,}",
            _seconds(seconds[step]),
            _seconds(longest[step]),
            _bytes(nbytes[step]),
        )
        for step in sorted(counts, key=lambda step: -seconds[step])
    ]
    return PageTable(
        "Steps",
        "Tasks by prefix, and the steps of the runtime within and beside them, summed over all workers.",
        ("step", "times", "seconds", "longest", "bytes"),
        rows,
        texts=1,
    )


def _workers(trace: Trace) -> PageTable:
    rows = [
        (row.process, row.step, f"{row.times:,}", _seconds(row.seconds), _seconds(row.longest))
        for row in sorted(trace.summary(), key=lambda row: (row.process, -row.seconds))
    ]
    return PageTable("Steps by worker", "", ("worker", "step", "times", "seconds", "longest"), rows, texts=2)


def _transfers(trace: Trace) -> PageTable:
    offered: Counter[tuple[str, str]] = Counter()
    shards: Counter[tuple[str, str]] = Counter()
    copied: Counter[tuple[str, str]] = Counter()
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for address, process in trace.processes.items():
        for event in process.events:
            if event.kind == EventKind.SENT:
                shards[address, event.args["owner"]] += 1
                offered[address, event.args["owner"]] += event.args["bytes"]
            elif event.step == "pull":
                copied[event.args["producer"], address] += event.args["bytes"]
                seconds[event.args["producer"], address] += event.seconds
    rows = [
        (
            *pair,
            f"{shards[pair]:,}",
            _bytes(offered[pair]),
            _bytes(copied[pair]),
            _seconds(seconds[pair]),
        )
        for pair in sorted(shards.keys() | copied.keys())
    ]
    return PageTable(
        "Transfers",
        "Shards offered to the owners of their outputs, and the bytes that the owners copied. The rest is "
        "read in place, in memory that two workers share.",
        ("from", "to", "shards", "bytes", "copied", "seconds of threads"),
        rows,
        texts=2,
    )


def _memory(memory: Sequence[Mapping[str, Any]]) -> PageTable:
    columns = shown_columns(memory, list(memory[0]) if memory else [])
    kinds = [name for name in columns if name not in ("worker", "tier")]
    rows = [(str(row["worker"]), str(row["tier"]), *(_bytes(row[kind]) for kind in kinds)) for row in memory]
    return PageTable(
        "Memory", "The contents of the tiers at the end.", ("worker", "tier", *kinds), rows, texts=2
    )


def _counters(before: RuntimeReport, after: RuntimeReport) -> PageTable:
    rows = []
    for name, value in sorted(after.counters.items()):
        unit, counts = _declared(name)
        grown = value - before.counters.get(name, 0) if counts else value
        if grown:
            rows.append(
                (shown_name(name, after.devices), _readable(grown, unit), "grew" if counts else "most so far")
            )
    return PageTable(
        "Counters",
        "The growth of counters; the largest value of gauges since the runtime was switched on.",
        ("metric", "value", ""),
        rows,
        texts=1,
    )


def _faults(trace: Trace) -> PageTable:
    rows = []
    for address, process in trace.processes.items():
        for event in process.events:
            if event.kind == EventKind.MARK and (event.step == "fallback" or event.step in METRICS):
                said = ", ".join(f"{name}: {value}" for name, value in event.args.items())
                rows.append((event.at, address, event.step, said))
    listed = [tuple(row[1:]) for row in sorted(rows)[:MAX_LISTED]]
    rest = f" The first {MAX_LISTED} of {len(rows):,}." if len(rows) > MAX_LISTED else ""
    return PageTable(
        "Faults and fallbacks",
        f"Losses, retries, and operations left to Dask.{rest}",
        ("where", "what", "why"),
        listed,
        texts=3,
    )


def _declared(name: str) -> tuple[Unit, bool]:
    """Return the unit of a metric, and whether it is a counter."""
    try:
        metric = find(name)
    except UnknownMetricError:  # from a worker with another version
        return Unit.NUMBER, True
    return metric.unit, metric.kind is Kind.COUNTER


def _readable(value: float, unit: Unit) -> str:
    match unit:
        case Unit.BYTES:
            return _bytes(value)
        case Unit.SECONDS:
            return format_time(value)
        case _:
            return f"{value:,.0f}"


def _bytes(nbytes: float) -> str:
    return format_bytes(int(nbytes)) if nbytes else ""


def _seconds(seconds: float) -> str:
    return format_time(seconds) if seconds else ""


def _download(trace: Trace) -> str | None:
    """Return the trace as a data link, or None if it is too large."""
    text = json.dumps(chrome_trace(trace), allow_nan=False).encode()
    packed = gzip.compress(text, 6)
    if len(packed) > MAX_TRACE_BYTES:
        return None
    return f"data:application/gzip;base64,{base64.b64encode(packed).decode()}"
