"""Run the governor on simulated kernels: it finds the best setting at almost no cost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.observe.estimators import MeanEstimate
from dask_gpurt.overlap import statistics
from dask_gpurt.overlap.governor import MIN_STEPS, TRIAL_BUDGET_SHARE, Fixed, Governor
from dask_gpurt.overlap.samples import OFF, PRIORITY, OverlapSample, Setting, SoloSample, StepSample
from dask_gpurt.overlap.statistics import (
    MAX_KERNELS,
    MIN_SOLO_SAMPLES,
    MIN_SOLO_STEPS,
    STALE_STEPS,
    OverlapStatistics,
)
from tests.helpers.curves import (
    CANDIDATES,
    CAP4,
    CAP8,
    CURVES,
    LINK,
    SPLIT,
    UNCONTROLLED,
    Curve,
    Speeds,
    Steps,
    Work,
    plain,
    side_by_side,
)
from tests.helpers.slow import slow

each_kernel = pytest.mark.parametrize("kernel", CURVES)
#: Noise of a step; 3 to 8 per cent on H200s.
noises = pytest.mark.parametrize("noise", [slow(0.0), 0.05, slow(0.1)])
#: Steps until the choice has settled, with and without an unlimited budget for trials.
CALIBRATED, ENOUGH = 120, 1200
#: Budget of a calibration: all of its time may be lost to trials.
FREE = 1.0


def governed(
    kernel: str,
    *,
    known: OverlapStatistics | None = None,
    budget: float = TRIAL_BUDGET_SHARE,
    **options: float,
) -> Steps:
    return Steps(Governor(CANDIDATES, known, budget), kernel, CURVES[kernel], **options)  # type: ignore[arg-type]


# ---- the simulated kernels --------------------------------------------------------------

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


# ---- measurements -----------------------------------------------------------------------


@given(work, speeds)
def test_a_step_costs_what_communication_adds_to_compute_alone(work: Work, speeds: Speeds) -> None:
    """However much of either side is left when the other is done."""
    known, run = OverlapStatistics(), Steps(Fixed(PRIORITY), "join", {PRIORITY: speeds}, noise=0.0)
    run.communication = work.communication / work.compute
    for _ in range(MIN_SOLO_SAMPLES):
        known.add(SoloSample("join", 1.0, run.task))
    run.governor.learn_step = known.add_step  # type: ignore[method-assign]
    total = run.run(1)
    measured = known.kernels["join"].beside[PRIORITY].adds.mean
    if speeds.compute + speeds.communication >= 1:
        assert measured * known.moved == pytest.approx(total - run.work.compute, abs=1e-6 * total)


@given(work, speeds)
def test_steps_in_the_middle_tell_what_is_waited_for_at_the_end(work: Work, speeds: Speeds) -> None:
    """Steps of full overlap, and steps of communication alone, predict the duration of a whole step."""
    if speeds.compute + speeds.communication < 1:
        return
    known = OverlapStatistics()
    for _ in range(MIN_SOLO_SAMPLES):
        known.add(SoloSample("join", 1e-9, 1e-9))
    for _ in range(MIN_SOLO_STEPS):
        known.add_step(StepSample(1.0, LINK))
    known.add_step(StepSample(0.0, speeds.communication * LINK, {"join": OverlapSample(speeds.compute, 1.0)}))
    known.kernels["join"].work, known.moved = work.compute, work.communication * LINK
    total = known.total(known.kernels["join"].beside[PRIORITY].bounds(0.0))
    assert total == pytest.approx(side_by_side(work, speeds).total)


def test_the_speed_that_costs_are_against_is_that_alone_once_it_is_known() -> None:
    known = OverlapStatistics()
    for _ in range(3):
        known.add_step(StepSample(0.0, 1e9, {"join": OverlapSample(10.0, 20.0)}))
    assert known.kernels["join"].speed() == 0.5
    for _ in range(MIN_SOLO_SAMPLES):
        known.add(SoloSample("join", 1.0, 1.0))
    assert known.kernels["join"].speed() == 1.0
    assert not known.kernels["join"].beside


# ---- convergence ---------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize(
    ("noise", "communication"), [slow(0.0, 1.0), (0.05, 1.0), (0.1, 0.5), slow(0.1, 1.0), (0.1, 2.0)]
)
def test_it_comes_within_3_percent_of_the_best_fixed_setting(
    kernel: str, noise: float, communication: float
) -> None:
    steps = governed(kernel, communication=communication, noise=noise)
    steps.run(ENOUGH)
    assert steps.run(20) <= 1.03 * 20 * steps.best()


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_a_calibration_finds_the_best_fixed_setting_soon(noise: float) -> None:
    """After 60 steps nine in ten runs are within 3 per cent of the best, and all are close."""
    found = []
    for kernel in CURVES:
        for seed in range(10):
            calibration = governed(kernel, budget=FREE, noise=noise, seed=seed)
            calibration.run(CALIBRATED // 2)
            after = governed(kernel, known=calibration.governor.known)  # type: ignore[attr-defined]
            found.append(after.run(1) / after.best())
    assert sum(ratio <= 1.03 for ratio in found) >= 0.9 * len(found)
    assert max(found) <= 1.12


@each_kernel
@noises
def test_it_is_never_slower_than_no_control_by_more_than_1_percent(kernel: str, noise: float) -> None:
    """In the long run: unknown kernels run with priority, which slows a few of them."""
    steps = governed(kernel, noise=noise)
    without, usual = (steps.under(of) for of in (UNCONTROLLED[kernel], CURVES[kernel][PRIORITY]))
    taken = 0.0
    for count in range(1, 60):
        taken += steps.run(1)
        assert taken <= 1.01 * count * max(usual, without)
    steps.run(ENOUGH)
    assert steps.run(20) <= 1.01 * 20 * without


def test_a_kernel_that_priority_slows_gets_none() -> None:
    steps = governed("strings", noise=0.05)
    steps.run(ENOUGH)
    assert steps.governor.choose("strings").setting == OFF


def test_a_cap_that_ruins_a_join_is_given_up_after_a_few_tries() -> None:
    steps = governed("join")
    steps.run(ENOUGH)
    assert steps.seconds.get(CAP4, 0.0) < 0.01 * sum(steps.seconds.values())


def test_a_cap_that_doubles_overlap_is_kept() -> None:
    steps = governed("elementwise")
    steps.run(ENOUGH)
    before = dict(steps.seconds)
    steps.run(10)
    assert {setting for setting, seconds in steps.seconds.items() if seconds > before[setting]} == {CAP4}


def test_nothing_is_tried_where_nothing_is_to_be_gained() -> None:
    """With next to no communication a step takes as long as its compute, under any setting."""
    steps = governed("elementwise", budget=FREE, communication=0.002, noise=0.0)
    steps.run(30)
    assert set(steps.seconds) == {PRIORITY}


def test_an_unknown_kernel_runs_with_priority_only() -> None:
    decision = Governor(CANDIDATES).choose("new")
    assert decision.setting == PRIORITY
    assert "to be measured" in decision.why


def test_without_candidates_there_is_priority_only() -> None:
    steps = Steps(Governor({}), "join", {PRIORITY: CURVES["join"][PRIORITY]})
    steps.run(20)
    assert set(steps.seconds) == {PRIORITY}


def test_a_setting_holds_for_a_whole_step() -> None:
    """A run splits, moves and waits: settings used in different parts of a run cannot be compared."""
    governor = governed("join", budget=FREE).governor
    Steps(governor, "join", CURVES["join"]).run(MIN_STEPS)
    chosen = []
    for _ in range(12):
        (setting,) = {governor.choose("join").setting for _ in range(50)}
        chosen.append(setting)
        governor.learn_step(StepSample(1.0, 1e9, {"join": OverlapSample(1.0, 1.0, setting)}))
    assert len(set(chosen)) > 1


def test_workers_in_the_same_runs_try_the_same_at_once() -> None:
    one, other = (governed("groupby", budget=FREE, noise=0.02, seed=seed) for seed in (1, 2))
    same = 0
    for _ in range(60):
        same += one.governor.choose("groupby") == other.governor.choose("groupby")
        one.run(1)
        other.run(1)
    assert same > 30


def test_one_kernel_is_tried_at_a_time_and_others_learn_nothing_of_it() -> None:
    governor = Governor(CANDIDATES, budget=FREE)
    usual = {name: OverlapSample(1.0, 1.2) for name in ("join", "sort")}
    for _ in range(MIN_STEPS):
        governor.learn_step(StepSample(1.0, 1e9, usual))
    for _ in range(10):
        settings = {name: governor.choose(name).setting for name in usual}
        tried = [name for name, setting in settings.items() if setting != PRIORITY]
        assert len(tried) <= 1
        before = {name: governor.known.kernels[name].steps for name in usual}
        governor.learn_step(
            StepSample(
                1.0, 1e9, {name: OverlapSample(1.0, 1.2, setting) for name, setting in settings.items()}
            )
        )
        learnt = {name for name in usual if governor.known.kernels[name].steps > before[name]}
        assert learnt == set(tried or usual)


def test_a_step_in_which_nothing_was_moved_says_nothing() -> None:
    known = OverlapStatistics()
    known.add_step(StepSample(1.0, 0.0, {"join": OverlapSample(1.0, 1.0)}))
    assert not known.kernels["join"].beside


def test_fixed_is_fixed() -> None:
    steps = Steps(Fixed(CAP8), "join", CURVES["join"])
    assert steps.run(1) == pytest.approx(steps.under(CURVES["join"][CAP8]), rel=0.05)
    assert set(steps.seconds) == {CAP8}


# ---- regret --------------------------------------------------------------------------


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Draw responses in which confined compute keeps at least its share, and communication loses nothing."""
    reference = Speeds(draw(st.floats(0.1, 1)), draw(st.floats(0.2, 1)))
    if reference.compute + reference.communication < 1:
        reference = Speeds(1 - reference.communication, reference.communication)
    confined = {
        setting: Speeds(
            draw(st.floats(keeps * reference.compute, 1)), draw(st.floats(reference.communication, 1))
        )
        for setting, keeps in CANDIDATES.items()
    }
    return {PRIORITY: reference, **confined, OFF: plain(draw(st.floats(0, 1)))}


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
    """Priority is the best setting for a join, so any time lost against it is lost to trials."""
    steps = governed("join", noise=0.02)
    taken = steps.run(ENOUGH)
    governor = steps.governor
    assert isinstance(governor, Governor)
    assert governor.lost == pytest.approx(taken - ENOUGH * steps.best(), rel=0.5)
    assert 0 < governor.lost <= 0.02 * governor.elapsed


