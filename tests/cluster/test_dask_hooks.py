"""What is replaced in Dask comes back as it was; a Dask or a system that differs keeps the runtime off."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from functools import cached_property
from typing import Any

import pytest
from dask.dataframe.dask_expr import _merge
from distributed import Scheduler
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt import preload
from dask_gpurt.cli.examine import examine
from dask_gpurt.dask_hooks import EXPRESSIONS, SEAMS, Patches, Seam, UnsupportedError, differences
from tests.helpers.in_process import on_plain_cluster, whole_state

# ---- replacements --------------------------------------------------------------------------


class Dasks:
    """As a class of Dask's."""

    def method(self, at: int) -> list[Any]:
        return ["Dask", at]

    @cached_property
    def once(self) -> list[str]:
        return ["Dask"]


def ours(original: Any) -> Any:
    return lambda *args: ["ours", *original(*args)]


class Theirs:
    """Another package that wraps a method, and puts back what it found."""

    def __init__(self, owner: Any):
        self.owner, self.found = owner, owner.method
        self.was_there = "method" in vars(owner)
        owner.method = lambda *args: ["theirs", *self.found(*args)]

    def restore(self) -> None:
        if self.was_there:
            self.owner.method = self.found
        else:
            del self.owner.method


def test_what_was_not_an_attribute_of_the_instance_is_none_again() -> None:
    dasks, patches = Dasks(), Patches()
    patches.put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "Dask", 1]
    patches.restore()
    assert not vars(dasks)
    patches.restore()


def test_a_wrapper_that_was_there_before_is_there_again() -> None:
    dasks, patches = Dasks(), Patches()
    theirs = Theirs(dasks)
    patches.put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "theirs", "Dask", 1]
    patches.restore()
    assert dasks.method(1) == ["theirs", "Dask", 1]
    theirs.restore()
    assert not vars(dasks)


def test_a_wrapper_that_came_later_stays_and_goes_past_ours() -> None:
    dasks, patches = Dasks(), Patches()
    patches.put(dasks, "method", ours)
    theirs = Theirs(dasks)
    patches.restore()
    assert dasks.method(1) == ["theirs", "Dask", 1]
    patches.put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "theirs", "Dask", 1]
    patches.restore()
    theirs.restore()
    assert dasks.method(1) == ["Dask", 1]


def test_two_sets_nest() -> None:
    dasks, inner, outer = Dasks(), Patches(), Patches()
    inner.put(dasks, "method", ours)
    outer.put(dasks, "method", ours)
    inner.restore()
    assert dasks.method(1) == ["ours", "Dask", 1]
    outer.restore()
    assert dasks.method(1) == ["Dask", 1]


def test_a_cached_property_of_a_class_is_replaced_and_comes_back() -> None:
    class Kind(Dasks):
        once = Dasks.__dict__["once"]

    before, patches = vars(Kind)["once"], Patches()
    patches.put(Kind, "once", ours)
    found = Kind()
    assert found.once == ["ours", "Dask"]
    assert found.once is found.once
    patches.restore()
    assert vars(Kind)["once"] is before
    assert Kind().once == ["Dask"]


# ---- signatures ----------------------------------------------------------------------------


def test_this_dask_is_known() -> None:
    assert differences(SEAMS + EXPRESSIONS) == []


@pytest.mark.parametrize(
    ("seam", "said"),
    [
        (Seam("distributed.scheduler:Scheduler.nothing_of_the_kind"), "nothing_of_the_kind is not there"),
        (Seam("distributed.no_such_module:f"), "f is not there"),
        (
            Seam("distributed.worker:Worker.execute", "self key"),
            r"execute\(self, key, stimulus_id\), known is",
        ),
    ],
)
def test_what_differs_is_told(seam: Seam, said: str) -> None:
    (found,) = differences([seam])
    assert re.search(said, found)


def test_a_wrapper_that_passes_everything_on_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    create = ShuffleSchedulerPlugin._create
    monkeypatch.setattr(ShuffleSchedulerPlugin, "_create", lambda *args, **kwargs: create(*args, **kwargs))
    assert differences(SEAMS) == []


