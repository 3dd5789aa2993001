"""Durations of tasks, by prefix and bytes of inputs, and slowdowns of workers. Pure.

Both are learned one sample at a time, from exponentially weighted means and variances (T. Finch, Incremental
calculation of weighted mean and variance, 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: The least weight of the last task in the means of its prefix and of its worker. Before a sample has that
#: weight all samples weigh the same.
PREFIX_WEIGHT, WORKER_WEIGHT = 0.05, 0.1
#: Tasks of a prefix before its durations may be predicted from its inputs. With so few tasks, and no such
#: relation, one prefix in a hundred passes the thresholds below.
MIN_TASKS = 10
#: Thresholds for that: the deviation of input bytes from their mean, as a share of it, and the share of the
#: variance of durations that input bytes explain.
MIN_SPREAD, MIN_EXPLAINED = 0.2, 0.7
#: Shorter tasks measure the overhead of starting a task, not the speed of a worker.
MIN_DURATION_S = 0.01
#: Standard errors of a mean slowdown that count as chance.
CHANCE_ERRORS = 2.0
#: Limits to the slowdown that a single task may show.
FASTEST, SLOWEST = 0.1, 10.0


@dataclass(slots=True)
class RunningMoments:
    """Estimate the mean and the variance of a stream of samples that may drift.

    Parameters
    ----------
    min_weight
        The least weight of the last sample.
    """

    min_weight: float
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def weight(self) -> float:
        """Return the weight of the last sample."""
        return max(1 / self.count, self.min_weight)

    def observe(self, value: float) -> float:
        """Take a sample; return its deviation from the mean before it."""
        self.count += 1
        weight, deviation = self.weight, value - self.mean
        self.mean += weight * deviation
        self.variance = (1 - weight) * (self.variance + weight * deviation * deviation)
        return deviation


@dataclass(slots=True)
class _Regression:
    """A regression of the durations of a prefix on the bytes of their inputs."""

    nbytes: RunningMoments = field(default_factory=lambda: RunningMoments(PREFIX_WEIGHT))
    seconds: RunningMoments = field(default_factory=lambda: RunningMoments(PREFIX_WEIGHT))
    covariance: float = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        product = self.nbytes.observe(nbytes) * self.seconds.observe(seconds)
        weight = self.nbytes.weight
        self.covariance = (1 - weight) * (self.covariance + weight * product)

    @property
    def is_significant(self) -> bool:
        """Return whether input bytes vary, and explain the durations."""
        nbytes, seconds = self.nbytes, self.seconds
        return (
            nbytes.count >= MIN_TASKS
            and self.covariance > 0
            and nbytes.variance > (MIN_SPREAD * nbytes.mean) ** 2
            and self.covariance**2 > MIN_EXPLAINED * nbytes.variance * seconds.variance
        )

    @property
    def proportional_share(self) -> float:
        """Return the share of the mean duration that is in proportion to the bytes, from 0 to 1."""
        slope = self.covariance / self.nbytes.variance
        return min(1.0, slope * self.nbytes.mean / self.seconds.mean)


class DurationModel:
    """Predict seconds of work of tasks from their prefix and the bytes of their inputs.

    A share of the duration counts as proportional to the bytes, the rest as constant. So a prediction is
    never farther from the mean duration than the inputs are from their mean.
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
        """Return the mean duration of a prefix; None unless its inputs explain durations."""
        regression = self._prefixes.get(prefix)
        return regression.seconds.mean if regression is not None and regression.is_significant else None

    def predict(self, prefix: str, nbytes: float) -> float | None:
        """Return the seconds that a task takes with inputs of ``nbytes``; None as for :meth:`mean`."""
        regression = self._prefixes.get(prefix)
        if regression is None or not regression.is_significant:
            return None
        share = regression.proportional_share
        return regression.seconds.mean * (1 - share + share * nbytes / regression.nbytes.mean)


@dataclass(slots=True)
class _Slowdown:
    """The logarithm of the duration of tasks over their usual duration, on one worker."""

    logarithm: RunningMoments = field(default_factory=lambda: RunningMoments(WORKER_WEIGHT))
    value: float = 1.0

    def observe(self, ratio: float) -> None:
        known = self.logarithm
        known.observe(math.log(min(max(ratio, FASTEST), SLOWEST)))
        if known.count > 1:
            weight, mean = known.weight, known.mean
            error = math.sqrt(known.variance * weight / (1 - weight))
            self.value = math.exp(math.copysign(max(0.0, abs(mean) - CHANCE_ERRORS * error), mean))


class WorkerSlowdown:
    """Estimate how many times as long as others each worker takes for its tasks.

    Durations are noisy. Without a confidence margin equal workers would never measure equal, and inputs would
    migrate to whichever was luckier.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Slowdown] = {}

    def observe(self, worker: str, seconds: float, usual: float) -> None:
        """Learn from a task that took ``seconds`` where tasks like it usually take ``usual``."""
        if usual >= MIN_DURATION_S and seconds > 0:
            self._workers.setdefault(worker, _Slowdown()).observe(seconds / usual)

    def of(self, worker: str) -> float:
        """Return the slowdown closest to 1 within the confidence margin; above 1 is slow."""
        known = self._workers.get(worker)
        return 1.0 if known is None else known.value

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker."""
        self._workers.pop(worker, None)