# ---- drift ---------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_kernel_that_changes_is_learnt_anew(noise: float) -> None:
    steps = governed("elementwise", noise=noise)
    steps.run(ENOUGH)
    assert steps.run(10) <= 1.03 * 10 * steps.best()
    steps.curve = CURVES["join"]
    steps.run(ENOUGH)
    assert steps.run(10) <= 1.03 * 10 * steps.best()


def test_a_setting_that_was_bad_gets_another_chance() -> None:
    """Changes of an unused setting are detected because its old measurements become stale."""
    steps = governed("join", noise=0.02)
    steps.run(ENOUGH)
    steps.curve = {**CURVES["join"], CAP4: Speeds(0.9, 0.95)}
    steps.run(STALE_STEPS + ENOUGH)
    assert steps.run(10) <= 1.03 * 10 * steps.best()


def test_noise_alone_is_no_change() -> None:
    forgotten = []
    governor = Governor(CANDIDATES)
    steps = Steps(governor, "groupby", CURVES["groupby"], noise=0.15)
    learn = governor.learn_step
    governor.learn_step = lambda step: forgotten.append(learn(step))  # type: ignore[method-assign, func-returns-value]
    steps.run(ENOUGH)
    assert forgotten == ENOUGH * [None]


@given(st.floats(0.1, 1e9), st.sampled_from([0.6, 1.6]))
def test_a_mean_that_jumps_is_noticed(mean: float, jump: float) -> None:
    estimate = MeanEstimate()
    assert not any(estimate.add(mean * (1 + 0.02 * (-1) ** i)) for i in range(100))
    assert any(estimate.add(mean * jump) for _ in range(20))


