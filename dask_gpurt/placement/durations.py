"""Learn durations of tasks by prefix and input size, and slowdowns of workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from dask_gpurt.observe.estimators import RunningMoments, RunningRegression

#: The windows of the means of a prefix and of a worker, in tasks.
PREFIX_WINDOW_TASKS, WORKER_WINDOW_TASKS = 20, 10
#: The fewest tasks of a prefix from which durations are predicted by input size. With this many tasks, one in
#: a hundred prefixes without such a relation passes the thresholds below.
MIN_TASKS = 10
#: Thresholds of the prediction: the relative standard deviation of input sizes, and the share of the variance
#: of durations that they explain.
MIN_SPREAD, MIN_EXPLAINED = 0.2, 0.7
#: Shorter tasks measure the overhead of starting a task rather than the speed of a worker.
MIN_DURATION_S = 0.01
#: The confidence margin of a mean slowdown, in standard errors.
CHANCE_ERRORS = 2.0
#: A single task's slowdown is clipped to these limits.
FASTEST, SLOWEST = 0.1, 10.0


class _Regression(RunningRegression):
    """Regress the durations of a prefix on input sizes."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(PREFIX_WINDOW_TASKS)

    @property
    def is_significant(self) -> bool:
        """Return whether input sizes vary enough and explain the durations."""
        nbytes = self.x
        return (
            nbytes.count >= MIN_TASKS
            and self.covariance > 0
            and nbytes.variance > (MIN_SPREAD * nbytes.mean) ** 2
            and self.explains(MIN_EXPLAINED)
        )

    @property
    def proportional_share(self) -> float:
        """Return the share of the mean duration that is proportional to input size, from 0 to 1."""
        return min(1.0, self.slope * self.x.mean / self.y.mean)


class DurationModel:
    """Predict the durations of tasks from their prefix and input size.

    A share of the duration is proportional to input size, the rest constant. So a prediction deviates from
    the mean duration by at most as much, relatively, as the input size deviates from its mean.
    """

    def __init__(self) -> None:
        self._prefixes: dict[str, _Regression] = {}

    def observe(self, prefix: str, nbytes: float, seconds: float) -> None:
        """Learn from a task with inputs of ``nbytes`` that took ``seconds``."""
        regression = self._prefixes.get(prefix)
        if regression is None:
            regression = self._prefixes[prefix] = _Regression()
        regression.observe(nbytes, seconds)

    def mean(self, prefix: str) -> float | None:
        """Return the mean duration of a prefix; None unless input sizes explain its durations."""
        regression = self._prefixes.get(prefix)
        return regression.y.mean if regression is not None and regression.is_significant else None

    def predict(self, prefix: str, nbytes: float) -> float | None:
        """Return the expected duration with inputs of ``nbytes``, in seconds; None as for :meth:`mean`."""
        regression = self._prefixes.get(prefix)
        if regression is None or not regression.is_significant:
            return None
        share = regression.proportional_share
        return regression.y.mean * (1 - share + share * nbytes / regression.x.mean)


@dataclass(slots=True)
class _Slowdown:
    """Estimate the logarithm of the ratio of durations to usual durations, on one worker."""

    logarithm: RunningMoments = field(default_factory=lambda: RunningMoments(WORKER_WINDOW_TASKS))
    value: float = 1.0

    def observe(self, ratio: float) -> None:
        known = self.logarithm
        known.observe(math.log(min(max(ratio, FASTEST), SLOWEST)))
        if known.count > 1:
            beyond_chance = max(0.0, abs(known.mean) - CHANCE_ERRORS * known.standard_error)
            self.value = math.exp(math.copysign(beyond_chance, known.mean))


class WorkerSlowdown:
    """Estimate each worker's durations relative to those of other workers.

    Durations are noisy. Without a confidence margin equal workers would never measure equal, and inputs would
    migrate to whichever was luckier.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Slowdown] = {}

    def observe(self, worker: str, seconds: float, usual: float) -> None:
        """Learn from a task that took ``seconds`` while such tasks usually take ``usual``."""
        if usual >= MIN_DURATION_S and seconds > 0:
            self._workers.setdefault(worker, _Slowdown()).observe(seconds / usual)

    def of(self, worker: str) -> float:
        """Return the slowdown closest to 1 within the confidence margin; greater than 1 is slow."""
        known = self._workers.get(worker)
        return 1.0 if known is None else known.value

    def known(self) -> Iterator[float]:
        """Yield the slowdown of each worker that has run a task."""
        return (known.value for known in self._workers.values())

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker."""
        self._workers.pop(worker, None)
