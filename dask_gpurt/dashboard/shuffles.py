"""Follow the shuffles of a cluster from what the scheduler and the workers tell. Pure.

Phases are told from the states of tasks, so that they are the scheduler's truth; bytes, rows and seconds come
with the workers' heartbeats, a moment later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dask.typing import Key

#: Shuffles that are kept, and events of each.
MAX_SHUFFLES, MAX_REASONS = 100, 5
#: States of tasks whose results are to be made once more.
_AGAIN = ("waiting", "queued", "no-worker", "processing")
_NOTHING_ASSEMBLED = {"outputs": 0, "rows": 0, "largest": -1, "largest_rows": -1}


class ShuffleState(StrEnum):
    """Name how far a shuffle has come."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class ShuffleRecord:
    """Keep what is known of a shuffle, for all its runs.

    Attributes
    ----------
    shuffle, run
        Its id, and that of its current run.
    began, ended
        Seconds since the epoch; it has not ended while that is None.
    inputs, outputs
        How many tasks there are of either kind.
    transferred, assembled
        Those of them that have a result.
    sealed
        Whether the barrier has one.
    restarts, recoveries, moved
        How often it began again as a whole, how often a run was mended, and the outputs that got other
        owners, then or to balance workers.
    reasons
        Of the last of these.
    workers
        Of each worker in the current run, the fields of :class:`~dask_gpurt.observe.progress.Figures`.
    """

    shuffle: str
    run: int
    began: float
    inputs: int
    outputs: int
    ended: float | None = None
    state: ShuffleState = ShuffleState.RUNNING
    transferred: set[Key] = field(default_factory=set)
    assembled: set[Key] = field(default_factory=set)
    sealed: bool = False
    restarts: int = 0
    recoveries: int = 0
    moved: int = 0
    reasons: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_REASONS))
    workers: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def row(self, now: float) -> dict[str, Any]:
        """Return the figures of all workers together, and what follows from them.

        Returns
        -------
        dict
            Besides plain fields: ``seconds`` so far; the shares of inputs that are ``sent``, of bytes that
            are ``received`` and of outputs that are ``done``; ``bytes`` that were sent, ``rows``; and
            ``skew``, the rows of the ``largest`` output over the mean, None before the first.
        """
        found = self.workers.values()
        offered, received = (sum(w[name] for w in found) for name in ("offered_bytes", "received_bytes"))
        outputs, rows = (sum(w[name] for w in found) for name in ("outputs", "rows"))
        largest = max(found, key=lambda w: w["largest_rows"], default=None)
        skew = largest["largest_rows"] * outputs / rows if largest is not None and rows else None
        return {
            "shuffle": self.shuffle,
            "run": self.run,
            "state": str(self.state),
            "began": self.began,
            "seconds": (now if self.ended is None else self.ended) - self.began,
            "inputs": f"{len(self.transferred)} / {self.inputs}",
            "outputs": f"{len(self.assembled)} / {self.outputs}",
            "sent": _share(len(self.transferred), self.inputs),
            "received": 1.0 if self.sealed else _share(received, offered),
            "done": _share(len(self.assembled), self.outputs),
            "bytes": offered,
            "rows": rows,
            "skew": skew,
            "largest": largest["largest"] if skew is not None and largest is not None else None,
            **{step: sum(w[step] for w in found) for step in ("splitting", "packing", "assembling")},
            "restarts": self.restarts,
            "recoveries": self.recoveries,
            "moved": self.moved,
            "reason": self.reasons[-1] if self.reasons else "",
        }


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


class ShuffleLog:
    """Keep the last shuffles of a cluster, running and past."""

    def __init__(self) -> None:
        #: By shuffle and the run that it began with.
        self._records: OrderedDict[tuple[str, int], ShuffleRecord] = OrderedDict()
        self._latest: dict[str, ShuffleRecord] = {}
        #: By task: the shuffles that its result concerns, and the step that it completes there.
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
    ) -> None:
        """Note a run that begins, with the keys of the tasks of its shuffle."""
        record = self._latest.get(shuffle)
        if record is None or record.state is not ShuffleState.RUNNING:
            record = ShuffleRecord(shuffle, run, at, len(inputs), len(outputs))
            self._latest[shuffle] = self._records[shuffle, run] = record
            self._forget_beyond()
        record.run, record.inputs, record.outputs = run, len(inputs), len(outputs)
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
            if self._latest.get(forgotten.shuffle) is forgotten:
                del self._latest[forgotten.shuffle]

    def transition(self, key: Key, finish: str, at: float) -> None:
        """Note what has become of a task."""
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
            elif not is_done:  # an output was lost, and is needed
                record.state, record.ended = ShuffleState.RUNNING, None

    def event(self, action: str, shuffle: str, reason: str, outputs: int = 0) -> None:
        """Note what has become of a run, as the scheduler tells it."""
        if (record := self._latest.get(shuffle)) is None:
            return
        record.restarts += action == "begins-again"
        record.recoveries += action == "recovers"
        record.moved += outputs
        record.reasons.append(reason)

    def figures(self, worker: str, runs: Iterable[tuple[str, int, Mapping[str, Any]]]) -> None:
        """Take the figures of a worker: shuffle, run, and what it has done there."""
        for shuffle, run, figures in runs:
            record = self._latest.get(shuffle)
            if record is not None and record.run == run:
                record.workers[worker] = figures

    def removed(self, worker: str) -> None:
        """Note that a worker has left: what it has put together of a running shuffle others do again."""
        for record in self._records.values():
            if record.state is ShuffleState.RUNNING and worker in record.workers:
                record.workers[worker] = {**record.workers[worker], **_NOTHING_ASSEMBLED}

    def restart(self, at: float) -> None:
        """Note that the scheduler has forgotten all tasks."""
        self._watched.clear()
        for record in self._records.values():
            if record.state is ShuffleState.RUNNING:
                record.state, record.ended = ShuffleState.CANCELLED, at

    def rows(self, now: float, most: int = MAX_SHUFFLES) -> list[dict[str, Any]]:
        """Return a row for each shuffle, the latest first."""
        latest = list(self._records.values())[-most:]
        return [record.row(now) for record in reversed(latest)]
