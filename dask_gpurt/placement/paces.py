"""How many times as long as others a worker takes for its work, as far as that is certain. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The weight of the last task in what is known of its worker, once there are as many.
WEIGHT = 0.1
#: Shorter tasks, in seconds, say how long it takes to start one.
SHORT = 0.01
#: Standard errors of a mean that may be chance.
CHANCE = 2.0
#: What the time of a task tells at most, as a multiple of the usual.
FASTEST, SLOWEST = 0.1, 10.0


@dataclass(slots=True)
class _Known:
    """Mean and variance of the logarithm of what tasks took against what is usual."""

    number: int = 0
    mean: float = 0.0
    variance: float = 0.0
    pace: float = 1.0

    def observe(self, ratio: float) -> None:
        self.number += 1
        weight = max(1 / self.number, WEIGHT)
        more = math.log(min(max(ratio, FASTEST), SLOWEST)) - self.mean
        self.mean += weight * more
        self.variance = (1 - weight) * (self.variance + weight * more * more)
        if self.number > 1:
            error = math.sqrt(self.variance * weight / (1 - weight))
            self.pace = math.exp(math.copysign(max(0.0, abs(self.mean) - CHANCE * error), self.mean))


class Paces:
    """The paces of workers, by their tasks.

    Tasks vary: without a doubt two workers that are alike would never look it, and inputs would be moved to
    the one that was luckier until now.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def observe(self, worker: str, seconds: float, usual: float) -> None:
        """A task has taken so many seconds, where others like it usually take ``usual``."""
        if usual >= SHORT and seconds > 0:
            self._known.setdefault(worker, _Known()).observe(seconds / usual)

    def of(self, worker: str) -> float:
        """The least different from 1 that what it has done leaves possible; above 1 is slow."""
        known = self._known.get(worker)
        return 1.0 if known is None else known.pace

    def forget(self, worker: str) -> None:
        """It is gone."""
        self._known.pop(worker, None)