def test_a_few_outliers_are_no_change() -> None:
    estimate = MeanEstimate()
    for _ in range(100):
        estimate.add(1.0)
    assert not any(estimate.add(50.0) for _ in range(3))


@given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=100))
def test_an_estimate_is_the_mean(values: list[float]) -> None:
    estimate = MeanEstimate()
    for value in values:
        estimate.add(value)
    assert estimate.mean == pytest.approx(sum(values) / len(values))
    before = estimate.uncertainty
    estimate.add(estimate.mean)
    assert estimate.uncertainty < before


def test_a_part_is_known_as_exactly_as_the_whole_that_it_was_taken_from() -> None:
    part, whole = MeanEstimate(), MeanEstimate()
    part.add(0.01, 1.0)
    whole.add(1.0)
    assert part.uncertainty == whole.uncertainty


# ---- several kernels, and persistence --------------------------------------------------


def test_each_kernel_gets_its_own_setting() -> None:
    governor = Governor(CANDIDATES, budget=FREE)
    kinds = [Steps(governor, name, CURVES[name], noise=0.03) for name in ("gemm", "elementwise", "join")]
    for _ in range(CALIBRATED):
        for steps in kinds:
            steps.run(1)
    governor = Governor(CANDIDATES, governor.known)
    used = {steps.kernel: governor.choose(steps.kernel).setting for steps in kinds}
    assert used["gemm"] == SPLIT
    assert used["elementwise"] == CAP4
    join = kinds[2]
    assert join.under(CURVES["join"][used["join"]]) <= 1.03 * join.best()


