"""Track the shuffles of a cluster from events of the scheduler and reports of workers. Pure.

Phases are derived from the scheduler's task states and so are always current; bytes, rows and seconds arrive
with the workers' heartbeats, slightly later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from dask.typing import Key

from dask_gpurt.observe.progress import STEPS, Figures

#: Maximum numbers of shuffles, and of reasons for each.
MAX_SHUFFLES, MAX_REASONS = 100, 5
#: States of tasks whose results have to be computed again.
_AGAIN = ("waiting", "queued", "no-worker", "processing")


class ShuffleState(StrEnum):
    """Define the states of a shuffle."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class ShuffleRecord:
    """Hold the state of a shuffle over all its runs.

    ``shuffle``, ``run``, ``runs``: its id, the id of its current run, and the number of runs so far.
    ``began``, ``ended``: seconds since the epoch; ``ended`` is None while it is running.
    ``inputs``, ``outputs``: numbers of transfer tasks and of outputs.
    ``label``: the operation that it is for, with its keys, and the line of the program if that is known.
    ``transferred``, ``assembled``: keys of those tasks that have a result.
    ``sealed``: whether the barrier has a result.
    ``restarts``, ``recoveries``, ``moved``: numbers of restarts as a whole, of recoveries, and of outputs
    that moved to other owners in a recovery or for balance.
    ``reasons``: the reasons of the last restarts, recoveries and moves.
    ``workers``: the figures in the current run, by worker, as of its last heartbeat.
    """

    shuffle: str
    run: int
    began: float
    inputs: int
    outputs: int
    label: str = ""
    runs: int = 0
    ended: float | None = None
    state: ShuffleState = ShuffleState.RUNNING
    transferred: set[Key] = field(default_factory=set)
    assembled: set[Key] = field(default_factory=set)
    sealed: bool = False
    restarts: int = 0
    recoveries: int = 0
    moved: int = 0
    reasons: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_REASONS))
    workers: dict[str, Figures] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """Return ``transfer`` until the barrier has a result, then ``unpack`` until all outputs have one."""
        if not self.sealed:
            return "transfer"
        return "done" if len(self.assembled) == self.outputs else "unpack"

    def figures(self, now: float) -> dict[str, Any]:
        """Return the state and the figures summed over all workers, as plain values."""
        total = Figures.total(self.workers.values())
        # A worker that leaves, or has many runs between two heartbeats, never reports some outputs.
        is_partial = self.state is ShuffleState.DONE and total.outputs != self.outputs
        sent, skew = total.offered_bytes, None if is_partial else total.skew
        return {
            "id": self.shuffle,
            "label": self.label,
            "run": self.run,
            "runs": self.runs,
            "state": str(self.state),
            "phase": self.phase,
            "began": self.began,
            "seconds": (now if self.ended is None else self.ended) - self.began,
            "inputs": {"total": self.inputs, "done": len(self.transferred)},
            "outputs": {"total": self.outputs, "done": len(self.assembled)},
            "workers": len(self.workers),
            "bytes": sent,
            # The last reports of receivers may be older than the barrier.
            "received": sent if self.sealed else min(total.received_bytes, sent),
            "rows": None if is_partial else total.rows,
            "skew": skew,
            "largest": None if skew is None else total.largest,
            **{step: getattr(total, step) for step in STEPS},
            "restarts": self.restarts,
            "recoveries": self.recoveries,
            "moved": self.moved,
            "reason": self.reasons[-1] if self.reasons else "",
        }


