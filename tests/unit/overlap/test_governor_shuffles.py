"""Run the governor on a simulated worker whose shuffles split, then move data in bursts."""

from __future__ import annotations

import pytest

from dask_gpurt.overlap.governor import Decision, Governor
from dask_gpurt.overlap.samples import OFF, PRIORITY, Setting
from dask_gpurt.overlap.statistics import OverlapStatistics
from tests.helpers.curves import CAP4, CAP8, SPLIT, Speeds
from tests.helpers.shuffling_worker import BURSTS, CANDIDATES, STEPS, TASKS, Worker


def calibrated(name: str, seed: int, runs: int) -> OverlapStatistics:
    governor = Governor(CANDIDATES, budget=1.0)
    worker = Worker(name, governor, seed)
    for _ in range(runs // 4):
        worker.leg(TASKS, 0)
        worker.leg(4 * TASKS, 4)
    return governor.known


@pytest.mark.parametrize("name", STEPS)
def test_after_forty_shuffles_it_uses_one_of_the_best_settings(name: str) -> None:
    """Within 3 per cent of the best, and within 1 per cent of no control, whatever the noise."""
    totals = STEPS[name][2]
    for seed in range(10):
        used = Governor(CANDIDATES, calibrated(name, seed, 40)).choose(name).setting
        assert totals[used] <= 1.03 * min(totals.values())
        assert totals[used] <= 1.01 * totals[OFF]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("setting", [PRIORITY, CAP4, OFF])
def test_the_cost_of_a_shuffle_is_measured_however_it_moves(name: str, setting: Setting) -> None:
    compute, communication, totals = STEPS[name]
    governor = Governor({})
    worker = Worker(name, governor, 0)
    governor.choose = lambda kernel: Decision(setting, "the test says so")  # type: ignore[method-assign]
    for _ in range(10):
        worker.leg(TASKS, 0)
        worker.leg(4 * TASKS, 4)
    costs = governor.known.kernels[name].beside[setting].bounds(0.0)
    adds, delays = costs.adds * BURSTS * 1e8, costs.delays or 0.0
    assert max(compute + adds, communication + compute * delays) == pytest.approx(totals[setting], rel=0.05)


def test_a_setting_that_starves_communication_shows_though_tasks_hardly_change() -> None:
    """The shuffles of a leg are late then, and all wait for the last of them when no task runs any more."""
    starved = {
        PRIORITY: (0.92, 0.46),
        OFF: (0.95, 0.35),
        SPLIT: (0.79, 0.79),
        CAP8: (0.9, 0.5),
        CAP4: (0.9, 0.5),
    }
    for seed in range(10):
        governor = Governor(CANDIDATES, budget=1.0)
        worker = Worker("fp32 GEMM", governor, seed)
        worker.compute = worker.communication = 0.2
        worker.speeds = {setting: Speeds(*both) for setting, both in starved.items()}
        for _ in range(24):
            worker.leg(TASKS, 0)
            worker.leg(4 * TASKS, 4)
        assert Governor(CANDIDATES, governor.known).choose("fp32 GEMM").setting == SPLIT