@each_kernel
def test_statistics_are_used_in_the_next_run(kernel: str) -> None:
    first = governed(kernel)
    first.run(ENOUGH)
    assert isinstance(first.governor, Governor)
    remembered = json.loads(json.dumps(first.governor.known.plain()))
    second = governed(kernel, known=OverlapStatistics.of(remembered), seed=1)
    assert second.run(5) <= 1.03 * 5 * second.best()


def test_knowledge_survives_json() -> None:
    steps = governed("gemm")
    steps.run(30)
    assert isinstance(steps.governor, Governor)
    plain = steps.governor.known.plain()
    assert OverlapStatistics.of(json.loads(json.dumps(plain))).plain() == plain


@pytest.mark.parametrize("setting", [PRIORITY, OFF, CAP4, SPLIT, Setting(2, 100, first=False)])
def test_a_setting_survives_its_text(setting: Setting) -> None:
    assert Setting.parse(str(setting)) == setting


@pytest.mark.parametrize(
    "text", ["", "residency", "residency x", "4 blocks", "residency 4 116 SMs", "no residency"]
)
def test_an_invalid_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Setting.parse(text)


def step_of(*kernels: str) -> StepSample:
    return StepSample(0.5, 1e9, {kernel: OverlapSample(1.0, 1.0) for kernel in kernels})


def test_only_so_many_kernels_are_known_and_those_that_ran_last_stay() -> None:
    known = OverlapStatistics()
    for number in range(MAX_KERNELS + 10):
        known.add(SoloSample(f"kernel-{number}", 1.0, 1.0))
        known.add(SoloSample("kernel-0", 1.0, 1.0))
    assert len(known.kernels) == MAX_KERNELS
    assert {"kernel-0", f"kernel-{MAX_KERNELS + 9}"} <= set(known.kernels)
    assert "kernel-1" not in known.kernels


