"""Enable and disable the runtime as a whole despite concurrent callers, joining workers and errors."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, Event, Worker
from distributed.comm.core import CommClosedError
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

import dask_gpurt
from dask_gpurt.api import register_method
from dask_gpurt.config import ConfigError
from dask_gpurt.plugins import silence, switching
from dask_gpurt.plugins.overlapping import WorkerOverlap
from dask_gpurt.plugins.running import TaskRunner
from dask_gpurt.plugins.switching import LEFT_OP, JoinReply, Workers
from dask_gpurt.plugins.topology_reports import TopologyReporter
from dask_gpurt.plugins.worker import GpurtWorkerPlugin
from tests.helpers.exchanges import spec_of
from tests.helpers.in_process import gen_client_cluster, on_cluster, on_plain_cluster, until, whole_state

#: The loggers in which tracebacks are spared while a plugin is on.
DASKS_LOGS = ("distributed.worker", "distributed.core")
ROWS = 200
#: Bytes that exceed a tier of 1 MiB.
LARGE = 8 * 2**20
FRAME = pd.DataFrame({"key": [row % 17 for row in range(ROWS)], "row": range(ROWS)})


def another(scheduler: Any) -> Any:
    return Client(scheduler.address, asynchronous=True, set_as_default=False)


class Gate:
    """Block a coroutine of the runtime on workers until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    def put(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Gate:
        goes_on = getattr(owner, name)

        async def stops(this: Any, *args: Any) -> Any:
            self.reached.set()
            await self.open.wait()
            return await goes_on(this, *args)

        monkeypatch.setattr(owner, name, stops)
        return self

    @contextmanager
    def open_in_the_end(self) -> Iterator[None]:
        """Open the gate after the body, also on failure: a blocked thread would keep the process alive."""
        try:
            yield
        finally:
            self.open.set()


def setup_stops(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate().put(monkeypatch, TopologyReporter, "start")


def setup_stops_early(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Stop before the worker has an exchange, which is created on a thread."""
    gate, loop = Gate(), asyncio.get_running_loop()
    build = GpurtWorkerPlugin._build

    def stops(self: Any, *args: Any) -> None:
        loop.call_soon_threadsafe(gate.reached.set)
        asyncio.run_coroutine_threadsafe(gate.open.wait(), loop).result()
        build(self, *args)

    monkeypatch.setattr(GpurtWorkerPlugin, "_build", stops)
    return gate


def teardown_stops(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate().put(monkeypatch, WorkerOverlap, "save")


async def begun(coroutine: Any) -> asyncio.Task[Any]:
    """Return once a task waits for something, or has ended."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(20):
        await asyncio.sleep(0.005)  # messages over comms take several iterations of the loop
    return task


async def assert_shuffles(client: Any, *, ours: bool, method: str | None = None) -> None:
    before = await runs(client)
    shuffled = dd.from_pandas(FRAME, npartitions=4).shuffle("key", shuffle_method=method)
    with client.as_current():
        found = await client.compute(shuffled)
    assert sorted(found["row"]) == list(range(ROWS))
    assert ((await runs(client)) > before) == ours


async def runs(client: Any) -> float:
    found = await dask_gpurt.report(client)
    return sum(w.get("counters", {}).get("shuffle.runs", 0) for w in found["workers"].values())


def assert_on(scheduler: Any, *workers: Any) -> None:
    assert scheduler.plugins["gpurt"] is scheduler.extensions["gpurt"]
    assert scheduler.extensions["gpurt"].workers.ready == set(scheduler.workers)
    assert all("gpurt" in worker.plugins for worker in workers)


# ---- two at once -----------------------------------------------------------------------


def test_two_clients_switch_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        gate = setup_stops(monkeypatch)
        async with another(scheduler) as other:
            first = await begun(dask_gpurt.enable(client))
            await gate.reached.wait()
            second = await begun(dask_gpurt.enable(other))
            assert not second.done()
            gate.open.set()
            await asyncio.gather(first, second)
            assert_on(scheduler, a, b)
            await assert_shuffles(client, ours=True)
            await assert_shuffles(other, ours=True)


def test_the_second_is_told_of_the_failure_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        gate = Gate()

        async def fails(reporter: Any) -> None:
            gate.reached.set()
            await gate.open.wait()
            if reporter._worker is b:
                raise OSError("no place here")

        before = whole_state(scheduler, a, b)
        with monkeypatch.context() as patch:
            patch.setattr(TopologyReporter, "start", fails)
            async with another(scheduler) as other:
                first = await begun(dask_gpurt.enable(client))
                second = await begun(dask_gpurt.enable(other))
                gate.open.set()
                for enabling in (first, second):
                    with pytest.raises(OSError, match="no place here"):
                        await enabling
                assert not dask_gpurt.is_enabled(client)
                assert whole_state(scheduler, a, b) == before
        await dask_gpurt.enable(client)
        assert_on(scheduler, a, b)


def test_on_while_it_goes_off_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        gate = teardown_stops(monkeypatch)
        await dask_gpurt.enable(client)
        async with another(scheduler) as other:
            off = await begun(dask_gpurt.disable(client))
            await gate.reached.wait()
            on = await begun(dask_gpurt.enable(other))
            assert not on.done()
            gate.open.set()
            await asyncio.gather(off, on)
            assert_on(scheduler, a, b)
            await assert_shuffles(other, ours=True)


def test_off_while_it_goes_on_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = whole_state(scheduler, a, b)
        gate = setup_stops(monkeypatch)
        async with another(scheduler) as other:
            on = await begun(dask_gpurt.enable(client))
            await gate.reached.wait()
            off = [await begun(dask_gpurt.disable(other)) for _ in range(2)]
            gate.open.set()
            outcome, *_ = await asyncio.gather(on, *off, return_exceptions=True)
            assert "switched off by another client" in str(outcome)
            assert not dask_gpurt.is_enabled(client)
            assert whole_state(scheduler, a, b) == before
            await assert_shuffles(client, ours=False)


# ---- clients that do not know it ------------------------------------------------------------


@pytest.mark.parametrize("off", [False, True])
def test_shuffles_of_others_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        gate = teardown_stops(monkeypatch) if off else setup_stops_early(monkeypatch)
        if off:
            await dask_gpurt.enable(client)
        async with another(scheduler) as other:
            switching = await begun((dask_gpurt.disable if off else dask_gpurt.enable)(client))
            await gate.reached.wait()
            with gate.open_in_the_end():
                shuffled = dd.from_pandas(FRAME, npartitions=4).shuffle("key", shuffle_method="p2p")
                found = await other.compute(shuffled)
                assert sorted(found["row"]) == list(range(ROWS))
                assert not switching.done()
            await switching


def test_a_run_comes_to_a_worker_that_has_no_exchange_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        gate = setup_stops_early(monkeypatch)
        switching = await begun(dask_gpurt.enable(client))
        await gate.reached.wait()
        with gate.open_in_the_end():
            assert "gpurt" in a.plugins
            with pytest.raises(RuntimeError, match="the runtime is not on there"):
                spec_of("early", 2).create_run_on_worker(1, None, {0: a.address}, a.plugins["shuffle"])
        await switching


def test_a_shuffle_that_was_taken_over_restarts_as_dasks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(frame: pd.DataFrame, partition_info: Any = None) -> pd.DataFrame:
        if partition_info and partition_info["number"] == 3:
            Event("reached").set()
            Event("go").wait(timeout=20)
        return frame

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        async with another(scheduler) as other:
            parts = dd.from_pandas(FRAME, npartitions=4).map_partitions(held, meta=FRAME.iloc[:0])
            future = other.compute(parts.shuffle("key", shuffle_method="p2p"))
            await Event("reached", client=other).wait()
            await until(lambda: bool(scheduler.extensions["shuffle"].active_shuffles))
            await dask_gpurt.disable(client)
            await Event("go", client=other).set()
            assert sorted((await future)["row"]) == list(range(ROWS))


# ---- workers that come and go --------------------------------------------------------------


def test_a_worker_joins_and_another_leaves_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster(workers=3)
    async def run(client: Any, scheduler: Any, a: Any, b: Any, c: Any) -> None:
        gate = setup_stops(monkeypatch)
        on = await begun(dask_gpurt.enable(client))
        await gate.reached.wait()
        late = Worker(scheduler.address, nthreads=1)
        joining, leaving = await begun(late), await begun(c.close())
        gate.open.set()
        await asyncio.gather(on, joining, leaving)
        async with late:
            await until(lambda: scheduler.extensions["gpurt"].workers.ready == set(scheduler.workers))
            assert_on(scheduler, a, b, late)
            await assert_shuffles(client, ours=True)
            await dask_gpurt.disable(client)
            assert "gpurt" not in late.plugins
            assert not (vars(late).keys() & {"execute", "gather_dep"})


def test_a_worker_joins_and_another_leaves_while_it_goes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster(workers=3)
    async def run(client: Any, scheduler: Any, a: Any, b: Any, c: Any) -> None:
        before = whole_state(scheduler, a, b)
        gate = teardown_stops(monkeypatch)
        await dask_gpurt.enable(client)
        off = await begun(dask_gpurt.disable(client))
        await gate.reached.wait()
        leaving = await begun(c.close())
        async with Worker(scheduler.address, nthreads=1) as late:
            gate.open.set()
            await asyncio.gather(off, leaving)
            assert "gpurt" not in late.plugins
            assert whole_state(scheduler, a, b) == before


def test_a_worker_that_was_handed_the_plugin_too_late_stays_off() -> None:
    """Disabling overtakes the scheduler's reply to the worker's registration."""

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = whole_state(scheduler, a, b)
        await dask_gpurt.enable(client)
        plugin = scheduler.worker_plugins["gpurt"]
        await dask_gpurt.disable(client)
        await a.plugin_add(plugin=plugin, name="gpurt")
        assert whole_state(scheduler, a, b) == before
        await client.submit(len, "xy", workers=[a.address])  # Dask has not closed it because of its message
        assert set(scheduler.workers) == {a.address, b.address}


def test_a_worker_that_is_handed_the_plugin_twice_has_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the plugin by the broadcast, and in the reply to its registration."""

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        gate = setup_stops(monkeypatch)
        on = await begun(dask_gpurt.enable(client))
        again = await begun(a.plugin_add(plugin=scheduler.worker_plugins["gpurt"], name="gpurt"))
        gate.open.set()
        await asyncio.gather(on, again)
        assert_on(scheduler, a, b)
        await assert_shuffles(client, ours=True)


@pytest.mark.parametrize("heard", [True, False])
def test_a_worker_asks_again_whether_it_shall_join(heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection breaks before the scheduler receives the request, or before the reply arrives."""
    join, broken = Workers.join, set[str]()

    def breaks_once(self: Workers, worker: str, **message: Any) -> bool:
        if worker in broken:
            return join(self, worker, **message)
        broken.add(worker)
        if heard:
            join(self, worker, **message)
        raise CommClosedError("injected")

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = whole_state(scheduler, a, b)
        monkeypatch.setattr(Workers, "join", breaks_once)
        await dask_gpurt.enable(client)
        assert broken == {a.address, b.address}
        assert_on(scheduler, a, b)
        await dask_gpurt.disable(client)  # waits for the workers that were accepted
        assert whole_state(scheduler, a, b) == before


def test_nobody_waits_for_a_worker_that_asks_again_when_it_goes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was accepted, the reply was lost, and its retry is refused."""
    join, known, asked = Workers.join, set[str](), asyncio.Event()

    def breaks_for_others(self: Workers, worker: str, **message: Any) -> bool:
        joins = join(self, worker, **message)
        if joins and worker not in known:
            asked.set()
            raise CommClosedError("injected")
        return joins

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        known.update(scheduler.workers)
        monkeypatch.setattr(Workers, "join", breaks_for_others)
        await dask_gpurt.enable(client)
        late = Worker(scheduler.address, nthreads=1)
        starting = asyncio.ensure_future(late.start())
        await asked.wait()
        await dask_gpurt.disable(client)
        await starting
        assert "gpurt" not in late.plugins
        await late.close()


def test_no_output_goes_to_a_worker_that_is_not_on_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        gate = setup_stops(monkeypatch)
        late = Worker(scheduler.address, nthreads=1)
        joining = await begun(late)
        await gate.reached.wait()
        assert late.address in scheduler.workers
        with client.as_current():
            future = client.compute(dd.from_pandas(FRAME, npartitions=4).shuffle("key"))
        active = scheduler.extensions["shuffle"].active_shuffles
        await until(lambda: bool(active))
        (run,) = active.values()
        assert set(run.run_spec.worker_for.values()) == {a.address, b.address}
        gate.open.set()
        await joining
        assert sorted((await future)["row"]) == list(range(ROWS))
        await late.close()


# ---- silent workers ------------------------------------------------------------------------


def falls_silent(worker: Any, monkeypatch: pytest.MonkeyPatch, *, hears: bool = False) -> asyncio.Event:
    """Stop the heartbeats of a worker, and its handling of plugins unless it still ``hears``.

    Returns the event that lets it continue. Silence is noticed in half a second.
    """
    monkeypatch.setattr(switching, "SILENT_S", 0.1)
    monkeypatch.setattr(silence, "MISSED", 1)
    goes_on, heartbeat = asyncio.Event(), worker.periodic_callbacks["heartbeat"]

    def waits(handler: Any) -> Any:
        async def wait(**message: Any) -> Any:
            heartbeat.stop()
            if not hears:
                await goes_on.wait()
            return await handler(**message)

        return wait

    for op in ("plugin-add", "plugin-remove"):
        monkeypatch.setitem(worker.handlers, op, waits(worker.handlers[op]))
    return goes_on


def restored(scheduler: Any, worker: Any) -> dict[str, Any]:
    """Return the state that is restored even if another worker is silent, which may still send messages."""
    found = whole_state(scheduler, worker)
    return {**found, "stream handlers": found["stream handlers"][1:]}


def on_cluster_with_a_silent_worker(test: Callable[..., Awaitable[None]]) -> None:
    """Run a coroutine with a client, a scheduler and two workers, the second of which falls silent."""

    async def body(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        register_method()
        before = restored(scheduler, a), restored(scheduler, b)
        await test(client, scheduler, a, b)
        assert_on(scheduler, a, b)
        await assert_shuffles(client, ours=True)
        await dask_gpurt.disable(client)
        assert (restored(scheduler, a), restored(scheduler, b)) == before

    gen_client_cluster(nthreads=[("127.0.0.1", 1)] * 2)(body)()


def test_a_worker_is_silent_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It receives the plugin late, and learns that it has to stay off."""
    ask_to_join = GpurtWorkerPlugin._ask_to_join
    asked_late: asyncio.Queue[JoinReply] = asyncio.Queue()

    async def asks(self: GpurtWorkerPlugin, devices: Any) -> JoinReply:
        reply = await ask_to_join(self, devices)
        if self.worker.address in silent:
            asked_late.put_nowait(reply)
        return reply

    monkeypatch.setattr(GpurtWorkerPlugin, "_ask_to_join", asks)
    silent = set[str]()

    @on_cluster_with_a_silent_worker
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = restored(scheduler, a)
        silent.add(b.address)
        with monkeypatch.context() as patch:
            goes_on = falls_silent(b, patch)
            with pytest.raises(
                RuntimeError, match=f"{b.address} did not switch the runtime on: it is silent"
            ):
                await dask_gpurt.enable(client)
        assert not dask_gpurt.is_enabled(client)
        assert restored(scheduler, a) == before
        goes_on.set()
        assert await asked_late.get() is JoinReply.STAY_OFF
        await until(lambda: "gpurt" not in b.plugins)
        b.periodic_callbacks["heartbeat"].start()
        await dask_gpurt.enable(client)


@pytest.mark.parametrize("hears", [False, True])
def test_a_worker_is_silent_while_it_goes_off(monkeypatch: pytest.MonkeyPatch, hears: bool) -> None:
    """It does not hear of that until it looks it up, or its last message is not heard."""
    monkeypatch.setattr("dask_gpurt.plugins.worker.TRIM_INTERVAL_S", 0.1)
    say, silent = GpurtWorkerPlugin._send, set[str]()

    def unheard(self: GpurtWorkerPlugin, what: str, **more: str) -> None:
        if what != LEFT_OP or self.worker.address not in silent:
            say(self, what, **more)

    monkeypatch.setattr(GpurtWorkerPlugin, "_send", unheard)

    @on_cluster_with_a_silent_worker
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = restored(scheduler, a)
        await dask_gpurt.enable(client)
        silent.add(b.address)
        with monkeypatch.context() as patch:
            falls_silent(b, patch, hears=hears)
            with pytest.raises(RuntimeError, match=rf"1 of 2 workers did not.*{b.address}: it is silent"):
                await dask_gpurt.disable(client)
        assert not dask_gpurt.is_enabled(client)
        assert restored(scheduler, a) == before
        silent.clear()
        b.periodic_callbacks["heartbeat"].start()
        await until(lambda: "gpurt" not in b.plugins)
        await dask_gpurt.enable(client)


def test_it_goes_on_at_a_worker_that_still_goes_off_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after it was silent: the parts of two plugins would replace the same methods in any order."""

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        gate = teardown_stops(monkeypatch)
        await dask_gpurt.enable(client)
        off = await begun(b.plugins["gpurt"]._remove_outdated())
        await gate.reached.wait()
        on = await begun(b.plugin_add(plugin=scheduler.worker_plugins["gpurt"], name="gpurt"))
        assert not hasattr(b.plugins["gpurt"], "exchange")
        gate.open.set()
        await asyncio.gather(off, on)
        assert_on(scheduler, a, b)
        await assert_shuffles(client, ours=True)


# ---- errors --------------------------------------------------------------------------------


def test_parts_that_fail_to_switch_off_are_reported_and_the_rest_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = whole_state(scheduler, a, b)
        close = TopologyReporter.close

        def fails(reporter: Any) -> None:
            close(reporter)
            if reporter._worker is b:
                raise OSError("it will not")

        with monkeypatch.context() as patch:
            patch.setattr(TopologyReporter, "close", fails)
            await dask_gpurt.enable(client)
            with pytest.raises(
                RuntimeError, match=rf"1 of 2 workers did not switch it off.*{b.address}.*it will not"
            ):
                await dask_gpurt.disable(client)
        assert whole_state(scheduler, a, b) == before
        await dask_gpurt.disable(client)
        await dask_gpurt.enable(client)
        await assert_shuffles(client, ours=True)


def test_a_key_that_can_not_be_read_does_not_keep_a_worker_on(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_plain_cluster(workers=1)
    async def run(client: Any, scheduler: Any, a: Any) -> None:
        await dask_gpurt.enable(client)
        whole, broken = client.submit(range, 5), client.submit(range, 7)
        await client.gather([whole, broken])
        data = a.plugins["gpurt"].data
        copies = data._tiered_buffer.copies

        def fails(keys: Any) -> Any:
            if broken.key in keys:
                raise PermissionError("the disk was taken away")
            return copies(keys)

        monkeypatch.setattr(data._tiered_buffer, "copies", fails)
        await dask_gpurt.disable(client)
        assert list(await whole) == list(range(5))
        assert list(await broken) == list(range(7)), "it is computed again"


def test_giving_data_back_looks_at_each_key_a_few_times() -> None:
    class Counted(dict[Any, Any]):
        looks = 0

        def __contains__(self, key: object) -> bool:
            Counted.looks += 1
            return super().__contains__(key)

    @on_plain_cluster(workers=1)
    async def run(client: Any, scheduler: Any, a: Any) -> None:
        await dask_gpurt.enable(client)
        keys = 300
        kept = await client.scatter({f"key-{i}": i for i in range(keys)})
        a.plugins["gpurt"].data._before = Counted()
        await dask_gpurt.disable(client)
        assert len(a.data) == len(kept) == keys
        assert Counted.looks < 5 * keys


# ---- collections -----------------------------------------------------------------------------


def built() -> dict[str, Any]:
    frame = dd.from_pandas(FRAME, npartitions=4)
    return {
        "shuffle": frame.shuffle("key"),
        "named": frame.shuffle("key", shuffle_method="gpurt"),
        "merge": frame.merge(frame, on="key"),
        "drop_duplicates": frame.drop_duplicates("key"),
        "groupby": frame.groupby("key").row.sum(split_out=3),
        "value_counts": frame.key.value_counts(split_out=3),
    }


def test_a_collection_built_while_it_was_on_is_computed_afterwards() -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        with client.as_current():
            collections = built()
            lengths = {name: len(await client.compute(made)) for name, made in collections.items()}
            await dask_gpurt.disable(client)
            for name, made in collections.items():
                assert len(await client.compute(made)) == lengths[name], name

    with dask.config.set(scheduler="sync"):
        for made in built().values():
            assert len(made.compute())


def test_a_shuffle_that_was_taken_over_is_computed_by_tasks_after_switching_off() -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        with dask.config.set({"dataframe.shuffle.method": "tasks"}), client.as_current():
            await dask_gpurt.enable(client)
            made = [built()["shuffle"], built()["merge"]]
            lengths = [len(await client.compute(one)) for one in made]
            metrics = scheduler.extensions["gpurt"].metrics
            await until(lambda: metrics.snapshot()["counters"].get("shuffle.taken.configured-tasks") == 2)
            await dask_gpurt.disable(client)
            for one, length in zip(made, lengths, strict=True):
                assert not any("barrier" in str(key) for key in one.optimize().__dask_graph__())
                assert len(await client.compute(one)) == length


def test_bags_are_grouped_while_it_is_on() -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        with client.as_current():
            grouped = await client.compute(
                db.from_sequence(range(10), npartitions=2).groupby(lambda x: x % 2)
            )
        assert sorted(key for key, _ in grouped) == [0, 1]
        assert dask.config.get("dataframe.shuffle.method", None) is None


@pytest.mark.parametrize("begun_before", [True, False])
def test_a_task_ends_after_it_was_switched_off(monkeypatch: pytest.MonkeyPatch, begun_before: bool) -> None:
    """Its result finds no room, or it waits for room, in tiers that no longer exist."""

    def large(reached: Event, go: Event) -> bytes:
        reached.set()
        go.wait()
        return bytes(LARGE)

    @on_plain_cluster(workers=1, **{"gpurt.memory.device": "1 MiB"})
    async def run(client: Any, scheduler: Any, a: Any) -> None:
        await dask_gpurt.enable(client)
        reached, go = Event("reached", client=client), Event("go", client=client)
        gate = Gate()
        if not begun_before:
            gate.put(monkeypatch, TaskRunner, "_admitted")
        task = client.submit(large, reached, go)
        await (reached.wait() if begun_before else gate.reached.wait())
        await dask_gpurt.disable(client)
        gate.open.set()
        await go.set()
        assert len(await task) == LARGE


# ---- retries -----------------------------------------------------------------------------------


def test_outputs_may_be_lost_more_often_than_a_shuffle_may_fail() -> None:
    @on_plain_cluster(**{"gpurt.shuffle.retries": 1})
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        runtime = scheduler.extensions["gpurt"]
        with client.as_current():
            kept = client.persist(dd.from_pandas(FRAME, npartitions=4).shuffle("key"))
            for day in range(4):
                found = await client.compute(kept)
                assert sorted(found["row"]) == list(range(ROWS)), day
                assert await runs(client) == 2, "each worker goes on with its first"
                for worker in (a, b):
                    outputs = [key for key in worker.data if "gpurtshuffle" in str(key)]
                    runtime.lost(worker.address, outputs)


def test_a_barrier_fails_that_could_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure ends the run, so a retry finds no run: Dask reports that instead of the original error."""
    barrier = ShuffleWorkerPlugin._barrier
    errors = [ValueError("injected")]

    async def fails_once(self: Any, shuffle_id: Any, run_ids: Any) -> int:
        if errors:
            raise errors.pop()
        return await barrier(self, shuffle_id, run_ids)

    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        monkeypatch.setattr(ShuffleWorkerPlugin, "_barrier", fails_once)
        with client.as_current(), pytest.raises(RuntimeError, match="during barrier phase") as caught:
            await client.compute(dd.from_pandas(FRAME, npartitions=4).shuffle("key"), retries=2)
        assert "injected" in str(caught.value.__cause__)


# ---- settings that are refused -----------------------------------------------------------


def test_switching_on_raises_the_error_of_workers_without_tracebacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = switching._without_traceback.plugins

    @gen_client_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def test(client: Any, scheduler: Any, *workers: Any) -> None:
        with (
            dask.config.set({"gpurt.memory.device": "500 TiB"}),
            pytest.raises(ConfigError, match="comes to 500"),
        ):
            await dask_gpurt.enable(client)
        assert "gpurt" not in scheduler.extensions
        await until(lambda: switching._without_traceback.plugins == before)

    test()
    # Dask reports a connection that closes with its cluster below warnings, with a traceback.
    assert [one for one in caplog.records if one.exc_info and one.levelno >= logging.WARNING] == []


def test_dasks_logs_are_as_before_once_the_runtime_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers of other tests in this process have failed to switch on, and were closed without their plugin.
    monkeypatch.setattr(switching._without_traceback, "plugins", 0)

    @gen_client_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def test(client: Any, scheduler: Any, *workers: Any) -> None:
        await dask_gpurt.enable(client)
        assert all(logging.getLogger(name).filters for name in DASKS_LOGS)
        await dask_gpurt.disable(client)
        assert not any(logging.getLogger(name).filters for name in DASKS_LOGS)

    test()


def test_workers_that_come_and_refuse_their_settings_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    @on_cluster(workers=0)
    async def test(client: Any, scheduler: Any) -> None:
        with dask.config.set({"gpurt.memory.device": "499 TiB"}):
            async with Worker(scheduler.address, nthreads=1):
                await until(lambda: "gpurt" not in scheduler.extensions)  # it would be enabled nowhere
        assert caplog.text.count("the runtime stays off: 'gpurt.memory.device' comes to 499.00 TiB") == 1
        await dask_gpurt.enable(client)
        async with Worker(scheduler.address, nthreads=1) as good:
            await until(lambda: good.address in scheduler.extensions["gpurt"].workers.ready)
            with dask.config.set({"gpurt.memory.device": "much"}):
                async with Worker(scheduler.address, nthreads=1) as bad:
                    said = f"the runtime is not on at {bad.address}, and shuffles that reach it fail"
                    await until(lambda: said in caplog.text)
            assert "gpurt" in scheduler.extensions

    test()
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_smaller_worker_that_joins_takes_part_with_default_limits() -> None:
    # The limit of 1 GiB is for the pools. The process of the tests may exceed it, and a paused worker
    # runs no task.
    @on_cluster(workers=2, **{"gpurt.memory.device": "2 GiB", "distributed.worker.memory.pause": False})
    async def test(client: Any, scheduler: Any, *workers: Any) -> None:
        ready = scheduler.extensions["gpurt"].workers.ready
        async with Worker(scheduler.address, nthreads=1, memory_limit="1 GiB") as small:
            await until(lambda: small.address in ready)
            found = (await dask_gpurt.report(client)).workers[small.address]
            assert "comes to 2.00 GiB" in found.fallbacks["memory.default-limits"].reason
            with client.as_current():
                result = await client.compute(dd.from_pandas(FRAME, npartitions=6).shuffle("key"))
            assert sorted(result["row"]) == list(range(ROWS))
            assert "gpurt" in small.plugins

    test()


def test_objects_that_a_program_has_frozen_stay_frozen() -> None:
    """As in a program whose workers are in its own process."""
    gc.freeze()

    @on_cluster(workers=2)
    async def run(client: Any, scheduler: Any, *workers: Any) -> None:
        for worker in workers:
            plugin = worker.plugins["gpurt"]
            await plugin.exchange.offload(plugin._load_kernels, plugin.exchange.pools.devices)

    run()
    assert gc.get_freeze_count()
