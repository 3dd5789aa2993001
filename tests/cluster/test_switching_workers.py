"""Enable and disable the runtime while workers join, leave, fall silent or refuse their settings."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import dask
import dask.dataframe as dd
import pytest
from distributed import Client, Worker
from distributed.comm.core import CommClosedError

import dask_gpurt
from dask_gpurt.client.session import register_method
from dask_gpurt.config import ConfigError
from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.protocol import LEFT_OP, JoinReply
from dask_gpurt.scheduler import switching, worker_calls
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.worker.plugin import GpurtWorkerPlugin
from tests.helpers.clusters import QUICK, processes
from tests.helpers.in_process import gen_client_cluster, on_cluster, on_plain_cluster, until, whole_state
from tests.helpers.switching import (
    FRAME,
    ROWS,
    assert_on,
    assert_shuffles,
    begun,
    setup_stops,
    teardown_stops,
)

# ---- workers that come and go --------------------------------------------------------------


@on_plain_cluster(workers=3)
async def test_a_worker_joins_and_another_leaves_while_it_goes_on(
    client: Any, scheduler: Any, a: Any, b: Any, c: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@on_plain_cluster(workers=3)
async def test_a_worker_joins_and_another_leaves_while_it_goes_off(
    client: Any, scheduler: Any, a: Any, b: Any, c: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@on_plain_cluster()
async def test_a_worker_that_was_handed_the_plugin_too_late_stays_off(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    """Disabling overtakes the scheduler's reply to the worker's registration."""
    before = whole_state(scheduler, a, b)
    await dask_gpurt.enable(client)
    plugin = scheduler.worker_plugins["gpurt"]
    await dask_gpurt.disable(client)
    await a.plugin_add(plugin=plugin, name="gpurt")
    assert whole_state(scheduler, a, b) == before
    await client.submit(len, "xy", workers=[a.address])  # Dask has not closed it because of its message
    assert set(scheduler.workers) == {a.address, b.address}


@on_plain_cluster()
async def test_a_worker_that_is_handed_the_plugin_twice_has_it_once(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the plugin by the broadcast, and in the reply to its registration."""
    gate = setup_stops(monkeypatch)
    on = await begun(dask_gpurt.enable(client))
    again = await begun(a.plugin_add(plugin=scheduler.worker_plugins["gpurt"], name="gpurt"))
    gate.open.set()
    await asyncio.gather(on, again)
    assert_on(scheduler, a, b)
    await assert_shuffles(client, ours=True)


@pytest.mark.parametrize("heard", [True, False])
@on_plain_cluster()
async def test_a_worker_asks_again_whether_it_shall_join(
    client: Any, scheduler: Any, a: Any, b: Any, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection breaks before the scheduler receives the request, or before the reply arrives."""
    join, broken = Workers.join, set[str]()

    def breaks_once(self: Workers, worker: str, **message: Any) -> bool:
        if worker in broken:
            return join(self, worker, **message)
        broken.add(worker)
        if heard:
            join(self, worker, **message)
        raise CommClosedError("injected")

    before = whole_state(scheduler, a, b)
    monkeypatch.setattr(Workers, "join", breaks_once)
    await dask_gpurt.enable(client)
    assert broken == {a.address, b.address}
    assert_on(scheduler, a, b)
    await dask_gpurt.disable(client)  # waits for the workers that were accepted
    assert whole_state(scheduler, a, b) == before


@on_plain_cluster()
async def test_nobody_waits_for_a_worker_that_asks_again_when_it_goes_off(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was accepted, the reply was lost, and its retry is refused."""
    join, known, asked = Workers.join, set[str](), asyncio.Event()

    def breaks_for_others(self: Workers, worker: str, **message: Any) -> bool:
        joins = join(self, worker, **message)
        if joins and worker not in known:
            asked.set()
            raise CommClosedError("injected")
        return joins

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


@on_plain_cluster()
async def test_no_output_goes_to_a_worker_that_is_not_on_yet(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (("99.0", None), r"cannot load dask_gpurt .* \(it has 99.0\)"),
        ((None, "No module"), r"\(No module\)"),
        ((dask_gpurt.__version__, "another Dask"), "the worker at .* cannot take part: another Dask"),
    ],
)
def test_nothing_is_replaced_before_all_workers_can_take_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reply: Any, said: str
) -> None:
    @on_plain_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        def answer(**message: Any) -> dict[str, Any]:
            del scheduler.extensions["gpurt"]  # where those that switch on at once find each other
            assert whole_state(scheduler, a, b) == before
            return {"status": "OK", "result": reply}

        before = whole_state(scheduler, a, b)
        monkeypatch.setitem(b.handlers, "run", answer)
        with pytest.raises(UnsupportedError, match=said):
            await dask_gpurt.enable(client)

    run()
    assert [one for one in caplog.records if one.exc_info and one.levelno >= logging.WARNING] == []


# ---- silent workers ------------------------------------------------------------------------


def falls_silent(worker: Any, monkeypatch: pytest.MonkeyPatch, *, hears: bool = False) -> asyncio.Event:
    """Stop the heartbeats of a worker, and its handling of plugins unless it still ``hears``.

    Returns the event that lets it continue. Silence is noticed in half a second.
    """
    monkeypatch.setattr(switching, "SILENT_S", 0.1)
    monkeypatch.setattr(worker_calls, "MISSED", 1)
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


