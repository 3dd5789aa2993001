"""Average the statistics of several workers into those that each of them decides by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.observe.estimators import MeanEstimate, pooled
from dask_gpurt.overlap.governor import Governor
from dask_gpurt.overlap.samples import Setting
from dask_gpurt.overlap.statistics import (
    MINOR_COMPUTE_SHARE,
    KernelStatistics,
    OverlapStatistics,
    average,
    overlaid,
    significant,
)
from dask_gpurt.overlap.stats_sync import AVERAGE_MAX_AGE_S, SharedStatistics
from tests.helpers.shuffling_worker import CANDIDATES, STEPS, TASKS, Worker

samples = st.lists(st.floats(0.1, 10), max_size=30)


def estimated(values: list[float]) -> MeanEstimate:
    estimate = MeanEstimate()
    for value in values:
        estimate.add(value)
    return estimate


def worked(name: str, seconds: float) -> OverlapStatistics:
    known = OverlapStatistics()
    known.kernels[name] = KernelStatistics(estimated([1.0]), work=seconds)
    return known


@given(st.lists(samples, max_size=6))
def test_a_mean_lies_among_what_was_measured_and_is_no_more_certain(measured: list[list[float]]) -> None:
    several = [estimated(values) for values in measured]
    known = [one for one in several if one.count]
    found = pooled(several)
    if not known:
        assert found.plain() == MeanEstimate().plain()
        return
    assert min(one.mean for one in known) <= found.mean * (1 + 1e-9)
    assert found.mean <= max(one.mean for one in known) * (1 + 1e-9)
    assert found.count <= max(one.count for one in known)
    assert found.uncertainty >= min(one.uncertainty for one in known) * (1 - 1e-9)


@given(samples, st.integers(1, 5))
def test_workers_that_have_measured_the_same_know_the_same(values: list[float], workers: int) -> None:
    assert pooled([estimated(values)] * workers).plain() == pytest.approx(estimated(values).plain())


@given(st.permutations([[1.0, 2.0], [3.0], [], [2.0, 2.0, 9.0]]))
def test_the_order_of_reports_makes_no_difference(measured: list[list[float]]) -> None:
    found = pooled(estimated(values) for values in measured)
    assert found.plain() == pytest.approx(
        pooled(map(estimated, [[1.0, 2.0], [3.0], [], [2.0, 2.0, 9.0]])).plain()
    )


def test_a_kernel_that_hardly_counts_is_not_spoken_of() -> None:
    known = worked("join", 1.0)
    known.kernels["rare"] = KernelStatistics(estimated([1.0]), work=MINOR_COMPUTE_SHARE / 2)
    known.kernels["of another program"] = KernelStatistics(estimated([1.0]))
    assert set(significant(known).kernels) == {"join"}


def test_of_what_others_have_not_spoken_of_a_worker_believes_itself() -> None:
    own, agreed = worked("join", 1.0), worked("sort", 2.0)
    own.kernels["sort"] = KernelStatistics()
    basis = overlaid(agreed, own)
    assert basis.kernels["join"] is own.kernels["join"]
    assert basis.kernels["sort"] is agreed.kernels["sort"]


def test_a_speed_that_a_worker_does_not_know_yet_is_no_speed() -> None:
    early, late = worked("fused", 1.0), worked("fused", 1.0)
    late.kernels["fused"].usual = 4.0
    assert average([early, late]).kernels["fused"].usual == 4.0
    assert average([early]).kernels["fused"].usual == 0.0


def test_without_the_others_a_worker_decides_from_its_own() -> None:
    governor = Governor(CANDIDATES, worked("join", 1.0))
    governor.agree(worked("join", 2.0))
    governor.agree(None)
    assert governor.basis is governor.known


def used(name: str, seed: int, share: bool) -> set[Setting]:
    """Return the settings that four workers use after sixteen shuffles."""
    governors = [Governor(CANDIDATES, budget=1.0) for _ in range(4)]
    workers = [Worker(name, governor, 100 * seed + rank) for rank, governor in enumerate(governors)]
    for _ in range(4):
        for worker in workers:
            worker.leg(TASKS, 0)
            worker.leg(4 * TASKS, 4)
        if share:
            together = average([significant(governor.known) for governor in governors])
            for governor in governors:
                governor.agree(together)
    for governor in governors:
        governor.budget = 0.0
    for worker in workers:
        worker.leg(1, 1)  # ends the step in which they receive the average
    return {governor.choose(name).setting for governor in governors}


@pytest.mark.parametrize("name", STEPS)
def test_workers_that_tell_each_other_use_the_same_and_it_is_good(name: str) -> None:
    totals = STEPS[name][2]
    for seed in range(10):
        (setting,) = used(name, seed, share=True)
        assert totals[setting] <= 1.03 * min(totals.values())


def test_by_themselves_some_have_not_found_it_yet() -> None:
    assert all(len(used("sort", seed, share=False)) > 1 for seed in range(3))


# ---- on the scheduler ----------------------------------------------------------------


def test_only_workers_of_the_same_kind_share() -> None:
    scheduler = SharedStatistics()
    scheduler.learned("a", "H200", worked("join", 1.0).plain())
    assert set(scheduler.learned("b", "A100", worked("sort", 1.0).plain())["kernels"]) == {"sort"}


def test_statistics_of_a_worker_are_removed_with_it() -> None:
    now = [0.0]
    scheduler = SharedStatistics(lambda: now[0])
    scheduler.learned("a", "H200", worked("join", 1.0).plain())
    scheduler.remove("a")
    now[0] += AVERAGE_MAX_AGE_S
    assert set(scheduler.learned("b", "H200", worked("sort", 1.0).plain())["kernels"]) == {"sort"}


def test_it_is_put_together_anew_only_now_and_then() -> None:
    now = [0.0]
    scheduler = SharedStatistics(lambda: now[0])
    first = scheduler.learned("a", "H200", worked("join", 1.0).plain())
    assert scheduler.learned("b", "H200", worked("sort", 1.0).plain()) is first
    now[0] += AVERAGE_MAX_AGE_S
    assert set(scheduler.learned("b", "H200", worked("sort", 1.0).plain())["kernels"]) == {"join", "sort"}


def test_invalid_statistics_are_refused() -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        SharedStatistics().learned("a", "H200", {"kernels": 3})