def another_create(self: Any, shuffle_id: Any, key: Any, worker: str, priority: int) -> Any:
    """As a Dask of tomorrow may have it."""
    raise AssertionError("Dask's own shuffles do not come here in this test")


def test_another_dask_keeps_it_off_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = r"2026\.7\.1 to .*it is ShuffleSchedulerPlugin\._create\(.*priority\), known is"

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = whole_state(scheduler, a, b)
        with monkeypatch.context() as patch:
            patch.setattr(ShuffleSchedulerPlugin, "_create", another_create)
            with pytest.raises(UnsupportedError, match=said):
                await dask_gpurt.enable(client)
            assert whole_state(scheduler, a, b) == before
            caplog.clear()
            with caplog.at_level(logging.ERROR, "dask_gpurt"):
                await preload.activate(scheduler)
            assert [record.message.partition(":")[0] for record in caplog.records] == [
                "the runtime stays off"
            ]
            assert whole_state(scheduler, a, b) == before
            found = examine()
            assert not found["ok"]
            assert any("_create" in problem for problem in found["problems"])
        await dask_gpurt.enable(client)
        assert dask_gpurt.is_enabled(client)


def test_a_scheduler_with_another_dask_than_the_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's look is passed: the scheduler's counts as well."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
    async def run(client: Any, scheduler: Any, a: Any) -> None:
        before = set(scheduler.plugins), set(scheduler.extensions), set(a.plugins)
        with monkeypatch.context() as patch:
            patch.setattr("dask_gpurt.dask_hooks.require", _only_for_clients)
            with pytest.raises(UnsupportedError, match="of another version"):
                await dask_gpurt.enable(client)
        assert (set(scheduler.plugins), set(scheduler.extensions), set(a.plugins)) == before

    run()


def _only_for_clients(*, expressions: bool = False) -> None:
    if not expressions:
        raise UnsupportedError("of another version")


def test_expressions_are_looked_at_on_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    @gen_cluster(client=True, nthreads=[])
    async def run(client: Any, scheduler: Scheduler) -> None:
        monkeypatch.setattr(_merge.Merge, "_lower", lambda self, optimizer: None)
        with pytest.raises(UnsupportedError, match=r"Merge\._lower\(self, optimizer\)"):
            await dask_gpurt.enable(client)
        assert "gpurt" not in scheduler.extensions

    # What this process has put in its place hides it.
    patched = vars(_merge.Merge)["_lower"]
    monkeypatch.setattr(_merge.Merge, "_lower", getattr(patched, "__wrapped__", patched))
    run()


#: A Mac, and Windows: without what Python has only elsewhere.
ELSEWHERE = """\
import asyncio, logging, os, sys, types
from distributed import Client, Scheduler

# What is imported before has its own ways for other systems, and Dask's are not there on Linux.
sys.modules["fcntl"] = {fcntl}
for name in ("memfd_create", "sched_getaffinity", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
import dask_gpurt
from dask_gpurt import preload
from dask_gpurt.dask_hooks import seams
seams.sys = types.SimpleNamespace(platform={platform!r})

async def main():
    async with Scheduler(dashboard_address=":0", host="127.0.0.1", port=0) as scheduler:
        await preload.activate(scheduler)
        async with Client(scheduler.address, asynchronous=True) as client:
            assert not dask_gpurt.is_enabled(client)
            try:
                await dask_gpurt.enable(client)
            except RuntimeError as error:
                print(error)

logging.basicConfig()
asyncio.run(main())
"""


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_than_on_linux_it_says_so(platform: str) -> None:
    fcntl = "None" if platform == "win32" else "__import__('fcntl')"
    code = ELSEWHERE.replace("{platform!r}", repr(platform)).replace("{fcntl}", fcntl)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"the runtime works on Linux only, this is {platform}")
    assert "the runtime stays off: the runtime works on Linux only" in done.stderr
