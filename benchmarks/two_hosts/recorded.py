"""Record the tasks of a run on its scheduler, and convert them to a workload for the simulator."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import SchedulerPlugin

from benchmarks.simulate import Submission, Work, Workload
from benchmarks.simulate.clock import Name

#: Key prefix of the barriers of shuffles.
BARRIER = "shuffle-barrier-"


@dataclass
class Recorded:
    """A recorded task, or an input that existed before the run.

    Parameters
    ----------
    needs
        The names of its inputs.
    worker
        The first worker with its result.
    nbytes
        Bytes of its result.
    seconds
        Duration; 0 for an input that existed before the run.
    """

    needs: tuple[str, ...]
    worker: str
    nbytes: int
    seconds: float = 0.0


@dataclass
class Recording:
    """The tasks of a run by name, in order of completion.

    Parameters
    ----------
    tasks
        Tasks of the run.
    before
        Inputs that existed before the run.
    wanted
        Tasks that a client requested.
    """

    tasks: dict[str, Recorded] = field(default_factory=dict)
    before: dict[str, Recorded] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)


class Recorder(SchedulerPlugin):
    """Record tasks once registered."""

    name = "two-hosts-recorder"

    def start(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.recording = Recording()

    def update_graph(self, scheduler: Any, *, tasks: Iterable[Any], keys: Iterable[Any], **_: Any) -> None:
        """Record the inputs that exist already, and the requested results."""
        self.recording.wanted.update(map(str, keys))
        for key in tasks:
            for dts in scheduler.tasks[key].dependencies:
                if dts.who_has and str(dts.key) not in self.recording.tasks:
                    holder = min(ws.address for ws in dts.who_has)
                    self.recording.before[str(dts.key)] = Recorded((), holder, dts.get_nbytes())

    def transition(self, key: Any, start: str, finish: str, *_: Any, **known: Any) -> None:
        """Record a completed task."""
        if start == "processing" and finish == "memory":
            ts = self._scheduler.tasks[key]
            needs = tuple(sorted(str(dts.key) for dts in ts.dependencies))
            seconds = sum(
                each["stop"] - each["start"] for each in known["startstops"] if each["action"] == "compute"
            )
            self.recording.tasks[str(key)] = Recorded(needs, known["worker"], ts.get_nbytes(), seconds)


def take(dask_scheduler: Any) -> Recording:
    """Return the recording; runs on the scheduler."""
    recording: Recording = dask_scheduler.plugins[Recorder.name].recording
    return recording


def replayed(name: str, recording: Recording, workers: Sequence[str]) -> Workload:
    """Return a workload that starts with the existing inputs, and submits the run twice.

    In the first submission the scheduler learns durations, as in the runs before the recorded one. The last
    submission is the one to evaluate.

    Parameters
    ----------
    workers
        Addresses, in the order of the workers of the simulated cluster.
    """
    held = [
        Work(Name(key), (), 0.0, task.nbytes, worker=workers.index(task.worker))
        for key, task in recording.before.items()
    ]
    kept = frozenset(work.key for work in held)
    runs = [_run(recording, number) for number in (0, 1)]
    first = [Submission(held, kept, keep=True)] if held else []
    return Workload(name, [*first, *runs])


def _run(recording: Recording, number: int) -> Submission:
    """Return the ``number``-th submission of a run, with distinct task names."""
    names = {key: Name(_renamed(key, number)) for key in recording.tasks}
    names.update((key, Name(key)) for key in recording.before)
    shards = _shards(recording)
    works = [
        Work(
            names[key],
            tuple(names[need] for need in task.needs if need in names),
            task.seconds,
            task.nbytes,
            shards={names[source]: nbytes for source, nbytes in shards.get(key, {}).items()},
        )
        for key, task in recording.tasks.items()
    ]
    wanted = recording.wanted & recording.tasks.keys()
    return Submission(works, frozenset(names[key] for key in wanted))


def _renamed(key: str, number: int) -> str:
    """Return the name of a task in a submission, with the same prefix and index."""
    found = re.fullmatch(r"\('(.*?)'(,.*)\)", key)
    return f"('{found[1]}-{number}'{found[2]})" if found else f"{key}-{number}"


def _shards(recording: Recording) -> Mapping[str, Mapping[str, int]]:
    """Return the estimated bytes of shards, by the names of output and transfer.

    The scheduler does not see shards. Those of a transfer add up to its input, and are split in proportion to
    the bytes of the outputs: in a join these consist of joined rows, most of which come from the larger side.
    """
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    known = {**recording.before, **recording.tasks}
    for barrier, task in recording.tasks.items():
        if not barrier.startswith(BARRIER):
            continue
        outputs = {key: each.nbytes for key, each in recording.tasks.items() if barrier in each.needs}
        total = sum(outputs.values()) or 1
        for transfer in task.needs:
            sent = sum(known[need].nbytes for need in recording.tasks[transfer].needs if need in known)
            for output, nbytes in outputs.items():
                found[output][transfer] = sent * nbytes // total
    return found
