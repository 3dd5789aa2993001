"""Which setting a kernel runs under beside communication: chosen by what was measured. Pure.

A setting is the arm of a bandit. What it costs is the time of a whole step (``objective``), of which the
speeds measured under it give an interval. Used is the setting with the best worst case. Of the settings
that may be better still, the one with the best best case is tried (optimism: P. Auer, N. Cesa-Bianchi,
P. Fischer, Machine Learning 47, 2002; intervals from measured variances: J.-Y. Audibert, R. Munos,
C. Szepesvári, Theoretical Computer Science 410, 2009), but only while what trying has lost, together with
what this trial may lose at worst, is within a small share of all the time so far (Y. Wu, R. Shariff,
T. Lattimore, C. Szepesvári, Conservative Bandits, ICML 2016, arXiv:1602.04282).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dask_gpurt.overlap.estimate import Estimate
from dask_gpurt.overlap.knowledge import PRIORITY, Kernel, Knowledge, Sample, Setting
from dask_gpurt.overlap.objective import Course, Speeds, Work, side_by_side

#: The share of the time that trying may lose. Half of the promised 1 %, since losses are estimates.
BUDGET = 0.005
#: A setting that can not be better by more than this is not worth trying.
INDIFFERENT = 0.01
#: Samples of both together, and of what is waited for alone, before anything else is tried.
FEW = 5
#: The least speed that bounds go down to.
STILL = 0.01


@dataclass(frozen=True)
class Decision:
    """A setting, and why."""

    setting: Setting
    why: str


@dataclass(frozen=True)
class Outlook:
    """How a step goes under a setting: as measured, and as it may be at worst and at best."""

    worst: Course
    expected: Course
    best: Course


class Governing(Protocol):
    """What decides."""

    def choose(self, kernel: str) -> Decision:
        """The setting for a kernel that runs while communication does."""
        ...

    def learn(self, sample: Sample) -> str | None:
        """Take a sample; what has changed, so that what was known of it was forgotten."""
        ...

    def step(self) -> None:
        """A run begins."""
        ...


class Fixed:
    """Always the same setting.

    Parameters
    ----------
    setting
        Which.
    """

    def __init__(self, setting: Setting):
        self._decision = Decision(setting, "fixed by the settings")

    def choose(self, kernel: str) -> Decision:
        return self._decision

    def learn(self, sample: Sample) -> str | None:
        return None

    def step(self) -> None:
        pass


class Governor:
    """Chooses a setting for each kernel, and learns from what came of it.

    Parameters
    ----------
    candidates
        The settings to choose from besides priority only, and for each the share of its speed that a
        kernel keeps under it at worst, above 0 and at most 1. None may slow communication down.
    known
        What was learnt before.
    budget
        The share of the time that trying may lose.
    """

    def __init__(
        self, candidates: Mapping[Setting, float], known: Knowledge | None = None, budget: float = BUDGET
    ):
        self.known = known or Knowledge()
        self.budget = budget
        self.candidates = {PRIORITY: 1.0, **candidates}
        #: Seconds so far, and those of them that trying has lost.
        self.elapsed = self.lost = 0.0
        self._trials: defaultdict[str, Trials] = defaultdict(Trials)

    def choose(self, kernel: str) -> Decision:
        """The setting for a kernel that runs while communication does."""
        found = self.known.kernels.get(kernel)
        if found is None or (missing := self.missing(found)):
            return Decision(PRIORITY, f"to be measured: {missing if found else 'both together'}")
        outlooks = self.outlooks(found)
        used = safest(outlooks)
        enough = outlooks[used].expected.total * (1 - INDIFFERENT)
        trials = [
            setting
            for setting, outlook in outlooks.items()
            if setting != used
            and outlook.best.total < enough
            and self._affords(found, outlook.worst, outlooks[used].expected)
        ]
        if trials:
            seconds = self._trials[kernel].under
            trial = min(trials, key=lambda setting: (outlooks[setting].best.total, seconds(setting)))
            return Decision(trial, f"on trial against {used}")
        return Decision(used, f"the best worst case of {len(outlooks)} settings")

    def learn(self, sample: Sample) -> str | None:
        """Take a sample; what has changed, so that what was known of it was forgotten."""
        self.elapsed += sample.seconds
        if sample.kernel is not None and sample.moved is not None:
            self._account(sample.kernel, sample)
        if (forgotten := self.known.add(sample)) is not None:
            # What was lost so far is known no better any more.
            self._trials.clear()
        return forgotten

    def step(self) -> None:
        """A run begins."""
        self.known.step()

    def outlooks(self, kernel: Kernel) -> dict[Setting, Outlook]:
        """What each setting promises for a kernel of which enough was measured; priority only comes first.

        Totals compare with one another only: they are of the work of the last few steps.
        """
        work, measured = self.known.work(), kernel.beside.values()
        # Alone nothing is slower than together, whatever few samples say.
        alone = max(kernel.speed(), *(beside.compute.mean for beside in measured))
        link = max(self.known.link_speed(), *(beside.communication.mean for beside in measured))
        usual = _Range.of(kernel.beside[PRIORITY].compute, alone)
        usual_link = _Range.of(kernel.beside[PRIORITY].communication, link)
        found = {}
        for setting, keeps in self.candidates.items():
            if (beside := kernel.beside.get(setting)) is None:
                # To confine compute takes nothing away from communication.
                ranges = _Range.from_(keeps * usual.low), _Range.from_(usual_link.low)
            else:
                compute = _Range.of(beside.compute, alone).above(keeps * usual.low)
                ranges = compute, _Range.of(beside.communication, link)
            found[setting] = _outlook(work, *ranges)
        return found

    def missing(self, kernel: Kernel) -> str:
        """What has to be measured before anything but priority only is used; empty for nothing."""
        if PRIORITY not in kernel.beside or kernel.beside[PRIORITY].compute.count < FEW:
            return "both together"
        if max(kernel.alone.count, self.known.link.count) < FEW:
            return "one of the two alone"
        if not kernel.speed() or not self.known.link_speed():
            return "any progress"
        return ""

    def _affords(self, kernel: Kernel, tried: Course, used: Course) -> bool:
        """Whether a trial that goes as badly as may be keeps within the budget."""
        seconds = kernel.task.mean / kernel.speed() / tried.speeds.compute
        return self.lost + seconds * _loss(tried, used) <= self.budget * self.elapsed

    def _account(self, name: str, sample: Sample) -> None:
        """Book what was lost under a setting, also before: by what is known of it now."""
        kernel = self.known.kernels.get(name)
        if kernel is None or self.missing(kernel) or sample.setting not in self.candidates:
            return
        outlooks, trials = self.outlooks(kernel), self._trials[name]
        used = safest(outlooks)
        trials.add(sample.setting, used if sample.setting != used else PRIORITY, sample.seconds)
        before, trials.lost = trials.lost, trials.loss(outlooks)
        self.lost += trials.lost - before


class Trials:
    """For how long settings were tried on a kernel, each against the one that would have been used.

    The setting that is used counts as tried against priority only: it may have been taken by mistake.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[Setting, Setting], float] = defaultdict(float)
        self.lost = 0.0

    def add(self, setting: Setting, against: Setting, seconds: float) -> None:
        """A setting was used for so many seconds."""
        if setting != against:
            self._seconds[setting, against] += seconds

    def under(self, setting: Setting) -> float:
        """For how long a setting was used."""
        return sum(seconds for (tried, _), seconds in self._seconds.items() if tried == setting)

    def loss(self, outlooks: Mapping[Setting, Outlook]) -> float:
        """Seconds that were lost, as far as is known."""
        return sum(
            seconds * _loss(outlooks[tried].expected, outlooks[against].expected)
            for (tried, against), seconds in self._seconds.items()
        )


