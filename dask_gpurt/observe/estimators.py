"""Estimate moments, changing means and ratios online, from noisy samples. Pure.

All moments follow one recursion (T. Finch, Incremental calculation of weighted mean and variance, 2009): the
last sample has the weight 1/n, where n is the number of samples up to the window. So an estimate starts as
the plain average and becomes an exponentially weighted one, which follows a slow drift.

Sudden changes are detected by the two-sided CUSUM test (E. S. Page, Continuous inspection schemes, Biometrika
41, 1954), on residuals in units of their standard deviation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Window of a mean, in samples.
WINDOW_SAMPLES = 200
#: Prior noise as a fraction of the quantity, and the number of samples that the prior counts as.
PRIOR_NOISE, PRIOR_SAMPLES = 0.1, 3
#: Standard errors between the mean and its bounds: a bound is wrong once in 740 times.
CONFIDENCE_ERRORS = 3.0
#: Parameters of the CUSUM test, in standard deviations. A change by three of them is detected after
#: CUSUM_ALARM / (3 - CUSUM_SLACK) samples; noise alone triggers it once in about 500,000
#: (D. Siegmund, Sequential Analysis, 1985).
CUSUM_SLACK, CUSUM_ALARM = 0.5, 12.0
#: Residuals are clipped, so that a few outliers are not a change; the test starts after this many samples.
OUTLIER_DEVIATIONS, SETTLED_SAMPLES = 3.0, 10


@dataclass(slots=True)
class RunningMoments:
    """Estimate the mean and the variance of a stream of samples that may drift.

    Parameters
    ----------
    window
        Maximum number of samples that count. The last sample never has less weight than 1/window.
    count
        Number of samples so far, up to the window.
    mean, variance
        The moments of these samples.
    """

    window: int
    count: float = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def weight(self) -> float:
        """Return the weight of the last sample."""
        return 1 / self.count

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean; requires at least two samples."""
        weight = self.weight
        return math.sqrt(self.variance * weight / (1 - weight))

    def observe(self, value: float) -> float:
        """Add a sample; return its deviation from the previous mean."""
        self.count = min(self.count + 1, self.window)
        weight, deviation = self.weight, value - self.mean
        self.mean += weight * deviation
        self.variance = (1 - weight) * (self.variance + weight * deviation * deviation)
        return deviation


class ChangeTest:
    """Detect a sudden change by the two-sided CUSUM test, on residuals in standard deviations."""

    __slots__ = ("_fallen", "_risen")

    def __init__(self) -> None:
        self._risen = self._fallen = 0.0

    def observe(self, residual: float) -> bool:
        """Add a residual; return whether the quantity has changed."""
        residual = max(-OUTLIER_DEVIATIONS, min(OUTLIER_DEVIATIONS, residual))
        self._risen = max(0.0, self._risen + residual - CUSUM_SLACK)
        self._fallen = max(0.0, self._fallen - residual - CUSUM_SLACK)
        return max(self._risen, self._fallen) > CUSUM_ALARM


class MeanEstimate:
    """Estimate the mean of a quantity and its uncertainty, and detect changes.

    Parameters
    ----------
    count, mean, scatter, size
        The values of :meth:`plain`; by default there are no samples.

    Attributes
    ----------
    size
        The mean of the whole that the quantity is a part of. The prior noise is proportional to it.
    """

    def __init__(self, count: float = 0, mean: float = 0.0, scatter: float = 0.0, size: float = 0.0):
        self._moments = RunningMoments(WINDOW_SAMPLES, count, mean, scatter / count if count else 0.0)
        self._change = ChangeTest()
        self.size = size

    @property
    def count(self) -> float:
        """Return the effective number of samples."""
        return self._moments.count

    @property
    def mean(self) -> float:
        """Return the mean of the samples."""
        return self._moments.mean

    @property
    def scatter(self) -> float:
        """Return the sum of squared residuals over the effective number of samples."""
        return self._moments.variance * self._moments.count

    def add(self, value: float, size: float | None = None) -> bool:
        """Add a sample; return whether the quantity has changed since the earlier ones.

        Parameters
        ----------
        size
            The whole that the value is a part of, for example the total time if the value is a difference of
            times; by default the value itself.
        """
        changed = self.count >= SETTLED_SAMPLES and self._leaves(value)
        self._moments.observe(value)
        self.size += self._moments.weight * ((value if size is None else size) - self.size)
        return changed

    def _leaves(self, value: float) -> bool:
        # The deviation of a quantity that was always 0 is 0.
        return self._change.observe((value - self.mean) / (self.deviation or sys.float_info.min))

    @property
    def deviation(self) -> float:
        """Return the standard deviation of a sample."""
        prior = PRIOR_SAMPLES * (PRIOR_NOISE * self.size) ** 2
        return math.sqrt((self.scatter + prior) / (self.count + PRIOR_SAMPLES))

    @property
    def uncertainty(self) -> float:
        """Return the half-width of the confidence interval of the mean; infinity without samples."""
        return CONFIDENCE_ERRORS * self.deviation / math.sqrt(self.count) if self.count else math.inf

    def plain(self) -> list[float]:
        """Return the estimate as JSON-serialisable values."""
        return [self.count, self.mean, self.scatter, self.size]

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanEstimate:
        """Restore an estimate from the values of :meth:`plain`.

        Raises
        ------
        ValueError
            If the values are malformed or out of range.
        """
        count, mean, scatter, size = (float(value) for value in values)
        if not math.isfinite(mean) or not all(0 <= value < math.inf for value in (count, scatter, size)):
            raise ValueError(f"{list(values)} is not an estimate: expected count, mean, scatter and size")
        return cls(count, mean, scatter, size)


def pooled(several: Iterable[MeanEstimate]) -> MeanEstimate:
    """Pool several observers' estimates of one quantity into the estimate of an average observer.

    Observers are weighted by their samples. The differences between them are part of the scatter.
    """
    found = [one for one in several if one.count]
    if not found:
        return MeanEstimate()
    samples = sum(one.count for one in found)
    mean = sum(one.count * one.mean for one in found) / samples
    size = sum(one.count * one.size for one in found) / samples
    scatter = sum(one.scatter + one.count * (one.mean - mean) ** 2 for one in found)
    return MeanEstimate(samples / len(found), mean, scatter / len(found), size)


class WindowedRatio:
    """Estimate the ratio of two quantities that are measured in pairs, such as bytes and seconds.

    Both are summed. When the sum of ``measure`` exceeds the window, both sums are scaled down to it, so older
    pairs are discounted exponentially, by size rather than by number.

    Parameters
    ----------
    amount, measure
        The initial sums: a prior pair.
    window
        Maximum of the sum of ``measure``, in its unit.
    """

    __slots__ = ("_amount", "_measure", "_window")

    def __init__(self, amount: float, measure: float, window: float):
        self._amount, self._measure, self._window = amount, measure, window

    def observe(self, amount: float, measure: float) -> None:
        """Add a pair, or the sums of several pairs."""
        amount, measure = self._amount + amount, self._measure + measure
        scale = self._window / max(self._window, measure)
        self._amount, self._measure = amount * scale, measure * scale

    @property
    def ratio(self) -> float:
        """Return amount per measure."""
        return self._amount / self._measure

    @property
    def inverse(self) -> float:
        """Return measure per amount."""
        return self._measure / self._amount
