"""Confine compute on workers, and report workers where nothing can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dask_gpurt
from dask_gpurt.device.host import HostDevice
from tests.helpers.actuators import Contexts
from tests.helpers.overlap_cluster import Starting, assert_right, shuffled
from tests.helpers.overlap_cluster import start as start
from tests.helpers.slow import slow


def test_tasks_beside_a_run_are_confined_to_sms(start: Starting, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Contexts()
    monkeypatch.setattr(HostDevice, "sm_contexts", lambda self, instead: contexts)
    # Patch the class, where a task finds the contexts: they cannot be pickled.
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
        ("fixed", {"residency": 4, "sms": 117}, False, "the nearest possible number is 116"),
        slow("fixed", {"residency": 4, "sms": 116}, True, "the driver does not want to"),
        slow("fixed", {"residency": 4, "sms": 116}, None, "no SMs"),
        ("adaptive", {"sms": 117}, False, "the nearest possible number is 116"),
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
        reason = reply["fallbacks"]["overlap.unconfined"]["reason"]
        assert said in reason
        assert reason.endswith("The shuffle keeps its priority")


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
        reason = reply["fallbacks"]["overlap.unconfined"]["reason"]
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
        known = reply["fallbacks"]["overlap.priority-fixed"]
        assert known["reason"] == "copies of a CPU have no priority"
        assert "overlap.unconfined" not in reply["fallbacks"]


def test_unwritable_statistics_are_reported(start: Starting, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    path = tmp_path / "a file" / "learned.json"
    client = start(mode="adaptive", adaptive={"sms": "none"}, learned=str(path))
    client.run(_save)
    for reply in dask_gpurt.report(client)["workers"].values():
        assert "a file" in reply["fallbacks"]["overlap.not-saved"]["reason"]


async def _save(dask_worker: Any) -> None:
    await dask_worker.plugins["gpurt"].overlap.save()
