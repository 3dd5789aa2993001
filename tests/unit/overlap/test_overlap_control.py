"""Confine and measure tasks beside a shuffle, with the test's own clock and link."""

from __future__ import annotations

import pytest

from dask_gpurt.observe import Decisions, Metrics
from dask_gpurt.observe.decisions import MAX_DECISIONS
from dask_gpurt.overlap.actuators import ResidencyCaps
from dask_gpurt.overlap.control import Control
from dask_gpurt.overlap.governor import Decision, Governor
from dask_gpurt.overlap.occupancy import Residency
from dask_gpurt.overlap.samples import PRIORITY, OverlapSample, Setting, SoloSample, StepSample
from tests.helpers.actuators import Hand, Launches
from tests.helpers.curves import CAP4, CAP8, CURVES, SPLIT, TASKS, Curve


class Deciding:
    """Decide as the test says, and record all samples."""

    def __init__(self, **settings: Setting):
        self.settings = settings
        self.alone: list[SoloSample] = []
        self.steps: list[StepSample] = []
        self.forgets: str | None = None

    def choose(self, kernel: str) -> Decision:
        return Decision(self.settings.get(kernel, PRIORITY), "the test says so")

    def learn(self, alone: SoloSample) -> str | None:
        self.alone.append(alone)
        return self.forgets

    def learn_step(self, step: StepSample) -> str | None:
        self.steps.append(step)
        return self.forgets


class Bench:
    """Fake a worker without Dask: the test advances time and moves bytes."""

    def __init__(self, hand: Hand | None = None, governor: Governor | None = None, **settings: Setting):
        self.now = self.moved = 0.0
        self.hand = hand or Hand()
        self.deciding = Deciding(**settings)
        self.decisions, self.metrics = Decisions(lambda: self.now), Metrics()
        self.control = Control(
            governor or self.deciding,
            self.hand,
            lambda: self.moved,
            lambda: self.now,
            self.decisions,
            self.metrics,
        )

    def passes(self, seconds: float, nbytes: float = 0) -> None:
        self.now += seconds
        self.moved += nbytes

    def task(self, kernel: str, seconds: float, nbytes: float = 0) -> None:
        self.control.begins(kernel, kernel, 10.0)
        self.passes(seconds, nbytes)
        self.control.ends(kernel)


def test_a_task_is_confined_while_a_run_is_in_flight_and_no_longer() -> None:
    bench = Bench(join=CAP4)
    bench.control.begins("a", "join", 1)
    assert bench.hand.confined == PRIORITY
    bench.control.in_flight(1, 0)
    assert bench.hand.confined == CAP4
    bench.control.in_flight(0, 3)
    assert bench.hand.confined == CAP4
    bench.control.in_flight(0, 0)
    assert bench.hand.confined == PRIORITY
    bench.control.in_flight(1, 0)
    bench.control.ends("a")
    assert bench.hand.confined == PRIORITY


def test_two_tasks_are_confined_only_to_what_both_want() -> None:
    bench = Bench(join=CAP8, sort=CAP8)
    bench.control.in_flight(1, 0)
    bench.control.begins("a", "join", 1)
    bench.control.begins("b", "sort", 1)
    assert bench.hand.confined == CAP8
    bench.control.begins("c", "gemm", 1)
    assert bench.hand.confined == PRIORITY
    bench.control.ends("c")
    assert bench.hand.confined == CAP8


def test_the_same_setting_is_not_applied_again() -> None:
    bench = Bench()
    bench.control.in_flight(1, 0)
    for _ in range(10):
        bench.task("groupby", 1)
    assert bench.hand.calls == 0


def test_tasks_alone_and_all_of_a_step_are_measured() -> None:
    bench = Bench(join=CAP4)
    bench.task("join", 1.0)
    bench.control.in_flight(1, 0)
    bench.passes(0.5, 100)
    bench.task("join", 2.0, 300)
    bench.task("join", 3.0, 200)
    bench.task("sort", 1.0)
    bench.control.in_flight(0, 2)
    bench.passes(0.25, 10)
    bench.control.in_flight(0, 0)
    bench.passes(100)
    bench.task("join", 1.5)
    assert bench.deciding.steps == []
    bench.control.in_flight(1, 0)
    assert bench.deciding.alone == [SoloSample("join", 10.0, 1.0), SoloSample("join", 10.0, 1.5)]
    ran = {"join": OverlapSample(20.0, 5.0, CAP4), "sort": OverlapSample(10.0, 1.0)}
    assert bench.deciding.steps == [StepSample(0.75, 610, ran)]
    assert bench.deciding.steps[0].seconds == 6.75