def test_a_step_with_several_new_kernels_while_as_many_are_known_as_fit() -> None:
    """A program of many different queries; an error here would fail a task of the user."""
    known = OverlapStatistics()
    for number in range(MAX_KERNELS):
        known.add(SoloSample(f"kernel-{number}", 1.0, 1.0))
        known.add(SoloSample(f"kernel-{number}", 1.0, 1.0))
    known.add_step(step_of("new", "newer", "newest"))
    assert {"new", "newer", "newest"} <= set(known.kernels)
    assert len(known.kernels) == MAX_KERNELS
    known.add_step(step_of(*(f"other-{number}" for number in range(MAX_KERNELS + 1))))
    assert len(known.kernels) == MAX_KERNELS


def test_a_kernel_runs_for_the_first_time_while_another_one_is_on_trial() -> None:
    governor = Governor({OFF: 0.5}, budget=FREE)
    for _ in range(MIN_SOLO_SAMPLES):
        governor.learn(SoloSample("kernel", 1.0, 1.0))
    for _ in range(2 * MIN_STEPS):
        setting = governor.choose("kernel").setting
        ran = {"kernel": OverlapSample(1.0, 2.0, setting)}
        if setting != PRIORITY:
            ran["new"] = OverlapSample(1.0, 1.0)
        governor.learn_step(StepSample(0.0, 1e9, ran))
    assert "new" in governor.known.kernels, "nothing was on trial"


kernel_names = st.sampled_from([f"kernel-{number}" for number in range(8)])
overlaps = st.builds(
    OverlapSample, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.sampled_from([PRIORITY, OFF])
)
events = st.one_of(
    st.builds(SoloSample, kernel_names, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)),
    st.builds(
        StepSample,
        st.floats(0, 10),
        st.floats(0, 1e9),
        st.dictionaries(kernel_names, overlaps, max_size=5),
        st.booleans(),
    ),
)


@given(st.lists(events, max_size=60), st.lists(kernel_names, max_size=4))
def test_no_order_of_samples_and_choices_fails(
    events: list[SoloSample | StepSample], asked: list[str]
) -> None:
    """With fewer kernels than run; an error here would fail a task of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "MAX_KERNELS", 3)
        governor = Governor({OFF: 0.5}, budget=FREE)
        for event in events:
            for kernel in asked:
                governor.choose(kernel)
            if isinstance(event, SoloSample):
                governor.learn(event)
            else:
                governor.learn_step(event)
            assert len(governor.known.kernels) <= 3


def test_a_sample_that_was_not_steady_counts_as_work_only() -> None:
    known = OverlapStatistics()
    step = StepSample(0.5, 1e9, {"kernel": OverlapSample(1.0, 1.0)})
    for _ in range(MIN_STEPS):
        known.add_step(step)
    before, work = known.plain()["kernels"]["kernel"], known.kernels["kernel"].work
    known.add_step(StepSample(100.0, 1e9, {"kernel": OverlapSample(1.0, 100.0)}, steady=False))
    assert known.plain()["kernels"]["kernel"]["beside"] == before["beside"]
    assert known.kernels["kernel"].work > work


def test_a_kernel_that_never_runs_alone_is_compared_with_one_speed() -> None:
    """Its first step compiles, for example: past costs do not count against its later speed."""
    governor = Governor({OFF: 0.5}, budget=0.0)
    for seconds in (30.0, *30 * [1.0]):
        governor.learn_step(StepSample(0.0, 1e9, {"fused": OverlapSample(1.0, seconds)}))
    usual = governor.forecasts(governor.known.kernels["fused"])[PRIORITY]
    assert usual.expected / governor.known.steps == pytest.approx(1.0, rel=0.05)
    assert 0 < usual.best <= usual.expected <= usual.worst
