"""The governor beside simulated kernels: it finds the best setting, and finding it costs next to nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest
from curves import CANDIDATES, CAP4, CAP8, CURVES, SPLIT, TASKS, UNCONTROLLED, Curve, Steps
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.overlap.estimate import Estimate
from dask_gpurt.overlap.governor import FEW, Fixed, Governor
from dask_gpurt.overlap.knowledge import MOST_KERNELS, PRIORITY, STALE, Knowledge, Sample, Setting
from dask_gpurt.overlap.objective import Speeds, Work, side_by_side

each_kernel = pytest.mark.parametrize("kernel", CURVES)
noises = pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
#: Steps after which it has found what it will use: of 20 tasks each, so some thousand samples.
ENOUGH = 120


def governed(kernel: str, *, known: Knowledge | None = None, **options: float) -> Steps:
    return Steps(Governor(CANDIDATES, known), kernel, CURVES[kernel], **options)  # type: ignore[arg-type]


# ---- the objective -------------------------------------------------------------------

speeds = st.builds(Speeds, st.floats(0.05, 1), st.floats(0.05, 1))
work = st.builds(Work, st.floats(0.1, 10), st.floats(0.1, 10))


@given(work, speeds)
def test_a_step_takes_at_least_the_longer_of_the_two(work: Work, speeds: Speeds) -> None:
    course = side_by_side(work, speeds)
    assert course.total >= max(work.compute, work.communication) - 1e-9
    assert course.together <= course.total + 1e-9


@given(work, speeds)
def test_a_step_is_the_closed_form(work: Work, speeds: Speeds) -> None:
    waits = (
        work.compute + work.communication * (1 - speeds.compute) / speeds.communication,
        work.communication + work.compute * (1 - speeds.communication) / speeds.compute,
    )
    pays = speeds.compute + speeds.communication > 1
    assert side_by_side(work, speeds).total == pytest.approx(max(waits) if pays else min(waits))


@given(work, speeds, st.floats(1, 2), st.floats(1, 2))
def test_more_speed_is_never_slower_where_overlap_pays(work: Work, slow: Speeds, c: float, m: float) -> None:
    if slow.compute + slow.communication < 1:
        return
    fast = Speeds(min(1.0, slow.compute * c), min(1.0, slow.communication * m))
    assert side_by_side(work, fast).total <= side_by_side(work, slow).total + 1e-9


def test_a_slower_kernel_pays_only_where_communication_is_waited_for() -> None:
    gentle, greedy = Speeds(0.8, 0.4), Speeds(0.6, 0.9)
    mostly_compute, mostly_communication = Work(10, 1), Work(1, 10)
    assert side_by_side(mostly_compute, gentle).together > 0
    assert side_by_side(mostly_communication, greedy).total < side_by_side(mostly_communication, gentle).total
    slowed = Speeds(0.3, 0.9)
    assert side_by_side(mostly_compute, slowed).total > side_by_side(mostly_compute, gentle).total
    assert side_by_side(mostly_communication, slowed).total < side_by_side(mostly_communication, gentle).total


# ---- convergence ---------------------------------------------------------------------


@each_kernel
@noises
@pytest.mark.parametrize("communication", [0.5, 1.0, 2.0])
def test_it_comes_within_3_percent_of_the_best_fixed_setting(
    kernel: str, noise: float, communication: float
) -> None:
    steps = governed(kernel, communication=communication, noise=noise)
    steps.run(ENOUGH)
    assert steps.run(20) <= 1.03 * 20 * steps.best()


@each_kernel
@noises
def test_it_is_never_slower_than_no_control_by_more_than_1_percent(kernel: str, noise: float) -> None:
    steps = governed(kernel, noise=noise)
    without = steps.under(UNCONTROLLED[kernel])
    taken = 0.0
    for count in range(1, 60):
        taken += steps.run(1)
        assert taken <= 1.01 * count * without


def test_a_cap_that_ruins_a_join_is_given_up_after_a_few_tasks() -> None:
    steps = governed("join")
    steps.run(ENOUGH)
    assert steps.seconds[CAP4] < 0.01 * sum(steps.seconds.values())


def test_a_cap_that_doubles_overlap_is_kept() -> None:
    steps = governed("elementwise")
    steps.run(ENOUGH)
    before = dict(steps.seconds)
    steps.run(10)
    assert {setting for setting, seconds in steps.seconds.items() if seconds > before[setting]} <= {
        CAP4,
        None,
    }


def test_nothing_is_tried_where_nothing_is_to_be_gained() -> None:
    """With next to no communication a step takes as long as its compute, whatever confines it."""
    steps = governed("elementwise", communication=0.002, noise=0.02)
    steps.run(30)
    assert set(steps.seconds) <= {PRIORITY, None}


def test_a_kernel_that_nobody_knows_runs_with_priority_only() -> None:
    decision = Governor(CANDIDATES).choose("new")
    assert decision.setting == PRIORITY
    assert "to be measured" in decision.why


def test_without_candidates_there_is_priority_only() -> None:
    steps = Steps(Governor({}), "join", {PRIORITY: CURVES["join"][PRIORITY]})
    steps.run(20)
    assert set(steps.seconds) == {PRIORITY, None}


def test_a_setting_under_which_nothing_has_moved_yet_is_no_reason_to_fail() -> None:
    governor = Governor({CAP4: 0.25}, budget=1.0)
    for _ in range(5):
        governor.learn(Sample(1.0, "join", 1.0))
        governor.learn(Sample(1.0, moved=8.0))
        governor.learn(Sample(1.2, "join", 1.0, PRIORITY, 6.0))
    assert governor.choose("join").setting == CAP4
    governor.learn(Sample(1.2, "join", 1.0, CAP4, 0.0))
    assert set(governor.outlooks(governor.known.kernels["join"])) == {PRIORITY, CAP4}


def test_fixed_is_fixed() -> None:
    steps = Steps(Fixed(CAP8), "join", CURVES["join"])
    assert steps.run(1) == pytest.approx(steps.under(CURVES["join"][CAP8]), rel=0.05)
    assert set(steps.seconds) <= {CAP8, None}


# ---- regret --------------------------------------------------------------------------


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Any response in which a confined kernel keeps its share at least, and communication loses nothing."""
    reference = Speeds(draw(st.floats(0.1, 1)), draw(st.floats(0.2, 1)))
    confined = {
        setting: Speeds(
            draw(st.floats(keeps * reference.compute, 1)), draw(st.floats(reference.communication, 1))
        )
        for setting, keeps in CANDIDATES.items()
    }
    return {PRIORITY: reference, **confined}


