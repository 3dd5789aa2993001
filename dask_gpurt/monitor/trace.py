"""Hold the trace of a cluster: the recordings of all processes, by the clocks of their hosts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dask.utils import key_split

from dask_gpurt.observe.recording import TASK, Event, Kind

#: The name of the scheduler among the processes.
SCHEDULER = "scheduler"


@dataclass(repr=False)
class ProcessTrace:
    """Hold the recording of one server.

    Attributes
    ----------
    events
        With times in seconds since the begin of the trace.
    lost
        Events that were overwritten before they were taken, or were taken but did not arrive.
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

        Parameters
        ----------
        recording
            The begin of the recording, which identifies it: a worker restarted at its address has another.
        taken, lost
            Numbers of events of the recording that were taken so far, and that were overwritten.
        """
        if recording != self._recording:
            self._recording, self._received, self._lost_before = recording, 0, self.lost
        self._received += arrived
        self.lost = self._lost_before + lost + taken - self._received

    def __repr__(self) -> str:
        return f"<ProcessTrace of {self.name or 'a process'}: {_events(len(self.events), self.lost)}>"


class StepSummary(NamedTuple):
    """Summarise a step of one process.

    Attributes
    ----------
    process
        Its address, or "scheduler".
    step
        The name of the step; for tasks their prefix.
    seconds, longest
        Total duration, and the longest single duration.
    nbytes
        Bytes moved, if known.
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

    Attributes
    ----------
    began
        Begin of the trace, in seconds since the epoch.
    processes
        By address; the scheduler's key is :data:`SCHEDULER`.
    unanswered
        Workers that did not answer, or left before their last events were collected, with the reason.
    left_out
        Events dropped because the trace had reached its limit.
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
