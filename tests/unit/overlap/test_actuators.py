"""What confines compute, and to what: SMs with contexts of the test's own, and two actuators as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_gpurt
from dask_gpurt.device import SmsError
from dask_gpurt.device.host import HostDevice
from dask_gpurt.overlap.actuators import Precedence, SmShare, Together, UnfitSetting
from dask_gpurt.overlap.steps import OFF, PRIORITY, Setting
from tests.helpers.actuators import Hand
from tests.helpers.overlap_cluster import Starting, assert_right, shuffled
from tests.helpers.overlap_cluster import start as start  # a fixture


class Contexts:
    """Contexts of a device of 132 SMs, which can be taken eight at a time."""

    total, unit = 132, 8
    entries = 0

    def __init__(self, refuse: bool = False):
        self.refuse = refuse
        self.confined = threading.local()

    @contextmanager
    def entered(self, sms: int) -> Iterator[None]:
        if self.refuse:
            raise SmsError("the driver does not want to")
        type(self).entries += 1
        self.confined.sms = sms
        try:
            yield
        finally:
            self.confined.sms = None

    def try_out(self, sms: int) -> None:
        with self.entered(sms):
            pass

    def here(self) -> int | None:
        return getattr(self.confined, "sms", None)


def quiet(reason: str) -> None:
    pytest.fail(reason)


def test_what_runs_is_confined_on_its_own_thread_and_only_meanwhile() -> None:
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
    with pytest.raises(UnfitSetting, match="contexts cap no residency"):
        SmShare(Contexts(), quiet).apply(Setting(residency=4))


def test_of_two_each_gets_its_part() -> None:
    contexts, caps = Contexts(), Hand()
    share = SmShare(contexts, quiet)
    both = Together(caps, share)
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
def test_what_nothing_confines_is_refused(setting: Setting, said: str) -> None:
    caps, share = Hand(), SmShare(Contexts(), quiet)
    with pytest.raises(UnfitSetting, match=said):
        Together(None if setting.residency else caps, None if setting.sms else share).apply(setting)


def test_communication_comes_first_unless_a_setting_says_otherwise() -> None:
    device, caps = HostDevice(2**20), Hand()
    device.prioritised = True
    both = Together(caps, precedence=Precedence(device))
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


def test_tasks_beside_a_run_are_confined_to_sms(start: Starting, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Contexts()
    monkeypatch.setattr(HostDevice, "sm_contexts", lambda self, instead: contexts)
    # Where a task finds them: they do not travel.
    monkeypatch.setattr(HostDevice, "here", contexts.here, raising=False)
    client = start(mode="fixed", fixed={"residency": "none", "sms": 116})
    before = contexts.entries
    client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_begins(("run of the test", 1)))
    assert set(client.gather(client.map(lambda _: HostDevice.here(), range(4), key="look"))) == {116}
    client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_ends(("run of the test", 1)))
    assert set(client.gather(client.map(lambda _: HostDevice.here(), range(4), key="again"))) == {None}
    assert contexts.entries > before
    assert_right(shuffled())
    replies = dask_gpurt.report(client)["workers"].values()
    assert sum(reply["overlap"]["launches"]["confined to SMs"] for reply in replies) >= 4
    dask_gpurt.disable(client)
    left = client.run(lambda dask_worker: "submit" in dask_worker.executors["default"].__dict__)
    assert set(left.values()) == {False}


@pytest.mark.parametrize(
    ("mode", "asked", "refuse", "said"),
    [
        ("fixed", {"residency": 4, "sms": 117}, False, "the nearest number is 116"),
        ("fixed", {"residency": 4, "sms": 116}, True, "the driver does not want to"),
        ("fixed", {"residency": 4, "sms": 116}, None, "no SMs"),
        ("adaptive", {"sms": 117}, False, "the nearest number is 116"),
        ("adaptive", {"sms": 116}, None, "no SMs"),
    ],
)
def test_where_there_are_no_such_contexts_there_is_priority_only(
    start: Starting,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    asked: dict[str, int],
    refuse: bool | None,
    said: str,
) -> None:
    if refuse is not None:
        monkeypatch.setattr(HostDevice, "sm_contexts", lambda self, instead: Contexts(refuse))
    client = start(mode=mode, **{mode: asked})
    assert_right(shuffled())
    for reply in dask_gpurt.report(client)["workers"].values():
        reason = reply["fallbacks"]["compute is not confined"]["reason"]
        assert said in reason
        assert reason.endswith("The shuffle has its priority")


def test_without_the_interposer_no_context_is_entered(
    start: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept(Contexts):
        def __init__(self, instead: Callable[[int, int], None]):
            super().__init__()
            self.instead = instead

        @contextmanager
        def entered(self, sms: int) -> Iterator[None]:
            self.instead(1, 2)
            with super().entered(sms):
                yield

    monkeypatch.setattr(HostDevice, "sm_contexts", lambda self, instead: Kept(instead))
    client = start(mode="fixed", fixed={"residency": "none", "sms": 116})
    for reply in dask_gpurt.report(client)["workers"].values():
        reason = reply["fallbacks"]["compute is not confined"]["reason"]
        assert reason.startswith("this process was started without the interposer in LD_PRELOAD")


def test_a_device_whose_priorities_change_may_go_without(
    start: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "try_priorities", lambda self: None)
    client = start(mode="adaptive", adaptive={"sms": "none"})
    found = client.run(
        lambda dask_worker: [str(one) for one in dask_worker.plugins["gpurt"].overlap._governor.candidates]
    )
    assert all("no priority" in settings for settings in found.values())
    assert_right(shuffled())


def test_where_priorities_do_not_change_the_rest_is_tried(start: Starting) -> None:
    client = start(mode="adaptive", adaptive={"sms": "none"})
    for reply in dask_gpurt.report(client)["workers"].values():
        known = reply["fallbacks"]["communication always has its priority"]
        assert known["reason"] == "copies of a processor have no priority"
        assert "compute is not confined" not in reply["fallbacks"]


def test_what_was_learnt_and_can_not_be_written_is_told_of(start: Starting, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    path = tmp_path / "a file" / "learned.json"
    client = start(mode="adaptive", adaptive={"sms": "none"}, learned=str(path))
    client.run(_save)
    for reply in dask_gpurt.report(client)["workers"].values():
        assert "a file" in reply["fallbacks"]["what was learnt of kernels is not kept"]["reason"]


async def _save(dask_worker: Any) -> None:
    await dask_worker.plugins["gpurt"].overlap.save()