def test_a_step_ends_between_tasks() -> None:
    """A run is always in flight, so the next step begins in the middle of a task."""
    bench = Bench()
    bench.control.in_flight(1, 0)
    for runs in (2, 1):
        bench.control.begins("a", "join", 10.0)
        bench.passes(1.0, 100)
        bench.control.in_flight(runs, 0)
        bench.passes(1.0, 100)
        bench.control.ends("a")
        assert bench.deciding.steps == [StepSample(0.0, 200, {"join": OverlapSample(10.0, 2.0)})]


def test_a_task_that_only_a_part_of_a_step_was_beside_counts_whole() -> None:
    """Communication has added the difference to the task's duration alone."""
    bench = Bench()
    bench.control.begins("a", "join", 10)
    bench.passes(1)
    bench.control.in_flight(1, 0)
    bench.passes(1, 100)
    bench.control.in_flight(0, 0)
    bench.passes(1)
    bench.control.ends("a")
    bench.control.close()
    assert bench.deciding.alone == []
    assert bench.deciding.steps == [StepSample(0.0, 100, {"join": OverlapSample(10, 3.0)})]


def test_tasks_that_share_the_device_spoil_each_others_measurement() -> None:
    bench = Bench()
    for runs in (0, 1):
        bench.control.in_flight(runs, 0)
        bench.control.begins("a", "join", 1)
        bench.control.begins("b", "sort", 1)
        bench.passes(1)
        bench.control.ends("a")
        bench.control.ends("b")
    bench.control.close()
    assert bench.deciding.alone == []
    assert [step.steady for step in bench.deciding.steps] == [False]


def test_where_there_is_always_a_task_steps_end_all_the_same() -> None:
    bench = Bench()
    bench.control.in_flight(1, 0)
    bench.control.begins(0, "join", 1)
    for number in range(1, 10):
        bench.control.begins(number, "join", 1)
        bench.passes(1, 1)
        bench.control.ends(number - 1)
        bench.control.in_flight(1 + number % 2, 0)
    assert len(bench.deciding.steps) > 3
    assert not any(step.steady for step in bench.deciding.steps)


def test_a_setting_that_was_not_in_force_throughout_is_not_measured() -> None:
    bench = Bench(join=CAP4)
    bench.control.in_flight(1, 0)
    bench.control.begins("a", "join", 1)
    bench.control.begins("b", "sort", 1)
    bench.control.ends("b")
    bench.passes(1, 1)
    bench.control.ends("a")
    bench.control.close()
    assert not bench.deciding.steps[-1].steady


def test_pulls_end_no_step() -> None:
    bench = Bench()
    bench.control.in_flight(1, 1)
    for pulls in (2, 1, 2, 1):
        bench.passes(0.25, 25)
        bench.control.in_flight(1, pulls)
    bench.control.in_flight(0, 0)
    assert bench.deciding.steps == []
    bench.control.close()
    assert bench.deciding.steps == [StepSample(1.0, 100)]


def test_a_task_that_failed_teaches_nothing() -> None:
    bench = Bench()
    for runs in (0, 1):
        bench.control.in_flight(runs, 0)
        bench.control.begins("a", "join", 1)
        bench.passes(1, runs)
        bench.control.ends("a", done=False)
    bench.control.ends("never begun")
    bench.control.close()
    assert bench.deciding.alone == []
    assert not any(step.steady for step in bench.deciding.steps)


def test_each_run_is_a_step() -> None:
    bench = Bench()
    for runs, pulls in ((1, 0), (1, 4), (2, 4), (1, 4), (0, 0), (1, 0)):
        bench.control.in_flight(runs, pulls)
        bench.passes(1, 1)
    bench.control.close()
    assert len(bench.deciding.steps) == 3