@dataclass(frozen=True)
class _Range:
    """A speed, as a share of that alone, and its bounds."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate, alone: float) -> _Range:
        if not estimate.mean:  # bytes count when a whole shard has come: so far none has
            return cls.from_(STILL)
        mean, off = estimate.mean / alone, estimate.uncertainty / alone
        return cls(max(mean - off, STILL), max(mean, STILL), min(mean + off, 1.0))

    @classmethod
    def from_(cls, low: float) -> _Range:
        """Nothing is known but a lower bound."""
        return cls(low, low, 1.0)

    def above(self, low: float) -> _Range:
        """It is at least ``low``, whatever few samples say."""
        return _Range(*(max(speed, low) for speed in (self.low, self.mean, self.high)))


def _outlook(work: Work, compute: _Range, communication: _Range) -> Outlook:
    """The total falls with either speed, so its bounds are at theirs."""
    return Outlook(
        side_by_side(work, Speeds(compute.low, communication.low)),
        side_by_side(work, Speeds(compute.mean, communication.mean)),
        side_by_side(work, Speeds(compute.high, communication.high)),
    )


def safest(outlooks: Mapping[Setting, Outlook]) -> Setting:
    """The setting with the best worst case."""
    return min(outlooks, key=lambda setting: outlooks[setting].worst.total)


def _loss(tried: Course, used: Course) -> float:
    """Seconds that a step takes longer, for each second that both run.

    The total is convex in the share of a step that a setting is tried for, so that share loses no more.
    """
    if not tried.together:
        return 0.0
    return max(0.0, tried.total - used.total) / tried.together
