"""Hold the trace of a cluster: the recordings of all processes, by the clocks of their hosts."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dask.utils import key_split

from dask_gpurt.observe.recording import TASK, Event, Kind

#: The name of the scheduler among the processes.
SCHEDULER = "scheduler"


@dataclass(repr=False)
class ProcessTrace:
    """Hold the recording of one server.

    ``events``: with times in seconds since the begin of the trace.
    ``lost``: events that were overwritten before they were taken, or were taken but did not arrive.
    """

    name: str = ""
    process: int = 0
    events: list[Event] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    lost: int = 0
    #: The current recording, the events of it that have arrived, and the events lost in earlier recordings.
    _recording: float = 0.0
    _received: int = 0
    _lost_before: int = 0

    def receive(self, recording: float, arrived: int, taken: int, lost: int) -> None:
        """Count arrived events, to determine how many were lost.

        ``recording``: the begin of the recording, which identifies it: a worker restarted at its address has
        another.
        ``taken``, ``lost``: numbers of events of the recording that were taken so far, and that were
        overwritten.
        """
        if recording != self._recording:
            self._recording, self._received, self._lost_before = recording, 0, self.lost
        self._received += arrived
        self.lost = self._lost_before + lost + taken - self._received

    def __repr__(self) -> str:
        return f"<ProcessTrace of {self.name or 'a process'}: {_events(len(self.events), self.lost)}>"


class StepSummary(NamedTuple):
    """Summarise a step of one process.

    ``process``: its address, or "scheduler".
    ``step``: the name of the step; for tasks their prefix.
    ``seconds``, ``longest``: total duration, and the longest single duration.
    ``nbytes``: bytes moved, if known.
    """

    process: str
    step: str
    times: int
    seconds: float
    longest: float
    nbytes: int


@dataclass(repr=False)
class Trace:
    """Hold the trace of a cluster.

    ``began``: begin of the trace, in seconds since the epoch.
    ``processes``: by address; the scheduler's key is :data:`SCHEDULER`.
    ``unanswered``: workers that did not answer, or left before their last events were collected, with the
    reason.
    ``left_out``: events dropped because the trace had reached its limit.
    """

    began: float = 0.0
    processes: dict[str, ProcessTrace] = field(default_factory=dict)
    unanswered: dict[str, str] = field(default_factory=dict)
    left_out: int = 0

    def __repr__(self) -> str:
        events = sum(len(process.events) for process in self.processes.values())
        return f"<Trace of {len(self.processes)} processes: {_events(events, self.lost)}>"

    @property
    def lost(self) -> int:
        """Return the number of recorded events that are missing from the trace."""
        return self.left_out + sum(process.lost for process in self.processes.values())

    def lacks(self) -> list[str]:
        """Return a sentence for each thing that is missing."""
        found = [f"{address} did not answer: {reason}" for address, reason in self.unanswered.items()]
        if self.lost:
            found.append(f"{self.lost:,} events were lost, so the figures of steps are too small")
        return found

    def summary(self) -> list[StepSummary]:
        """Return each step of each process, the longest total duration first."""
        found: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for address, process in self.processes.items():
            for event in process.events:
                if event.kind in (Kind.SPAN, Kind.WAIT, Kind.MARK):
                    found[address, title(event)].append(event)
        rows = [
            StepSummary(
                address,
                step,
                len(events),
                sum(event.seconds for event in events),
                max(event.seconds for event in events),
                sum(event.args.get("bytes", 0) for event in events),
            )
            for (address, step), events in found.items()
        ]
        return sorted(rows, key=lambda row: (-row.seconds, -row.times, row.process, row.step))


def _events(count: int, lost: int) -> str:
    return f"{count:,} events{f', {lost:,} lost' if lost else ''}"


def title(event: Event) -> str:
    """Return the display name of an event; for tasks the prefix."""
    return key_split(event.task) if event.step == TASK else event.step


def plain(process: ProcessTrace) -> dict[str, Any]:
    """Return the metadata of a process, without its events, as JSON-serialisable values."""
    return {
        "name": process.name,
        "process": process.process,
        "events": len(process.events),
        "lost events": process.lost,
    }


# ---- the Trace Event Format --------------------------------------------------------------------------
#
# The format is specified in
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each server is a process
# with a track for each of its threads. Perfetto's requirement holds: slices of a track are nested.
#
# Steps are timed on their thread. Tasks are timed by Dask, from their submission to a thread, so a step may
# extend beyond its task by the delay until the thread starts; the task is then widened. Coroutine tasks,
# and copies that were started together, may overlap on one thread, which then gets several tracks.


#: Track numbers reserved for each process.
TRACKS_PER_PROCESS = 1000


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return a trace as JSON-serialisable values, with times in microseconds since its first event.

    ``otherData`` reports what is missing from the trace: lost events, and workers that did not answer.
    """
    first = min((event.at for process in trace.processes.values() for event in process.events), default=0.0)
    written: list[dict[str, Any]] = []
    ordered = sorted(trace.processes.items(), key=lambda item: (item[0] != SCHEDULER, item[0]))
    for number, (address, process) in enumerate(ordered, start=1):
        written += _Process(number, address, process, first).written()
    written.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    return {
        "traceEvents": written,
        "displayTimeUnit": "ms",
        "otherData": {
            "written by": "dask-gpurt",
            "time of the first event": trace.began + first,
            "lost events": trace.lost,
            "workers that did not answer": dict(trace.unanswered),
            "processes": {address: plain(process) for address, process in ordered},
        },
    }


@dataclass(eq=False)
class _Slice:
    """Hold a slice of a track, in integer nanoseconds."""

    event: Event
    begin: int
    end: int
    track: int = 0