def test_a_setting_that_the_actuator_refuses_is_reported_once_and_leaves_priority() -> None:
    bench = Bench(Hand(refuses=CAP4), join=CAP4)
    bench.control.in_flight(1, 0)
    for _ in range(3):
        bench.task("join", 1, 1)
    fallbacks = bench.metrics.snapshot()["fallbacks"]
    said = "residency 4 is too much for this device"
    assert fallbacks == {
        "overlap.unconfined": {"text": "compute is not confined", "reason": said, "count": 1}
    }
    assert bench.hand.confined == PRIORITY
    bench.control.close()
    assert not any(step.steady for step in bench.deciding.steps)


def test_closing_confines_nothing_any_more() -> None:
    bench = Bench(join=CAP4)
    bench.control.in_flight(1, 0)
    bench.control.begins("a", "join", 1)
    bench.control.close()
    assert bench.hand.confined == PRIORITY


@pytest.mark.parametrize(("kernel", "found"), [("elementwise", CAP4), ("join", PRIORITY)])
def test_the_governor_finds_its_setting_by_what_is_reported(kernel: str, found: Setting) -> None:
    hand = Hand()
    bench = Bench(hand, Governor(hand.settings(), budget=1.0))
    for _ in range(60):
        confined = one_step(bench, kernel, CURVES[kernel])
    assert set(confined) == {found}


def one_step(bench: Bench, kernel: str, curve: Curve) -> list[Setting]:
    """Run as many seconds of tasks as of communication; returns the settings of the tasks beside it."""
    left, confined = float(TASKS), []
    bench.control.in_flight(1, 0)
    for _ in range(TASKS):
        bench.control.begins("task", kernel, 1.0)
        work = 1.0
        if left:
            confined.append(bench.hand.confined)
            speeds = curve[bench.hand.confined]
            together = min(work / speeds.compute, left / speeds.communication)
            bench.passes(together, together * speeds.communication)
            left -= together * speeds.communication
            work -= together * speeds.compute
            if left < 1e-9:
                left = 0.0
                bench.control.in_flight(0, 0)
        bench.passes(max(0.0, work))
        bench.control.ends("task")
    bench.passes(left, left)
    bench.control.in_flight(0, 0)
    return confined


# ---- the ledger ----------------------------------------------------------------------


def test_decisions_are_entered_when_they_change() -> None:
    bench = Bench(join=CAP4)
    bench.control.in_flight(1, 0)
    for _ in range(3):
        bench.task("join", 1, 1)
    bench.deciding.settings["join"] = CAP8
    bench.task("join", 1, 1)
    entries = bench.decisions.snapshot()
    assert [(entry["at"], entry["decided"]) for entry in entries] == [(0, "residency 4"), (3, "residency 8")]
    assert {entry["subject"] for entry in entries} == {"join"}
    assert bench.metrics.snapshot()["counters"]["overlap.decisions"] == 2


def test_forgotten_kernels_are_recorded_as_decisions() -> None:
    bench = Bench()
    bench.deciding.forgets = "join"
    bench.task("join", 1)
    (entry,) = bench.decisions.snapshot()
    assert (entry["subject"], entry["decided"]) == ("join", "forgotten")


def test_the_ledger_keeps_the_last_decisions_only() -> None:
    decisions = Decisions()
    for number in range(2 * MAX_DECISIONS):
        decisions.note(f"kernel-{number}", "residency 4", "why not")
    entries = decisions.snapshot()
    assert len(entries) == MAX_DECISIONS
    assert entries[-1]["subject"] == f"kernel-{2 * MAX_DECISIONS - 1}"


# ---- residency -----------------------------------------------------------------------


def test_a_residency_is_a_cap_for_all_kernels() -> None:
    launches = Launches()
    hand = ResidencyCaps(Residency(launches))
    hand.apply(CAP4)
    assert (launches.on, launches.cap) == (True, 4)
    hand.clear()
    assert not launches.on
    assert set(hand.settings()) >= {CAP8, CAP4}
    assert all(0 < keeps <= 1 for keeps in hand.settings().values())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Setting(residency=33), "at most the 32 that an SM of this device holds"),
        (SPLIT, "116 SMs is not possible"),
    ],
)
def test_impossible_settings_are_refused(setting: Setting, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ResidencyCaps(Residency(Launches())).apply(setting)
