"""What is replaced in Dask comes back as it was; a Dask or a system that differs keeps the runtime off."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections import Counter
from functools import cached_property, wraps
from typing import Any

import pytest
from click.testing import CliRunner
from dask.dataframe.dask_expr import _merge
from distributed import Client, LocalCluster, Scheduler
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin
from distributed.stealing import WorkStealing
from distributed.utils_test import gen_cluster
from test_switching import assert_shuffles, on_plain_cluster, whole_state
from test_topology_reports import until

import dask_gpurt
from dask_gpurt import preload
from dask_gpurt.cli import main
from dask_gpurt.cli.examine import examine
from dask_gpurt.dask_hooks import (
    CHOICES,
    PARTS,
    PatchOrderError,
    PatchSet,
    Seam,
    State,
    UnsupportedError,
    differences,
    table,
)
from dask_gpurt.dask_hooks.seams import hash_of_body

#: All that is known of Dask.
SEAMS = [seam for part in PARTS for seam in part.seams]

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
    dasks, patches = Dasks(), PatchSet()
    patches.put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "Dask", 1]
    patches.restore()
    assert not vars(dasks)
    patches.restore()


def test_a_wrapper_that_was_there_before_is_there_again() -> None:
    dasks, patches = Dasks(), PatchSet()
    theirs = Theirs(dasks)
    patches.put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "theirs", "Dask", 1]
    patches.restore()
    assert dasks.method(1) == ["theirs", "Dask", 1]
    theirs.restore()
    assert not vars(dasks)


def test_a_wrapper_that_came_later_stays_and_goes_past_ours() -> None:
    dasks, patches = Dasks(), PatchSet()
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
    dasks, inner, outer = Dasks(), PatchSet(), PatchSet()
    inner.put(dasks, "method", ours)
    outer.put(dasks, "method", ours)
    inner.restore()
    assert dasks.method(1) == ["ours", "Dask", 1]
    outer.restore()
    assert dasks.method(1) == ["Dask", 1]


def test_a_cached_property_of_a_class_is_replaced_and_comes_back() -> None:
    class Kind(Dasks):
        once = Dasks.__dict__["once"]

    before, patches = vars(Kind)["once"], PatchSet()
    patches.put(Kind, "once", ours)
    found = Kind()
    assert found.once == ["ours", "Dask"]
    assert found.once is found.once
    patches.restore()
    assert vars(Kind)["once"] is before
    assert Kind().once == ["Dask"]


def test_what_was_given_back_while_it_could_not_leave_goes_with_the_last() -> None:
    dasks, inner, outer = Dasks(), PatchSet(), PatchSet()
    inner.put(dasks, "method", ours)
    outer.put(dasks, "method", ours)
    inner.restore()
    outer.restore()
    assert not vars(dasks)


def test_a_higher_layer_is_called_first_and_a_lower_one_can_not_go_over_it() -> None:
    dasks, inner, outer = Dasks(), PatchSet(layer=1), PatchSet(layer=2)
    inner.put(dasks, "method", ours)
    theirs = Theirs(dasks)
    outer.put(dasks, "method", lambda original: lambda *args: ["outer", *original(*args)])
    assert dasks.method(1) == ["outer", "theirs", "ours", "Dask", 1]
    with pytest.raises(PatchOrderError, match="layer 2"):
        PatchSet(layer=1).put(dasks, "method", ours)
    assert dasks.method(1) == ["outer", "theirs", "ours", "Dask", 1]
    outer.restore()
    PatchSet(layer=1).put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "theirs", "ours", "Dask", 1]
    assert theirs.found(1) == ["ours", "Dask", 1]


def test_handlers_are_wrapped_and_come_back() -> None:
    handlers: dict[str, Any] = {"get": lambda at: ["Dask", at]}
    before, inner, outer = dict(handlers), PatchSet(), PatchSet()
    inner.put_item(handlers, "get", ours)
    outer.put_item(handlers, "get", ours)
    assert handlers["get"](1) == ["ours", "ours", "Dask", 1]
    inner.restore()
    assert handlers["get"](1) == ["ours", "Dask", 1]
    outer.restore()
    assert handlers == before


def test_what_is_added_goes_and_what_was_there_comes_back() -> None:
    handlers: dict[str, Any] = {"kept": "theirs"}
    patches, added = PatchSet(), object()
    patches.add_item(handlers, "kept", added)
    patches.add_item(handlers, "new", added)
    patches.add_item(handlers, "taken", added)
    assert set(handlers.values()) == {added}
    handlers["taken"] = "theirs"
    patches.restore()
    assert handlers == {"kept": "theirs", "taken": "theirs"}


class Slotted:
    """As a state of Dask's that has no room for attributes."""

    __slots__ = ()

    def method(self, at: int) -> list[Any]:
        return ["Dask", at]


