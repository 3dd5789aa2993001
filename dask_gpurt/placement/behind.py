"""Tasks that will run where others are, as soon as these are done: by prefix, in parts of tasks. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dask.typing import Key


@dataclass(slots=True)
class _Worker:
    number: int = 0
    total: float = 0.0
    parts: Counter[str] = field(default_factory=Counter)


#: Of a worker where nothing waits.
_NOTHING = _Worker()


class Behind:
    """How many tasks of each prefix wait for what is on a worker; who waits for two counts half for each.

    They are counted and not timed: what they take may not be known before the first of them has run.
    """

    def __init__(self) -> None:
        self._tasks: dict[Key, tuple[str, Mapping[str, float]]] = {}
        self._workers: defaultdict[str, _Worker] = defaultdict(_Worker)

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, key: Key, worker: str, parts: Mapping[str, float]) -> None:
        """A task is on a worker, and so many of each prefix wait for it."""
        self.remove(key)
        self._tasks[key] = worker, parts
        known = self._workers[worker]
        known.number += 1
        known.total += sum(parts.values())
        known.parts.update(parts)

    def remove(self, key: Key) -> str | None:
        """A task is done or gone; tell where it was."""
        worker, parts = self._tasks.pop(key, (None, {}))
        if worker is None:
            return None
        known = self._workers[worker]
        known.number -= 1
        known.total -= sum(parts.values())
        known.parts.subtract(parts)
        if not known.number:  # what sums of fractions have left goes, too
            del self._workers[worker]
        return worker

    def parts(self, worker: str) -> Mapping[str, float]:
        """How many wait on a worker, by prefix."""
        return self._workers.get(worker, _NOTHING).parts

    def number(self, worker: str) -> float:
        """How many wait there in all."""
        return self._workers.get(worker, _NOTHING).total
