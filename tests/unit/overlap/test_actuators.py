"""Confine compute to SMs with the test's own contexts, and combine two actuators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.host import HostDevice
from dask_gpurt.overlap.actuators import CompositeActuator, SmShare, StreamPriority, UnfitSetting
from dask_gpurt.overlap.samples import OFF, PRIORITY, Setting
from tests.helpers.actuators import Contexts, Hand
from tests.helpers.overlap_cluster import start as start  # a fixture


def quiet(reason: str) -> None:
    pytest.fail(reason)


def test_a_task_is_confined_on_its_own_thread_only_while_it_runs() -> None:
    contexts = Contexts()
    share = SmShare(contexts, quiet)
    share.apply(Setting(sms=116))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(share.run, contexts.here).result() == 116
        assert thread.submit(contexts.here).result() is None
    assert contexts.here() is None
    share.clear()
    assert share.run(contexts.here) is None
    assert share.counters() == {"confined to SMs": 1}


def test_arguments_and_errors_pass_through() -> None:
    share = SmShare(Contexts(), quiet)
    share.apply(Setting(sms=124))
    assert share.run(divmod, 7, 3) == (2, 1)
    assert share.run(sorted, [1, 2], reverse=True) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        share.run(divmod, 1, 0)


def test_a_thread_that_can_not_be_confined_goes_on_and_says_why() -> None:
    reasons: list[str] = []
    share = SmShare(Contexts(refuse=True), reasons.append)
    share.apply(Setting(sms=116))
    assert share.run(divmod, 7, 3) == (2, 1)
    assert reasons == ["the driver does not want to"]
    assert share.counters() == {"confined to SMs": 0}


@given(sms=st.integers(-10, 300), total=st.integers(16, 200), unit=st.sampled_from([2, 8]))
def test_only_whole_units_are_taken_and_the_nearest_number_would_do(sms: int, total: int, unit: int) -> None:
    contexts = Contexts()
    contexts.total, contexts.unit = total, unit
    share = SmShare(contexts, quiet)
    try:
        share.apply(Setting(sms=sms))
    except UnfitSetting as error:
        said, _, nearest = str(error).rpartition(" ")
        assert f"to {sms} of {total} SMs" in said
        share.apply(Setting(sms=int(nearest)))
        sms = int(nearest)
    assert 0 < sms < total
    assert (total - sms) % unit == 0


def test_a_share_is_tried_where_it_was_offered() -> None:
    assert not SmShare(Contexts(), quiet).settings()
    offered = SmShare(Contexts(), quiet, [116, 124]).settings()
    assert list(offered) == [Setting(sms=116), Setting(sms=124)]
    assert all(0 < keeps < 1 for keeps in offered.values())


def test_a_share_caps_no_residency() -> None:
    with pytest.raises(UnfitSetting, match="contexts cannot cap residency"):
        SmShare(Contexts(), quiet).apply(Setting(residency=4))


def test_of_two_each_gets_its_part() -> None:
    contexts, caps = Contexts(), Hand()
    share = SmShare(contexts, quiet)
    both = CompositeActuator(caps, share)
    assert both.settings() == caps.settings()
    both.apply(Setting(residency=4, sms=116))
    assert caps.confined == Setting(residency=4)
    assert share.run(contexts.here) == 116
    both.apply(Setting(sms=124))
    assert caps.confined == PRIORITY
    assert share.run(contexts.here) == 124
    both.apply(Setting(residency=8))
    assert caps.confined == Setting(residency=8)
    assert share.run(contexts.here) is None
    both.clear()
    assert caps.confined == PRIORITY
    assert {"seen", "confined to SMs"} == set(both.counters())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Setting(residency=4), "residency 4 is not possible here"),
        (Setting(sms=116), "116 SMs is not possible here"),
        (OFF, "no priority is not possible here"),
    ],
)
def test_a_setting_that_confines_nothing_is_refused(setting: Setting, said: str) -> None:
    caps, share = Hand(), SmShare(Contexts(), quiet)
    with pytest.raises(UnfitSetting, match=said):
        CompositeActuator(None if setting.residency else caps, None if setting.sms else share).apply(setting)


def test_communication_comes_first_unless_a_setting_says_otherwise() -> None:
    device, caps = HostDevice(2**20), Hand()
    device.prioritised = True
    both = CompositeActuator(caps, priority=StreamPriority(device))
    assert both.settings() == {**caps.settings(), OFF: 0.5}
    both.apply(OFF)
    assert not device.prioritised
    both.apply(Setting(residency=4))
    assert device.prioritised
    assert caps.confined == Setting(residency=4)
    both.apply(OFF)
    assert caps.confined == PRIORITY
    both.clear()
    assert device.prioritised
    assert both.counters()["without priority"] == 2


# ---- on real workers ---------------------------------------------------------------------