def on_cluster_with_a_silent_worker(test: Callable[..., Awaitable[None]]) -> None:
    """Run a coroutine with a client, a scheduler and two workers, the second of which falls silent."""

    async def body(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        register_method()
        await dask_gpurt.disable(client)  # for clients that earlier tests closed while it was enabled
        before = whole_state(scheduler, a), whole_state(scheduler, b)
        await test(client, scheduler, a, b)
        assert_on(scheduler, a, b)
        await assert_shuffles(client, ours=True)
        await dask_gpurt.disable(client)
        assert (whole_state(scheduler, a), whole_state(scheduler, b)) == before

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
        before = whole_state(scheduler, a)
        silent.add(b.address)
        with monkeypatch.context() as patch:
            goes_on = falls_silent(b, patch)
            with pytest.raises(
                RuntimeError, match=f"{b.address} did not switch the runtime on: it is silent"
            ):
                await dask_gpurt.enable(client)
        assert not dask_gpurt.is_enabled(client)
        assert whole_state(scheduler, a) == before
        goes_on.set()
        assert await asked_late.get() is JoinReply.STAY_OFF
        await until(lambda: "gpurt" not in b.plugins)
        b.periodic_callbacks["heartbeat"].start()
        await dask_gpurt.enable(client)


def test_a_worker_is_silent_while_it_goes_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last message is not heard."""
    monkeypatch.setattr("dask_gpurt.worker.plugin.TRIM_INTERVAL_S", 0.1)
    say, silent = GpurtWorkerPlugin._send, set[str]()

    def unheard(self: GpurtWorkerPlugin, what: str, **more: str) -> None:
        if what != LEFT_OP or self.worker.address not in silent:
            say(self, what, **more)

    monkeypatch.setattr(GpurtWorkerPlugin, "_send", unheard)

    @on_cluster_with_a_silent_worker
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        before = whole_state(scheduler, a)
        await dask_gpurt.enable(client)
        silent.add(b.address)
        with monkeypatch.context() as patch:
            falls_silent(b, patch, hears=True)
            with pytest.raises(RuntimeError, match=rf"1 of 2 workers did not.*{b.address}: it is silent"):
                await dask_gpurt.disable(client)
        assert not dask_gpurt.is_enabled(client)
        assert whole_state(scheduler, a) == before
        silent.clear()
        b.periodic_callbacks["heartbeat"].start()
        await until(lambda: "gpurt" not in b.plugins)
        await dask_gpurt.enable(client)
        assert not [one for one in caplog.records if "No handler" in one.getMessage()]


@on_plain_cluster()
async def test_it_goes_on_at_a_worker_that_still_goes_off_itself(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after it was silent: the parts of two plugins would replace the same methods in any order."""
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


# ---- settings that are refused -----------------------------------------------------------


def test_switching_on_raises_the_error_of_workers_without_tracebacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @gen_client_cluster(nthreads=[("127.0.0.1", 1)] * 2)
    async def test(client: Any, scheduler: Any, *workers: Any) -> None:
        with (
            dask.config.set({"gpurt.memory.device": "500 TiB"}),
            pytest.raises(ConfigError, match="comes to 500"),
        ):
            await dask_gpurt.enable(client)
        assert "gpurt" not in scheduler.extensions

    test()
    # Dask reports a connection that closes with its cluster below warnings, with a traceback.
    assert [one for one in caplog.records if one.exc_info and one.levelno >= logging.WARNING] == []


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


@on_cluster(workers=2, **{"gpurt.memory.device": "2 GiB", "distributed.worker.memory.pause": False})
async def test_a_smaller_worker_that_joins_takes_part_with_default_limits(
    client: Any, scheduler: Any, *workers: Any
) -> None:
    ready = scheduler.extensions["gpurt"].workers.ready
    async with Worker(scheduler.address, nthreads=1, memory_limit="1 GiB") as small:
        await until(lambda: small.address in ready)
        found = (await dask_gpurt.report(client)).workers[small.address]
        assert "comes to 2.00 GiB" in found.fallbacks["memory.default-limits"].reason
        with client.as_current():
            result = await client.compute(dd.from_pandas(FRAME, npartitions=6).shuffle("key"))
        assert sorted(result["row"]) == list(range(ROWS))
        assert "gpurt" in small.plugins


class Cycle:
    """Refer to itself, so that only the garbage collector can free it."""

    def __init__(self) -> None:
        self.me = self


#: What a program keeps in a process, as in a notebook.
kept: list[Any] = []


def keep() -> None:
    kept.append(Cycle())


def let_go() -> bool:
    """Let go of what this process keeps, and return whether a collection frees it."""
    gone = weakref.ref(kept.pop())
    gc.collect()
    return gone() is None


def test_the_garbage_of_a_program_is_freed_although_it_lived_when_the_runtime_was_switched_on() -> None:
    with dask.config.set(QUICK), processes(workers=1) as local, Client(local) as client:
        keep()
        client.run(keep)
        client.run_on_scheduler(keep)
        dask_gpurt.enable(client)
        frame = dd.from_pandas(FRAME, npartitions=6)
        assert len(frame.shuffle("key").compute()) == ROWS
        # The scheduler runs in the process of the client.
        assert let_go()
        assert client.run_on_scheduler(let_go)
        assert all(client.run(let_go).values())
