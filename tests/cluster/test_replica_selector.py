"""Choose which of several replicas a worker fetches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Worker, wait
from distributed.worker_state_machine import WorkerState
from hypothesis import given
from hypothesis import strategies as st

import dask_gpurt
from dask_gpurt.observe import Fallback
from dask_gpurt.worker.replica_selector import ReplicaSelector, farness
from tests.helpers.clusters import cluster
from tests.helpers.in_process import all_placed, on_cluster

CHOICE = Fallback.EXCHANGE_REPLICA_CHOICE.id

#: Two hosts with two workers each; all workers share one address.
FILE = """\
version: 1
hosts: {one: {}, two: {}}
workers: {"0": {host: one}, "1": {host: one}, "2": {host: two}, "3": {host: two}}
"""
KEYS = 12
SECONDS = st.dictionaries(st.text(max_size=3), st.floats(1e-6, 1e3), min_size=1)


@given(SECONDS)
def test_the_nearest_is_not_far_and_no_nearer_one_is_farther(seconds: dict[str, float]) -> None:
    far = farness(seconds)
    assert far[min(seconds, key=seconds.__getitem__)] == 0
    order = sorted(seconds, key=seconds.__getitem__)
    assert [far[worker] for worker in order] == sorted(far.values())


@given(SECONDS, st.integers(-10, 10))
def test_units_do_not_matter(seconds: dict[str, float], power: int) -> None:
    assert farness(seconds) == farness({worker: time * 2.0**power for worker, time in seconds.items()})


@given(st.lists(st.floats(1.0, 1.99), min_size=1))
def test_peers_that_differ_by_noise_are_equally_far(times: list[float]) -> None:
    assert set(farness({str(at): time for at, time in enumerate(times)}).values()) == {0}


def test_no_workers_have_no_farness() -> None:
    assert farness({}) == {}


def sources(worker: Any) -> set[str]:
    return {entry["who"] for entry in worker.transfer_incoming_log}


async def fetch_from_several(client: Any, reader: Any, *holders: Any) -> None:
    """Make a worker fetch keys with several replicas, none of which the memory manager drops before."""
    await client.amm.stop()
    data = await client.scatter(
        {f"data-{at}": bytes(10_000) for at in range(KEYS)}, workers=[holders[0].address]
    )
    await client.replicate(list(data.values()), workers=[holder.address for holder in holders])
    # One task for all keys: while a request to a worker is in flight, further keys are requested elsewhere.
    read = client.submit(lambda found: sum(map(len, found)), list(data.values()), workers=[reader.address])
    assert await read == 10_000 * KEYS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "topology.yaml"
    path.write_text(FILE)
    return path


def fetched(file: Path, prepare: Callable[[Any], None] = lambda runtime: None) -> tuple[set[str], Any]:
    """Return the workers from which the first one fetches keys that three others hold, and its fallbacks."""
    found: list[Any] = []

    @on_cluster(workers=4, file=file)
    async def run(client: Any, scheduler: Any, a: Any, b: Any, c: Any, d: Any) -> None:
        await all_placed(scheduler)
        runtime = a.plugins["gpurt"]
        for peer in (b, c, d):
            assert await runtime.exchange.links.learn(peer.address)
        prepare(runtime)
        await fetch_from_several(client, a, d, c, b)
        names = {peer.address: name for peer, name in ((b, "neighbour"), (c, "far"), (d, "far"))}
        found.append({names[source] for source in sources(a)})
        found.append(runtime.metrics.snapshot()["fallbacks"])

    run()
    return found[0], found[1]


def test_the_nearest_replica_is_fetched(file: Path) -> None:
    names, fallbacks = fetched(file)
    assert names == {"neighbour"}
    assert CHOICE not in fallbacks


def test_an_error_leaves_the_choice_to_dask(file: Path) -> None:
    def break_links(runtime: Any) -> None:
        runtime.exchange.links.known = None

    names, fallbacks = fetched(file, break_links)
    assert names
    assert fallbacks[CHOICE]["count"] > 0


def test_an_unknown_link_is_judged_by_address() -> None:
    """Before the scheduler has replied, workers of one address are equally near, as in Dask."""

    @on_cluster(workers=3)
    async def run(client: Any, scheduler: Any, a: Any, b: Any, c: Any) -> None:
        await fetch_from_several(client, a, b, c)
        assert sources(a) <= {b.address, c.address}
        assert CHOICE not in a.plugins["gpurt"].metrics.snapshot()["fallbacks"]

    run()


def test_another_signature_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(self: Any, host: str) -> Any:
        raise AssertionError

    @on_cluster(workers=1)
    async def run(client: Any, scheduler: Any, a: Any) -> None:
        runtime = a.plugins["gpurt"]
        runtime.replica_selector.uninstall()
        assert type(a.state) is WorkerState
        monkeypatch.setattr(WorkerState, "_select_workers_for_gather", select)
        again = ReplicaSelector(a, runtime.exchange.links, runtime.metrics)
        again.install()
        assert type(a.state) is WorkerState
        assert (
            "_select_workers_for_gather takes (host), expected ()"
            in runtime.metrics.snapshot()["fallbacks"][CHOICE]["reason"]
        )
        again.uninstall()

    run()


def test_switched_off_it_is_dasks_again() -> None:
    def kind(dask_worker: Worker) -> str:
        return str(type(dask_worker.state) is WorkerState)

    with cluster(workers=1) as client:
        assert set(client.run(kind).values()) == {"False"}
        wait(client.submit(len, "x"))
        dask_gpurt.disable(client)
        assert set(client.run(kind).values()) == {"True"}
