"""Work that is expected on workers, task by task, beside what Dask counts there. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dask.typing import Key


class _Task(NamedTuple):
    worker: str
    prefix: str
    seconds: float
    weight: float


@dataclass(slots=True)
class _Worker:
    number: int = 0
    weight: float = 0.0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


#: Of a worker where nothing is expected.
_NOTHING = _Worker()


class Expected:
    """Seconds of work by worker and prefix, of tasks that may come and go in any order."""

    def __init__(self) -> None:
        self._tasks: dict[Key, _Task] = {}
        self._workers: defaultdict[str, _Worker] = defaultdict(_Worker)

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, key: Key, worker: str, prefix: str, seconds: float, weight: float) -> None:
        """A task is expected on a worker, and nowhere else.

        Parameters
        ----------
        seconds
            Its work. May be below 0, where it is less than what is counted already.
        weight
            The number of usual tasks that take as long.
        """
        self.remove(key)
        self._tasks[key] = _Task(worker, prefix, seconds, weight)
        known = self._workers[worker]
        known.number += 1
        known.weight += weight
        known.seconds[prefix] += seconds

    def remove(self, key: Key) -> str | None:
        """Expect a task no longer; tell where it was expected."""
        task = self._tasks.pop(key, None)
        if task is None:
            return None
        known = self._workers[task.worker]
        known.number -= 1
        known.weight -= task.weight
        known.seconds[task.prefix] -= task.seconds
        if not known.number:  # what sums of fractions have left goes, too
            del self._workers[task.worker]
        return task.worker

    def seconds(self, worker: str) -> Mapping[str, float]:
        """What is expected on a worker, by prefix."""
        return self._workers.get(worker, _NOTHING).seconds

    def number(self, worker: str) -> int:
        """How many tasks are expected there."""
        return self._workers.get(worker, _NOTHING).number

    def weight(self, worker: str) -> float:
        """How many usual tasks take as long as these."""
        return self._workers.get(worker, _NOTHING).weight

    def clear(self) -> set[str]:
        """Expect nothing any more; tell the workers where something was expected until now."""
        workers = set(self._workers)
        self._tasks.clear()
        self._workers.clear()
        return workers