@settings(max_examples=40, deadline=None)
@given(curves(), st.floats(0.25, 4), st.floats(0, 0.25), st.integers(1, 40), st.integers(0, 2**32))
def test_trying_costs_at_most_2_percent_of_any_run(
    curve: Curve, communication: float, noise: float, steps: int, seed: int
) -> None:
    run = Steps(Governor(CANDIDATES), "any", curve, communication, noise, seed)
    taken = 0.0
    for count in range(1, steps + 1):
        taken += run.run(1)
        assert taken <= 1.02 * count * run.under(curve[PRIORITY])


@settings(max_examples=30, deadline=None)
@given(curves(), st.floats(0.25, 4), st.floats(0, 0.05), st.integers(0, 2**32))
def test_a_whole_run_is_slower_than_priority_only_by_at_most_1_percent(
    curve: Curve, communication: float, noise: float, seed: int
) -> None:
    run = Steps(Governor(CANDIDATES), "any", curve, communication, noise, seed)
    assert run.run(40) <= 1.01 * 40 * run.under(curve[PRIORITY])


def test_the_books_are_what_was_lost() -> None:
    """Every loss against priority only is a loss by trying, since that is the best for a join."""
    steps = governed("join", noise=0.02)
    taken = steps.run(60)
    governor = steps.governor
    assert isinstance(governor, Governor)
    assert governor.lost == pytest.approx(taken - 60 * steps.best(), rel=0.5)
    assert governor.lost <= 0.02 * governor.elapsed


# ---- drift ---------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_what_changes_is_learnt_anew(noise: float) -> None:
    steps = governed("elementwise", noise=noise)
    steps.run(ENOUGH)
    assert steps.run(10) <= 1.03 * 10 * steps.best()
    steps.curve = CURVES["join"]
    steps.run(ENOUGH)
    assert steps.run(10) <= 1.03 * 10 * steps.best()


