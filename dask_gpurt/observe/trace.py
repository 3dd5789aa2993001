"""Hold the trace of a cluster: what each process has recorded, by one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dask.utils import key_split

from dask_gpurt.observe.recording import TASK, Event, Kind

#: The name of the scheduler among the processes.
SCHEDULER = "scheduler"


class Clock(NamedTuple):
    """Hold what is known of the clock of a process.

    Attributes
    ----------
    offset
        Seconds that it is ahead of the scheduler's.
    round_trip
        Seconds of the message that showed it: the offset is off by half of that at most.
    """

    offset: float
    round_trip: float


@dataclass
class ProcessTrace:
    """Hold what one server has recorded.

    Attributes
    ----------
    name
        Of the worker.
    process
        The number of its process.
    clock
        None where the server did not answer in time: its events are placed as if it was the scheduler's.
    threads
        The names of threads, by number.
    lost
        Events that were overwritten before they were taken, or taken and did not arrive.
    """

    name: str = ""
    process: int = 0
    clock: Clock | None = None
    events: list[Event] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    lost: int = 0
    #: The recording of the last events, how many of it have arrived, and what those before it have lost.
    _recording: float = 0.0
    _received: int = 0
    _lost_before: int = 0

    def receive(self, recording: float, arrived: int, taken: int, lost: int) -> None:
        """Note that events have arrived, to know those that have not.

        Parameters
        ----------
        recording
            The time when it began: a worker that was restarted at its address has another one.
        arrived
            Events that have arrived now.
        taken, lost
            Those of the recording that were taken so far, and that were overwritten.
        """
        if recording != self._recording:
            self._recording, self._received, self._lost_before = recording, 0, self.lost
        self._received += arrived
        self.lost = self._lost_before + lost + taken - self._received

    def aligned(self) -> Iterator[Event]:
        """Yield the events by the scheduler's clock."""
        offset = self.clock.offset if self.clock else 0.0
        for event in self.events:
            yield event._replace(at=event.at - offset)


class StepSummary(NamedTuple):
    """Sum up a step of one process.

    Attributes
    ----------
    process
        Its address, or "scheduler".
    step
        Its name; of tasks the prefix.
    times
        How often it was taken.
    seconds, longest
        Of all of them, and of the one that took longest.
    nbytes
        What they have moved, where that is known.
    """

    process: str
    step: str
    times: int
    seconds: float
    longest: float
    nbytes: int


@dataclass
class Trace:
    """Hold the trace of a cluster.

    Attributes
    ----------
    began
        By the clock of the scheduler.
    time
        Of day then, in seconds since the epoch.
    processes
        By address; the scheduler's is :data:`SCHEDULER`.
    unanswered
        Workers that did not answer, or have left before they were asked for the last time, with the reason:
        their last events are missing.
    left_out
        Events that were dropped, since the trace had reached its limit.
    """

    began: float = 0.0
    time: float = 0.0
    processes: dict[str, ProcessTrace] = field(default_factory=dict)
    unanswered: dict[str, str] = field(default_factory=dict)
    left_out: int = 0

    @property
    def lost(self) -> int:
        """Return the number of events that were recorded and are not here."""
        return self.left_out + sum(process.lost for process in self.processes.values())

    def learn_clocks(self, clocks: Mapping[str, Mapping[str, float]]) -> None:
        """Take offsets of clocks; those with the shortest round trip count."""
        for address, found in clocks.items():
            process = self.processes.setdefault(address, ProcessTrace())
            clock = Clock(**found)
            if process.clock is None or clock.round_trip < process.clock.round_trip:
                process.clock = clock

    def summary(self) -> list[StepSummary]:
        """Return each step of each process, those first that took longest."""
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


def title(event: Event) -> str:
    """Return what an event is called: tasks by their prefix."""
    return key_split(event.task) if event.step == TASK else event.step


def plain(process: ProcessTrace) -> dict[str, Any]:
    """Return what is told of a process beside its events, as values that JSON holds."""
    clock = process.clock
    return {
        "name": process.name,
        "process": process.process,
        "clock offset in seconds": clock and clock.offset,
        "shortest round trip in seconds": clock and clock.round_trip,
        "events": len(process.events),
        "lost events": process.lost,
    }