class _Process:
    """Convert the events of one server."""

    def __init__(self, number: int, address: str, process: ProcessTrace, first: float):
        self._number = number
        self._address = address
        self._process = process
        self._first = first
        self._tracks: dict[tuple[int, int], int] = {}

    def written(self) -> Iterator[dict[str, Any]]:
        by_thread: defaultdict[int, list[Event]] = defaultdict(list)
        for event in self._process.events:
            by_thread[event.thread].append(event)
        for thread, events in by_thread.items():
            yield from self._thread(thread, events)
        for which, event in enumerate(
            e for events in by_thread.values() for e in events if e.kind == Kind.WAIT
        ):
            yield from self._wait(event, str(which))
        yield from self._names()

    def _names(self) -> Iterator[dict[str, Any]]:
        name = self._process.name
        label = self._address if name in ("", self._address) else f"{name} ({self._address})"
        yield self._metadata("process_name", 0, name=label if self._address != SCHEDULER else SCHEDULER)
        yield self._metadata("process_sort_index", 0, sort_index=self._number)
        for (thread, lane), track in self._tracks.items():
            named = self._process.threads.get(thread, f"thread {thread}")
            yield self._metadata("thread_name", track, name=f"{named} ({lane + 1})" if lane else named)
            yield self._metadata("thread_sort_index", track, sort_index=track)

    def _metadata(self, what: str, track: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._number, "tid": track, "args": args}

    def _track(self, thread: int, lane: int) -> int:
        new = self._number * TRACKS_PER_PROCESS + len(self._tracks) + 1
        return self._tracks.setdefault((thread, lane), new)

    def _nanoseconds(self, at: float) -> int:
        return max(0, math.floor((at - self._first) * 1e9))

    # ---- events of a thread ------------------------------------------------------------

    def _thread(self, thread: int, events: list[Event]) -> Iterator[dict[str, Any]]:
        slices = [
            _Slice(event, self._nanoseconds(event.at), self._nanoseconds(event.at + event.seconds))
            for event in events
            if event.kind == Kind.SPAN
        ]
        widen_tasks(slices)
        for lane, nested in enumerate(in_lanes(slices)):
            for one in nested:
                one.track = self._track(thread, lane)
                yield self._slice(one)
        for event in events:
            if event.kind == Kind.MARK:
                yield {
                    **self._common(event, "i", self._nanoseconds(event.at)),
                    "s": "t",
                    "tid": self._track(thread, 0),
                    "args": _finite(event.args),
                }

    def _slice(self, one: _Slice) -> dict[str, Any]:
        event = one.event
        args = _finite(event.args) | ({"task": event.task} if event.task else {})
        return {
            **self._common(event, "X", one.begin),
            "dur": (one.end - one.begin) / 1000,
            "tid": one.track,
            "args": args,
        }

    def _common(self, event: Event, phase: str, at: int) -> dict[str, Any]:
        category = TASK if event.step == TASK else event.kind
        return {"ph": phase, "name": title(event), "cat": str(category), "ts": at / 1000, "pid": self._number}

    # ---- events without a thread -------------------------------------------------------

    def _wait(self, event: Event, id: str) -> Iterator[dict[str, Any]]:
        begin, end = self._nanoseconds(event.at), self._nanoseconds(event.at + event.seconds)
        args = _finite(event.args) | ({"task": event.task} if event.task else {})
        yield {**self._common(event, "b", begin), "id2": {"local": id}, "tid": 0, "args": args}
        yield {**self._common(event, "e", end), "id2": {"local": id}, "tid": 0}


def widen_tasks(slices: Iterable[_Slice]) -> None:
    """Widen the tasks of one thread to contain their steps, without making adjacent tasks overlap."""
    tasks = sorted((one for one in slices if one.event.step == TASK), key=lambda one: one.begin)
    by_key: defaultdict[str, list[_Slice]] = defaultdict(list)
    for task in tasks:
        by_key[task.event.task].append(task)
    inner: dict[_Slice, tuple[int, int]] = {}
    for step in slices:
        if step.event.step == TASK or not (executions := by_key.get(step.event.task)):
            continue
        task = min(executions, key=lambda one: max(one.begin - step.begin, step.end - one.end, 0))
        begin, end = inner.get(task, (step.begin, step.end))
        inner[task] = min(begin, step.begin), max(end, step.end)
    apart = [(one, other) for one, other in itertools.pairwise(tasks) if one.end <= other.begin]
    for task, (begin, end) in inner.items():
        task.begin, task.end = min(task.begin, begin), max(task.end, end)
    for before, after in apart:
        if before.end > after.begin:
            # Cut between the last step of the first task and the first step of the second, if possible.
            _, least = inner.get(before, (before.begin, before.begin))
            most, _ = inner.get(after, (after.end, after.end))
            cut = max(least, min((before.end + after.begin) // 2, most))
            if before.begin <= cut <= after.end:
                before.end, after.begin = min(before.end, cut), max(after.begin, cut)


def in_lanes(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Distribute slices over the fewest lanes in which they are nested (greedily)."""
    lanes: list[list[_Slice]] = []
    open_ends: list[list[int]] = []
    for one in sorted(slices, key=lambda one: (one.begin, -one.end, one.event.step != TASK)):
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= one.begin:
                ends.pop()
            if not ends or ends[-1] >= one.end:
                lane.append(one)
                ends.append(one.end)
                break
        else:
            lanes.append([one])
            open_ends.append([one.end])
    return lanes


def _finite(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with non-finite floats as strings, since JSON has no infinity."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in args.items()
    }