def test_a_setting_that_was_bad_gets_another_chance() -> None:
    """A change that does not show in what is used is found since what has not been used is forgotten."""
    steps = governed("join", noise=0.02)
    steps.run(ENOUGH)
    steps.curve = {**CURVES["join"], CAP4: Speeds(0.9, 0.95)}
    steps.run(STALE // TASKS + ENOUGH // 2)
    assert steps.run(10) <= 1.03 * 10 * steps.best()


def test_noise_alone_is_no_change() -> None:
    forgotten = []
    governor = Governor(CANDIDATES)
    steps = Steps(governor, "groupby", CURVES["groupby"], noise=0.15)
    learn = governor.learn
    governor.learn = lambda sample: forgotten.append(learn(sample))  # type: ignore[method-assign, func-returns-value]
    steps.run(ENOUGH)
    assert len(forgotten) >= ENOUGH * TASKS
    assert set(forgotten) == {None}


@given(st.floats(0.1, 1e9), st.sampled_from([0.6, 1.6]))
def test_a_mean_that_jumps_is_noticed(mean: float, jump: float) -> None:
    estimate = Estimate()
    assert not any(estimate.add(mean * (1 + 0.02 * (-1) ** i)) for i in range(100))
    assert any(estimate.add(mean * jump) for _ in range(20))


def test_a_few_outliers_are_no_change() -> None:
    estimate = Estimate()
    for _ in range(100):
        estimate.add(1.0)
    assert not any(estimate.add(50.0) for _ in range(3))


@given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=100))
def test_an_estimate_is_the_mean(values: list[float]) -> None:
    estimate = Estimate()
    for value in values:
        estimate.add(value)
    assert estimate.mean == pytest.approx(sum(values) / len(values))
    before = estimate.uncertainty
    estimate.add(estimate.mean)
    assert estimate.uncertainty < before


# ---- several kernels, and what is remembered --------------------------------------------


def test_each_kernel_gets_its_own_setting() -> None:
    governor = Governor(CANDIDATES)
    kinds = [Steps(governor, name, CURVES[name], noise=0.03) for name in ("gemm", "elementwise", "join")]
    for _ in range(ENOUGH):
        for steps in kinds:
            steps.run(1)
    used = {steps.kernel: governor.choose(steps.kernel).setting for steps in kinds}
    assert used["gemm"] == SPLIT
    assert used["elementwise"] == CAP4
    assert CURVES["join"][used["join"]].compute >= 0.98 * CURVES["join"][PRIORITY].compute


@each_kernel
def test_what_was_learnt_is_of_use_in_the_next_run(kernel: str) -> None:
    first = governed(kernel)
    first.run(ENOUGH)
    assert isinstance(first.governor, Governor)
    remembered = json.loads(json.dumps(first.governor.known.plain()))
    second = governed(kernel, known=Knowledge.of(remembered), seed=1)
    assert second.run(5) <= 1.03 * 5 * second.best()


def test_knowledge_survives_json() -> None:
    steps = governed("gemm")
    steps.run(30)
    assert isinstance(steps.governor, Governor)
    plain = steps.governor.known.plain()
    assert Knowledge.of(json.loads(json.dumps(plain))).plain() == plain


@pytest.mark.parametrize("setting", [PRIORITY, CAP4, SPLIT, Setting(2, 100)])
def test_a_setting_survives_its_text(setting: Setting) -> None:
    assert Setting.parse(str(setting)) == setting


@pytest.mark.parametrize("text", ["", "residency", "residency x", "4 blocks", "residency 4 116 SMs"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Setting.parse(text)


def test_only_so_many_kernels_are_known() -> None:
    known = Knowledge()
    for number in range(MOST_KERNELS + 10):
        for _ in range(2 if number < 5 else 1):
            known.add(Sample(1.0, f"kernel-{number}", 1.0))
    assert len(known.kernels) == MOST_KERNELS
    assert {f"kernel-{number}" for number in range(5)} <= set(known.kernels)


def test_what_was_not_the_same_throughout_counts_as_work_only() -> None:
    known = Knowledge()
    sample = Sample(1.0, "kernel", 1.0, moved=1e9)
    for _ in range(FEW):
        known.add(sample)
    before = known.kernels["kernel"].beside[PRIORITY].compute.plain()
    known.add(dataclasses.replace(sample, seconds=100.0, steady=False))
    assert known.kernels["kernel"].beside[PRIORITY].compute.plain() == before
    assert known.kernels["kernel"].work == known.moved / 1e9 == FEW + 1