class ShuffleLog:
    """Keep the last shuffles of a cluster, running and past."""

    def __init__(self) -> None:
        #: Records by shuffle and first run.
        self._records: OrderedDict[tuple[str, int], ShuffleRecord] = OrderedDict()
        self._latest: dict[str, ShuffleRecord] = {}
        #: By shuffle and last run: workers report the end of a run after the next one has begun.
        self._by_run: dict[tuple[str, int], ShuffleRecord] = {}
        #: The shuffles of a task, with the phase that it belongs to there.
        self._watched: dict[Key, list[tuple[ShuffleRecord, str]]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def begins(
        self,
        shuffle: str,
        run: int,
        at: float,
        inputs: Collection[Key],
        barrier: Key,
        outputs: Collection[Key],
        label: str = "",
    ) -> None:
        """Record the begin of a run, with the keys of its tasks."""
        record = self._latest.get(shuffle)
        if record is None or record.state is not ShuffleState.RUNNING:
            record = ShuffleRecord(shuffle, run, at, len(inputs), len(outputs))
            self._latest[shuffle] = self._records[shuffle, run] = record
            self._forget_beyond()
        self._by_run.pop((shuffle, record.run), None)
        self._by_run[shuffle, run] = record
        record.run, record.inputs, record.outputs, record.label = run, len(inputs), len(outputs), label
        record.runs += 1
        record.transferred.clear()
        record.assembled.clear()
        record.workers.clear()
        record.sealed = False
        for phase, keys in (("input", inputs), ("barrier", [barrier]), ("output", outputs)):
            for key in keys:
                watching = [(of, as_) for of, as_ in self._watched.get(key, ()) if of.shuffle != shuffle]
                self._watched[key] = [*watching, (record, phase)]

    def _forget_beyond(self) -> None:
        while len(self._records) > MAX_SHUFFLES:
            past = [at for at, of in self._records.items() if of.state is not ShuffleState.RUNNING]
            forgotten = self._records.pop(past[0] if past else next(iter(self._records)))
            self._by_run.pop((forgotten.shuffle, forgotten.run), None)
            if self._latest.get(forgotten.shuffle) is forgotten:
                del self._latest[forgotten.shuffle]

    def transition(self, key: Key, finish: str, at: float) -> None:
        """Record a transition of a task."""
        if (watching := self._watched.get(key)) is None:
            return
        for record, phase in watching:
            self._apply(record, phase, key, finish, at)
        if finish == "forgotten":
            del self._watched[key]

    def _apply(self, record: ShuffleRecord, phase: str, key: Key, finish: str, at: float) -> None:
        if phase == "barrier":
            if finish == "memory" or finish in _AGAIN:
                record.sealed = finish == "memory"
            elif finish == "forgotten" and record.state is ShuffleState.RUNNING:
                record.state, record.ended = ShuffleState.CANCELLED, at
        else:
            done = record.transferred if phase == "input" else record.assembled
            if finish == "memory":
                done.add(key)
            elif finish in _AGAIN:
                done.discard(key)
        if finish == "erred":
            record.state, record.ended = ShuffleState.FAILED, at
        elif phase == "output" and record.state in (ShuffleState.RUNNING, ShuffleState.DONE):
            is_done = len(record.assembled) == record.outputs
            if is_done and record.state is ShuffleState.RUNNING:
                record.state, record.ended = ShuffleState.DONE, at
            elif not is_done:  # an output was lost and is needed again
                record.state, record.ended = ShuffleState.RUNNING, None

    def event(self, action: str, shuffle: str, reason: str, outputs: int = 0) -> None:
        """Record an event of a run that the scheduler has logged."""
        if (record := self._latest.get(shuffle)) is None:
            return
        record.restarts += action == "begins-again"
        record.recoveries += action == "recovers"
        record.moved += outputs
        record.reasons.append(reason)

    def reported(self, worker: str, runs: Iterable[tuple[str, int, Mapping[str, Any]]]) -> None:
        """Update the figures of a worker, given as shuffle, run and figures."""
        for shuffle, run, figures in runs:
            if (record := self._by_run.get((shuffle, run))) is not None:
                record.workers[worker] = Figures.of(figures)

    def removed(self, worker: str) -> None:
        """Drop the assembled outputs of a worker that has left, since others assemble them again."""
        for record in self._records.values():
            if record.state is ShuffleState.RUNNING and worker in record.workers:
                left = record.workers[worker]
                record.workers[worker] = replace(left, outputs=0, rows=0, largest=-1, largest_rows=-1)

    def restart(self, at: float) -> None:
        """Cancel running shuffles, since the scheduler has forgotten all tasks."""
        self._watched.clear()
        for record in self._records.values():
            if record.state is ShuffleState.RUNNING:
                record.state, record.ended = ShuffleState.CANCELLED, at

    def rows(self, now: float, most: int = MAX_SHUFFLES) -> list[dict[str, Any]]:
        """Return the figures of each shuffle, the latest first."""
        return [record.figures(now) for record in islice(reversed(self._records.values()), most)]