METHOD = Seam(f"{__name__}:Slotted.method", "self at")


def test_an_instance_with_slots_gets_a_class_of_its_own() -> None:
    one, other, inner, outer = Slotted(), Slotted(), PatchSet(), PatchSet()
    inner.put_class(one, METHOD, ours)
    outer.put_class(one, METHOD, ours)
    assert one.method(1) == ["ours", "ours", "Dask", 1]
    assert other.method(1) == ["Dask", 1]
    inner.restore()
    assert one.method(1) == ["ours", "Dask", 1]
    outer.restore()
    assert type(one) is Slotted


def test_what_differs_is_not_replaced() -> None:
    dasks, patches = Dasks(), PatchSet()
    with pytest.raises(UnsupportedError, match=r"method\(at\), known is \(at, more\)"):
        patches.replace(Seam(f"{__name__}:Dasks.method", "self at more"), ours, on=dasks)
    assert not vars(dasks)
    assert not patches


# ---- signatures ----------------------------------------------------------------------------


def test_this_dask_is_known() -> None:
    assert differences(SEAMS) == []


@pytest.mark.parametrize(
    ("seam", "said"),
    [
        (Seam("distributed.scheduler:Scheduler.nothing_of_the_kind"), "nothing_of_the_kind is not there"),
        (Seam("distributed.no_such_module:f"), "f is not there"),
        (
            Seam("distributed.worker:Worker.execute", "self key"),
            r"execute\(self, key, stimulus_id\), known is",
        ),
        (
            Seam("distributed.worker:Worker.execute", "self key stimulus_id", bodies=("0123456789ab",)),
            "the body of Worker.execute is [0-9a-f]{12}, known is 0123456789ab",
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


def test_layout_and_comments_are_no_part_of_a_body() -> None:
    def plain(x: int) -> int:
        y = x + 1
        return y

    def adorned(x: int) -> int:
        """Say more."""
        y = (
            x + 1  # as above
        )

        return y

    def other(x: int) -> int:
        y = x + 2
        return y

    assert hash_of_body(plain) == hash_of_body(adorned) != hash_of_body(other)


def test_the_table_has_a_state_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.state for row in table()} == {State.KNOWN}
    assert len(table()) == len(SEAMS)
    monkeypatch.setattr(WorkStealing, "_get_thief", lambda self, level: None)
    (row,) = (row for row in table() if row.state is not State.KNOWN)
    assert row.name == "WorkStealing._get_thief"
    assert row.difference.endswith(
        "known is (self, scheduler, ts, potential_thieves, occupancies): "
        "Dask chooses who takes tasks from others"
    )
    states = {row.name: row.state for row in table(unused=CHOICES)}
    assert states["WorkStealing._get_thief"] == State.UNUSED
    assert states["Worker.execute"] == State.KNOWN


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


def test_the_doctor_says_why_it_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShuffleSchedulerPlugin, "_create", another_create)
    said = CliRunner().invoke(main, ["doctor"])
    text = " ".join(said.stdout.split())
    assert said.exit_code == 1
    assert "shuffles on the scheduler: 10 as known, 1 differs" in text
    assert "it is ShuffleSchedulerPlugin._create(self, shuffle_id, key, worker, priority)" in text
    assert "it stays off" in text


#: A Dask that has moved a function which other parts of the package import when they are imported.
MOVED = """\
import sys
import distributed
from distributed.shuffle import _shuffle
del _shuffle._get_worker_for_range_sharding
from dask_gpurt.cli import main
main(["doctor"])
"""


def test_the_doctor_runs_where_a_name_has_moved() -> None:
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "_get_worker_for_range_sharding is not there" in " ".join(done.stdout.split())


def test_without_a_part_that_is_not_needed_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks then ask the event loop for their run; what knows where it is would not be called as it is."""
    find = ShuffleWorkerPlugin.get_shuffle_run

    def another(self: Any, shuffle_id: Any, run_id: int, patience: float = 1.0) -> Any:
        return find(self, shuffle_id, run_id)

    monkeypatch.setattr(ShuffleWorkerPlugin, "get_shuffle_run", another)

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        await assert_shuffles(client, ours=True)
        for worker in (a, b):
            fallbacks = worker.plugins["gpurt"].metrics.snapshot()["fallbacks"]
            assert "patience" in fallbacks["tasks ask the event loop for their run"]["reason"]
            assert not vars(worker.plugins["shuffle"]).keys() & {"get_shuffle_run", "get_or_create_shuffle"}

    run()


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


# ---- beside others ---------------------------------------------------------------------------


class Counting:
    """Another package's plugin, which wraps what ours wraps, and counts the calls."""

    def __init__(self, worker: Any):
        self.worker, self.calls = worker, Counter[str]()
        self.found: dict[str, Any] = {}
        for name in ("execute", "gather_dep"):
            self.found[name] = getattr(worker, name)
            setattr(worker, name, self._counted(name))
        for name, handlers in (("get_data", worker.handlers), ("remove-worker", worker.stream_handlers)):
            self.found[name] = handlers[name]
            handlers[name] = self._counted(name)

    def _counted(self, name: str) -> Any:
        original = self.found[name]

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return original(*args, **kwargs)

        return counted

    def restore(self) -> None:
        self.worker.execute, self.worker.gather_dep = self.found["execute"], self.found["gather_dep"]
        self.worker.handlers["get_data"] = self.found["get_data"]
        self.worker.stream_handlers["remove-worker"] = self.found["remove-worker"]


async def move_something(client: Any, a: Any, b: Any) -> None:
    """Compute a task on one worker, and another on the other worker that reads its result."""
    made = client.submit(list, range(100), workers=[a.address], pure=False)
    assert await client.submit(len, made, workers=[b.address], pure=False) == 100


def test_a_plugin_that_wraps_the_same_goes_on_when_ours_goes() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        below, above = Counting(b), None
        await dask_gpurt.enable(client)
        above = Counting(b)
        await move_something(client, a, b)
        before = dict(below.calls), dict(above.calls)
        assert below.calls["execute"] == above.calls["execute"] > 0
        assert below.calls["gather_dep"] == above.calls["gather_dep"] > 0
        await dask_gpurt.disable(client)
        await move_something(client, a, b)
        await move_something(client, b, a)
        assert below.calls["execute"] == above.calls["execute"] > before[0]["execute"]
        assert below.calls["gather_dep"] == above.calls["gather_dep"] > before[1]["gather_dep"]
        assert below.calls["get_data"] == above.calls["get_data"] > 0
        await a.close()
        await until(lambda: above.calls["remove-worker"] == 1)
        assert below.calls["remove-worker"] == 1
        above.restore()
        below.restore()

    run()


def test_of_two_runtimes_in_a_process_one_goes_on_without_the_other() -> None:
    async def run() -> None:
        options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
        async with (
            LocalCluster(asynchronous=True, **options) as one,
            LocalCluster(asynchronous=True, **options) as other,
            Client(one, asynchronous=True, set_as_default=False) as first,
            Client(other, asynchronous=True, set_as_default=False) as second,
        ):
            await dask_gpurt.enable(first)
            await dask_gpurt.enable(second)
            await assert_shuffles(first, ours=True)
            await dask_gpurt.disable(first)
            await assert_shuffles(second, ours=True)
            await assert_shuffles(first, ours=False)
            await dask_gpurt.disable(second)
            await assert_shuffles(second, ours=False)

    asyncio.run(run())


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
