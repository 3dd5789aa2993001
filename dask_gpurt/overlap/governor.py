"""Choose the setting that a kernel runs under beside communication, from measurements. Pure.

A setting is an arm of a multi-armed bandit. Its cost is the time that the last steps would have taken under
it (``statistics``), estimated within an interval. The setting with the best worst case is used. Settings
that may still be better take turns with it, a step each, until they can not be better any more (successive
elimination: E. Even-Dar, S. Mannor, Y. Mansour, Journal of Machine Learning Research 7, 2006). A trial is
made only while the time lost by all trials, and the most that this one may lose, stay within a small share
of the time so far (Y. Wu, R. Shariff, T. Lattimore, C. Szepesvári, Conservative Bandits, ICML 2016,
arXiv:1602.04282).

The turn follows from the number of the step, and one kernel is tried at a time. So workers that take part
in the same runs mostly try the same at once. They decide from the average of their statistics, as far as
these have been exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

from dask_gpurt.overlap.samples import PRIORITY, Setting, SoloSample, StepSample
from dask_gpurt.overlap.statistics import Costs, KernelStatistics, OverlapStatistics, overlaid

#: The share of the time that trials may lose. Half of the promised 1 %, since losses are estimates.
TRIAL_BUDGET_SHARE = 0.005
#: A setting that can not be better by more than this share is not worth trying.
INDIFFERENCE_SHARE = 0.01
#: Steps with priority only before another setting is tried.
MIN_STEPS = 3
#: A kernel with less than this share of all compute is not tried under other settings.
MINOR_KERNEL_SHARE = 0.1
#: The share of its speed that a step keeps at worst where no actuator states it: measurements alone count.
UNKNOWN_SPEED_SHARE = 0.01


@dataclass(frozen=True)
class Decision:
    """Hold a setting, and why it was chosen."""

    setting: Setting
    why: str


@dataclass(frozen=True)
class Forecast:
    """Forecast the seconds of the last steps under a setting: at worst, as measured, and at best."""

    worst: float
    expected: float
    best: float


class Policy(Protocol):
    """Choose settings, and learn from samples."""

    def choose(self, kernel: str) -> Decision:
        """Return the setting for a kernel beside communication; it stays the same for a whole step."""
        ...

    def learn(self, alone: SoloSample) -> str | None:
        """Take a task without communication; return its kernel if that has changed, and so was forgotten."""
        ...

    def learn_step(self, step: StepSample) -> str | None:
        """Take the step that ends here; return the kernels that have changed, and so were forgotten."""
        ...


class Fixed:
    """Choose the same setting always.

    Parameters
    ----------
    setting
        The one that is chosen.
    """

    def __init__(self, setting: Setting):
        self._decision = Decision(setting, "fixed by the settings")

    def choose(self, kernel: str) -> Decision:
        return self._decision

    def learn(self, alone: SoloSample) -> str | None:
        return None

    def learn_step(self, step: StepSample) -> str | None:
        return None


class Governor:
    """Choose a setting for each kernel, and learn from the outcome.

    Parameters
    ----------
    candidates
        The settings to choose from besides priority only, and for each the share of its speed that a
        step keeps under it at worst, above 0 and at most 1.
    known
        Statistics from before.
    budget
        The share of the time that trials may lose.
    """

    def __init__(
        self,
        candidates: Mapping[Setting, float],
        known: OverlapStatistics | None = None,
        budget: float = TRIAL_BUDGET_SHARE,
    ):
        self.known = known or OverlapStatistics()
        self.budget = budget
        self.candidates = {PRIORITY: 1.0, **candidates}
        #: Seconds so far, and those of them that trials have lost.
        self.elapsed = self.lost = 0.0
        self._turn = 0
        self._decisions: dict[str, Decision] = {}
        self._agreed: OverlapStatistics | None = None
        self._basis: OverlapStatistics | None = None
        #: The kernel with a trial in this step, and the costs that are expected without it.
        self._trial: tuple[str, Costs] | None = None

    def choose(self, kernel: str) -> Decision:
        """Return the setting for a kernel beside communication; it stays the same for a whole step."""
        if kernel not in self._decisions:
            self._decisions[kernel] = self._decide(kernel)
        return self._decisions[kernel]

    def learn(self, alone: SoloSample) -> str | None:
        """Take a task without communication; return its kernel if that has changed, and so was forgotten."""
        self.elapsed += alone.seconds
        return self.known.add(alone)

    def learn_step(self, step: StepSample) -> str | None:
        """Take the step that ends here; return the kernels that have changed, and so were forgotten."""
        self.elapsed += step.seconds
        tried, without = self._trial or (None, Costs(0.0, None))
        if tried in step.ran and step.moved and (costs := self.known.costs(step)) is not None:
            # The loss of one trial may be noise: the sum over many is not.
            lost = (self.known.total(costs) - self.known.total(without)) / self.known.steps
            self.lost = max(0.0, self.lost + lost)
        self._turn += 1
        self._trial = self._basis = None
        self._decisions.clear()
        return self.known.add_step(step, tried)

    def agree(self, common: OverlapStatistics | None) -> None:
        """Take the statistics of all workers to decide the next step from; None for ``known`` alone."""
        self._agreed = common

    @property
    def steps(self) -> int:
        """Count the steps that were learnt from."""
        return self._turn

    @property
    def basis(self) -> OverlapStatistics:
        """Return the statistics from which a whole step is decided: those of all workers, else ``known``."""
        if self._basis is None:
            self._basis = overlaid(self._agreed, self.known) if self._agreed else self.known
        return self._basis

    def forecasts(self, kernel: KernelStatistics) -> dict[Setting, Forecast]:
        """Forecast each setting for a kernel that has enough samples; priority only comes first."""
        known, usual = self.basis, kernel.beside[PRIORITY]
        # Where tasks or bytes were measured too slow alone, costs beside each other are below zero.
        means = [beside.bounds(0.0) for beside in kernel.beside.values()]
        least = Costs(
            min(0.0, *(mean.adds for mean in means)), min(0.0, *(mean.delays or 0.0 for mean in means))
        )
        found = {}
        for setting, keeps in self.candidates.items():
            worst = known.total(usual.bounds(1.0)) + known.moved * usual.adds.size * (1 / keeps - 1)
            if (beside := kernel.beside.get(setting)) is None or not beside.adds.count:
                found[setting] = Forecast(worst, worst, known.total(least))
            else:
                mean = known.total(beside.bounds(0.0))
                best = max(known.total(beside.bounds(-1.0)), known.total(least))
                found[setting] = Forecast(min(known.total(beside.bounds(1.0)), max(worst, mean)), mean, best)
        return found

    def missing(self, kernel: KernelStatistics) -> str:
        """Name the measurements that other settings than priority only wait for; empty for none."""
        usual = kernel.beside.get(PRIORITY)
        return "both together" if usual is None or usual.adds.count < MIN_STEPS else ""

    def _decide(self, name: str) -> Decision:
        kernel = self.basis.kernels.get(name)
        if kernel is None or (missing := self.missing(kernel)):
            return Decision(PRIORITY, f"to be measured: {missing if kernel else 'both together'}")
        forecasts = self.forecasts(kernel)
        used = safest(forecasts)
        if self._trial is None and self._is_tried(name):
            trial = self._next(kernel, forecasts, used)
            if trial != used and self._affords(forecasts[trial], forecasts[used]):
                self._trial = name, kernel.beside[used].bounds(0.0)
                return Decision(trial, f"on trial against {used}")
        return Decision(used, f"the best worst case of {len(forecasts)} settings")

    def _is_tried(self, name: str) -> bool:
        """Return whether it is the turn of a kernel, at random: kernels may alternate in step with turns."""
        least = MINOR_KERNEL_SHARE * self.basis.compute()
        major = [other for other, of in self.basis.kernels.items() if of.seconds() >= least]
        return name in major and crc32(f"{name} {self._turn}".encode()) % len(major) == 0

    def _next(
        self, kernel: KernelStatistics, forecasts: Mapping[Setting, Forecast], used: Setting
    ) -> Setting:
        """Return the setting whose turn it is among the one in use and those that may be better."""
        enough = forecasts[used].expected * (1 - INDIFFERENCE_SHARE)
        turns = [one for one in forecasts if one == used or forecasts[one].best < enough]
        return turns[self._turn % len(turns)]

    def _affords(self, tried: Forecast, used: Forecast) -> bool:
        """Return whether a trial stays within the budget even if it goes as badly as possible."""
        loss = max(0.0, tried.worst - used.expected) / self.basis.steps
        return self.lost + loss <= self.budget * self.elapsed


def safest(forecasts: Mapping[Setting, Forecast]) -> Setting:
    """Return the setting with the best worst case."""
    return min(forecasts, key=lambda setting: forecasts[setting].worst)


# ---- as a table that says why ----------------------------------------------------------


def rows(known: OverlapStatistics) -> list[dict[str, Any]]:
    """Return a row for each kernel and setting that was measured.

    Returns
    -------
    list of dict
        ``kernel``, ``setting`` and ``samples``, the steps measured; the speed of ``compute`` beside
        communication, as a share of that alone; what communication ``adds`` to a step, as a share of the
        step with priority only, and the time that the step then takes relative to that one: ``total``, at
        ``best`` and at ``worst``; whether the setting is ``used``, and ``why``. Shares are None as long as
        they can not be told.
    """
    return [row for name in sorted(known.kernels) for row in _of_kernel(known, name)]


def _of_kernel(known: OverlapStatistics, name: str) -> list[dict[str, Any]]:
    kernel = known.kernels[name]
    governor = Governor(dict.fromkeys(kernel.beside, UNKNOWN_SPEED_SHARE), known)
    if missing := governor.missing(kernel):
        nothing = dict.fromkeys(("compute", "adds", "total", "best", "worst"))
        first = {"kernel": name, "setting": str(PRIORITY), "samples": round(kernel.alone.count), **nothing}
        return [{**first, "used": True, "why": f"to be measured: {missing}"}]
    forecasts = governor.forecasts(kernel)
    used = safest(forecasts)
    return [
        {
            "kernel": name,
            "setting": str(setting),
            "samples": round(kernel.beside[setting].adds.count),
            "compute": kernel.beside[setting].compute.mean / kernel.speed(),
            **_figures(outlook, forecasts[PRIORITY], known.moved * kernel.beside[setting].adds.mean),
            "used": setting == used,
            "why": _why(outlook, forecasts[used]),
        }
        for setting, outlook in forecasts.items()
    ]


def _figures(outlook: Forecast, usual: Forecast, adds: float) -> dict[str, float]:
    step = usual.expected or 1.0
    totals = {"total": outlook.expected, "best": outlook.best, "worst": outlook.worst}
    return {"adds": adds / step, **{name: seconds / step for name, seconds in totals.items()}}


def _why(outlook: Forecast, used: Forecast) -> str:
    if outlook is used:
        return "no other is faster at its worst"
    if outlook.best < used.expected * (1 - INDIFFERENCE_SHARE):
        return "may be faster, is not known well enough"
    if outlook.best < used.expected:
        return "hardly faster even at its best"
    return "slower even at its best"
