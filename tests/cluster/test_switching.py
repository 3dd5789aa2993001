"""Enable and disable the runtime as a whole despite concurrent callers, joining workers and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Event
from distributed.utils_test import captured_logger

import dask_gpurt
from dask_gpurt.exchange.exchange import Exchange
from dask_gpurt.worker.tasks import RunLookup, TaskRunner
from tests.helpers.in_process import on_plain_cluster, until, whole_state
from tests.helpers.switching import (
    FRAME,
    LARGE,
    ROWS,
    Gate,
    another,
    assert_on,
    assert_shuffles,
    begun,
    setup_stops,
    setup_stops_early,
    teardown_stops,
)

# ---- what is logged --------------------------------------------------------------------


@on_plain_cluster()
async def test_an_ordinary_shuffle_is_logged_only_while_it_is_dasks(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    said = []
    for ours in (True, False):
        await (dask_gpurt.enable if ours else dask_gpurt.disable)(client)
        with (
            captured_logger("distributed.shuffle._scheduler_plugin", "WARNING"),  # sets its level, too
            captured_logger("distributed", "WARNING") as dasks,
            captured_logger("dask_gpurt") as own,
        ):
            await assert_shuffles(client, ours=ours, method="p2p")
            await until(lambda: not scheduler.extensions["shuffle"].active_shuffles)
        said.append([dasks.getvalue().count("\n"), own.getvalue()])
    assert said == [[0, ""], [2, ""]], "one shuffle begins and ends"


# ---- two at once -----------------------------------------------------------------------


@on_plain_cluster()
async def test_two_clients_switch_on_at_once(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@on_plain_cluster()
async def test_the_second_is_told_of_the_failure_of_the_first(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    async def fails(exchange: Exchange, *_: Any) -> None:
        gate.reached.set()
        await gate.open.wait()
        if exchange.me.address == b.address:
            raise OSError("no place here")

    before = whole_state(scheduler, a, b)
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "offload", fails)
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


@on_plain_cluster()
async def test_on_while_it_goes_off_is_on(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@on_plain_cluster()
async def test_off_while_it_goes_on_is_off(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
@on_plain_cluster()
async def test_shuffles_of_others_go_on_meanwhile(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
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


@on_plain_cluster()
async def test_a_shuffle_that_was_taken_over_restarts_as_dasks_own(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(frame: pd.DataFrame, partition_info: Any = None) -> pd.DataFrame:
        if partition_info and partition_info["number"] == 3:
            Event("reached").set()
            Event("go").wait(timeout=20)
        return frame

    await dask_gpurt.enable(client)
    async with another(scheduler) as other:
        parts = dd.from_pandas(FRAME, npartitions=4).map_partitions(held, meta=FRAME.iloc[:0])
        future = other.compute(parts.shuffle("key", shuffle_method="p2p"))
        await Event("reached", client=other).wait()
        await until(lambda: bool(scheduler.extensions["shuffle"].active_shuffles))
        await dask_gpurt.disable(client)
        await Event("go", client=other).set()
        assert sorted((await future)["row"]) == list(range(ROWS))


# ---- errors --------------------------------------------------------------------------------


@on_plain_cluster()
async def test_parts_that_fail_to_switch_off_are_reported_and_the_rest_is_off(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = whole_state(scheduler, a, b)
    uninstall = RunLookup.uninstall

    def fails(lookup: Any) -> None:
        uninstall(lookup)
        if lookup._worker is b:
            raise OSError("it will not")

    with monkeypatch.context() as patch:
        patch.setattr(RunLookup, "uninstall", fails)
        await dask_gpurt.enable(client)
        with pytest.raises(
            RuntimeError, match=rf"1 of 2 workers did not switch it off.*{b.address}.*it will not"
        ):
            await dask_gpurt.disable(client)
    assert whole_state(scheduler, a, b) == before
    await dask_gpurt.disable(client)
    await dask_gpurt.enable(client)
    await assert_shuffles(client, ours=True)


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

    run()
    with dask.config.set(scheduler="sync"):
        for made in built().values():
            assert len(made.compute())


@on_plain_cluster()
async def test_a_shuffle_that_was_taken_over_is_computed_by_tasks_after_switching_off(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
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


@pytest.mark.parametrize("begun_before", [True, False])
@on_plain_cluster(workers=1, **{"gpurt.memory.device": "1 MiB"})
async def test_a_task_ends_after_it_was_switched_off(
    client: Any, scheduler: Any, a: Any, monkeypatch: pytest.MonkeyPatch, begun_before: bool
) -> None:
    """Its result finds no room, or it waits for room, in tiers that no longer exist."""

    def large(reached: Event, go: Event) -> bytes:
        reached.set()
        go.wait()
        return bytes(LARGE)

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
