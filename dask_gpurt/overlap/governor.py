"""Choose the setting for each kernel while communication is in flight, from measurements. Pure.

Settings are the arms of a multi-armed bandit. The cost of a setting is the time that the last steps would
have taken under it (``statistics``), with a confidence interval. The setting with the best worst case is
used. Settings that may still be better take turns with it, one step each, until they cannot be better any
more (successive elimination: E. Even-Dar, S. Mannor, Y. Mansour, Journal of Machine Learning Research 7,
2006). A trial only runs while the time lost by all trials plus the most that this one may lose stays within a
small fraction of the time so far (Y. Wu, R. Shariff, T. Lattimore, C. Szepesvári, Conservative Bandits, ICML
2016, arXiv:1602.04282).

The turn depends on the number of the step, and one kernel is tried at a time. So workers of the same runs
mostly try the same setting at the same time. They decide from the last exchanged average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

from dask_gpurt.overlap.samples import PRIORITY, Setting, SoloSample, StepSample
from dask_gpurt.overlap.statistics import Costs, KernelStatistics, OverlapStatistics, overlaid

#: The fraction of the time that trials may lose. Half of the promised 1 %, since losses are estimates.
TRIAL_BUDGET_SHARE = 0.005
#: A setting that cannot be better by more than this fraction is not worth trying.
INDIFFERENCE_SHARE = 0.01
#: Steps with priority only before another setting is tried.
MIN_STEPS = 3
#: A kernel with less than this fraction of all compute is not tried under other settings.
MINOR_KERNEL_SHARE = 0.1
#: The fraction of its speed that a step keeps at worst if no actuator states it, so only measurements count.
UNKNOWN_SPEED_SHARE = 0.01


@dataclass(frozen=True)
class Decision:
    """Hold a setting and the reason for it."""

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
        """Return the setting for a kernel while communication is in flight; constant during a step."""
        ...

    def learn(self, alone: SoloSample) -> str | None:
        """Learn from a task without communication; return its kernel if its statistics were dropped."""
        ...

    def learn_step(self, step: StepSample) -> str | None:
        """Learn from a finished step; return the kernels whose statistics were dropped, as text."""
        ...


class Fixed:
    """Always choose the same setting.

    Parameters
    ----------
    setting
        The setting to choose.
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
        The settings other than priority only, each with the fraction of its speed that a step keeps at worst,
        greater than 0 and at most 1.
    known
        Earlier statistics.
    budget
        The fraction of the time that trials may lose.
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
        #: The time so far, and the time lost by trials, in seconds.
        self.elapsed = self.lost = 0.0
        self._turn = 0
        self._decisions: dict[str, Decision] = {}
        self._agreed: OverlapStatistics | None = None
        self._basis: OverlapStatistics | None = None
        #: The kernel on trial in this step, and its expected costs without the trial.
        self._trial: tuple[str, Costs] | None = None

    def choose(self, kernel: str) -> Decision:
        """Return the setting for a kernel while communication is in flight; constant during a step."""
        if kernel not in self._decisions:
            self._decisions[kernel] = self._decide(kernel)
        return self._decisions[kernel]

    def learn(self, alone: SoloSample) -> str | None:
        """Learn from a task without communication; return its kernel if its statistics were dropped."""
        self.elapsed += alone.seconds
        return self.known.add(alone)

    def learn_step(self, step: StepSample) -> str | None:
        """Learn from a finished step; return the kernels whose statistics were dropped, as text."""
        self.elapsed += step.seconds
        tried, without = self._trial or (None, Costs(0.0, None))
        if tried in step.ran and step.moved and (costs := self.known.costs(step)) is not None:
            # The loss of a single trial may be noise, the sum over many is not.
            lost = (self.known.total(costs) - self.known.total(without)) / self.known.steps
            self.lost = max(0.0, self.lost + lost)
        self._turn += 1
        self._trial = self._basis = None
        self._decisions.clear()
        return self.known.add_step(step, tried)

    def agree(self, common: OverlapStatistics | None) -> None:
        """Use the average statistics of all workers from the next step on; None for ``known`` alone."""
        self._agreed = common

    @property
    def steps(self) -> int:
        """Return the number of learned steps."""
        return self._turn

    @property
    def basis(self) -> OverlapStatistics:
        """Return the statistics for all decisions of a step: the average of all workers, else ``known``."""
        if self._basis is None:
            self._basis = overlaid(self._agreed, self.known) if self._agreed else self.known
        return self._basis

    def forecasts(self, kernel: KernelStatistics) -> dict[Setting, Forecast]:
        """Forecast all settings for a kernel with enough samples; priority only comes first."""
        known, usual = self.basis, kernel.beside[PRIORITY]
        # Costs are negative if solo tasks or bytes were measured too slow.
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
        """Return the measurements required before trying settings other than priority only; empty if none."""
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
        """Return whether it is a kernel's turn; pseudo-random, since kernels may alternate with turns."""
        least = MINOR_KERNEL_SHARE * self.basis.compute()
        major = [other for other, of in self.basis.kernels.items() if of.seconds() >= least]
        return name in major and crc32(f"{name} {self._turn}".encode()) % len(major) == 0

    def _next(
        self, kernel: KernelStatistics, forecasts: Mapping[Setting, Forecast], used: Setting
    ) -> Setting:
        """Return the setting whose turn it is, among the current one and those that may be better."""
        enough = forecasts[used].expected * (1 - INDIFFERENCE_SHARE)
        turns = [one for one in forecasts if one == used or forecasts[one].best < enough]
        return turns[self._turn % len(turns)]

    def _affords(self, tried: Forecast, used: Forecast) -> bool:
        """Return whether a trial stays within the budget even in its worst case."""
        loss = max(0.0, tried.worst - used.expected) / self.basis.steps
        return self.lost + loss <= self.budget * self.elapsed


def safest(forecasts: Mapping[Setting, Forecast]) -> Setting:
    """Return the setting with the best worst case."""
    return min(forecasts, key=lambda setting: forecasts[setting].worst)


# ---- as a table ------------------------------------------------------------------------


def rows(known: OverlapStatistics) -> list[dict[str, Any]]:
    """Return a row for each kernel and measured setting.

    Returns
    -------
    list of dict
        ``kernel``, ``setting`` and ``samples``, the number of measured steps; the speed of ``compute`` during
        communication, relative to its solo speed; the time that communication ``adds`` to a step, relative to
        the step with priority only, and the time of the whole step relative to that one: ``total``, at
        ``best`` and at ``worst``; whether the setting is ``used``, and ``why``. Ratios are None until they
        are known.
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
        return "may be faster, needs more measurements"
    if outlook.best < used.expected:
        return "hardly faster even at its best"
    return "slower even at its best"
