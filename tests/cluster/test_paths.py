"""Which path shards take: the one with the least time, of those that there are."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.config import PATHS
from dask_gpurt.device import MappingError
from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange.inbox import reading
from dask_gpurt.exchange.paths import Between, Path, least, possible
from dask_gpurt.exchange.shard import Attempt, Section, Shard
from dask_gpurt.topology import SHIPPED, Link, Speed
from tests.helpers.in_process import all_placed, on_cluster, until

ALL = frozenset(PATHS)
RUN = ("a shuffle", 1)


class Accelerator(HostDevice):
    """Stands for a GPU: what it holds is read after a copy, and peers map it if the ticket says so."""

    kind = "accelerator"
    shared_path = "cuda-ipc"
    reads_in_place = False
    on_host = False
    host_links = (Link.PAGEABLE,)

    def map(self, ticket: Any) -> Any:
        if ticket.get("mapped"):
            return object()
        raise MappingError("no peer access")

    def from_host(self, sources: Any) -> list[Any]:
        return [source.copy() for source in sources]


class Pool(HostDevice):
    """The host, whose pools anybody maps."""

    def map(self, ticket: Any) -> Any:
        return object()


def best(between: Between, nbytes: int, *, mapped: bool = True, **speeds: Speed) -> str:
    """The path between two accelerators."""
    known = {**SHIPPED, **{Link[name.upper()]: speed for name, speed in speeds.items()}}
    found = possible(Accelerator(2**30), {"mapped": mapped}, ALL, between)
    return least(found, nbytes, known.__getitem__).name


# ---- a table of situations -----------------------------------------------------------

STAGING: Any = object()


@pytest.mark.parametrize("nbytes", [1, 2**16, 2**30])
@pytest.mark.parametrize(
    ("between", "mapped", "path"),
    [
        (Between(Link.NVLINK, STAGING), True, "cuda-ipc"),
        (Between(Link.PCIE, STAGING), True, "cuda-ipc"),
        (Between(None, STAGING), True, "cuda-ipc"),
        (Between(Link.SHARED_MEMORY, STAGING), False, "through-host"),
        (Between(Link.SHARED_MEMORY, None), False, "comms"),
        (Between(Link.RDMA, None, carried=True), False, "comms"),
        (Between(Link.TCP, None), False, "comms"),
    ],
)
def test_a_person_would_take_the_same(between: Between, mapped: bool, path: str, nbytes: int) -> None:
    assert best(between, nbytes, mapped=mapped) == path


def test_where_peer_copies_are_slow_large_shards_go_through_the_host() -> None:
    slow = Speed(1e9, 20e-6)
    assert best(Between(Link.PCIE, STAGING), 2**30, pcie=slow) == "through-host"
    assert best(Between(Link.PCIE, STAGING), 2**10, pcie=slow) == "cuda-ipc"


def test_on_one_device_nothing_is_copied() -> None:
    device = Accelerator(2**30)
    path = least(
        possible(device, {"mapped": True}, ALL, Between(Link.SAME_DEVICE, STAGING)), 2**30, SHIPPED.get
    )
    assert (path.name, path.in_place, path.steps) == ("cuda-ipc", True, ())


@pytest.mark.parametrize("link", [None, *Link])
def test_in_host_memory_nothing_is_copied(link: Link | None) -> None:
    found = possible(Pool(2**30), {}, ALL, Between(link))
    path = least(found, 2**30, SHIPPED.__getitem__)
    assert (path.name, path.in_place) == ("shared-memory", True)


@pytest.mark.parametrize(
    ("ticket", "allowed", "reason"),
    [
        ({}, ALL, "no peer access"),
        ({"mapped": True}, frozenset({"comms"}), "gpurt.exchange.paths leaves cuda-ipc out"),
        (None, ALL, "one of the two workers has no such device"),
    ],
)
def test_the_reason_is_told(ticket: Any, allowed: frozenset[str], reason: str) -> None:
    (path,) = possible(Accelerator(2**30), ticket, allowed, Between())
    assert path.describe() == {"path": "comms", "reason": reason}


# ---- rules ---------------------------------------------------------------------------

SPEEDS = st.builds(Speed, st.floats(1e6, 1e12), st.floats(0, 1e-2))
LINKS = st.fixed_dictionaries({link: SPEEDS for link in Link})
SIZES = st.integers(0, 2**40)
WAYS = st.lists(
    st.builds(
        Path,
        st.sampled_from(["cuda-ipc", "through-host", "comms"]),
        st.none(),
        st.booleans(),
        steps=st.lists(st.sampled_from(Link), max_size=3).map(tuple),
        message=st.floats(0, 1e-2),
    ),
    min_size=1,
)


@given(WAYS, SIZES, LINKS)
def test_no_path_takes_less(ways: list[Path], nbytes: int, speeds: dict[Link, Speed]) -> None:
    taken = least(ways, nbytes, speeds.__getitem__)
    assert taken in ways
    assert taken.seconds(nbytes, speeds.__getitem__) == min(
        way.seconds(nbytes, speeds.__getitem__) for way in ways
    )


@given(WAYS, SIZES, SIZES, LINKS)
def test_more_bytes_never_take_less(
    ways: list[Path], one: int, other: int, speeds: dict[Link, Speed]
) -> None:
    fewer, more = (
        least(ways, nbytes, speeds.__getitem__).seconds(nbytes, speeds.__getitem__)
        for nbytes in sorted((one, other))
    )
    assert fewer <= more


# ---- through host memory, on workers -------------------------------------------------

NBYTES = 100_000


def with_accelerator(worker: Any) -> Any:
    """The exchange of a worker, which gets one."""
    exchange = worker.plugins["gpurt"].exchange
    exchange.pools.devices["accelerator"] = Accelerator(2**30)
    return exchange


def publish(exchange: Any, owner: str, data: np.ndarray) -> Shard:
    outbox = exchange.pools.outbox("accelerator")
    blocks = [outbox.allocate(half.nbytes) for half in np.split(data, 2)]
    for block, half in zip(blocks, np.split(data, 2), strict=True):
        block.buffer[:] = half
    sections = tuple(
        Section((at,), (0, 1), block.offset, block.nbytes, b"") for at, block in enumerate(blocks)
    )
    return Shard(
        outbox.publish(RUN, owner, blocks), exchange.me, "accelerator", 0, Attempt(0, 0), 0, sections
    )


async def bytes_of(exchange: Any, shard: Shard) -> np.ndarray:
    """What arrives of a shard."""
    errors: list[Exception] = []
    exchange.run_begins(RUN)
    parcel = exchange.take(RUN, shard, await exchange.path(shard), errors.append)

    def read() -> np.ndarray:
        with reading([(parcel, 0), (parcel, 1)], exchange.landing, lambda: None, "task") as found:
            return np.concatenate([buffer for buffer, _ in found])

    data = await exchange.offload(read)
    await exchange.offload(exchange.discard, [parcel])
    assert not errors
    return data


def moved(exchange: Any) -> set[str]:
    return {name for name in exchange.metrics.snapshot()["counters"] if name.startswith("exchange.bytes.")}


@pytest.mark.parametrize("room", [True, False])
def test_a_shard_goes_through_host_memory(room: bool) -> None:
    """Where it has no room, by comms."""

    @on_cluster(workers=2)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await all_placed(scheduler)
        here, there = with_accelerator(a), with_accelerator(b)
        host = here.pools.outbox("host")
        if not room:
            taken = host.allocate(host.pool.capacity)
        data = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
        shard = await here.offload(publish, here, b.address, data)
        np.testing.assert_array_equal(await bytes_of(there, shard), data)
        assert moved(there) == {"exchange.bytes.through-host"}
        fallbacks = here.metrics.snapshot()["fallbacks"]
        assert room == ("bytes take Dask's comms" not in fallbacks)
        assert "no peer access" in str(there.metrics.snapshot()["fallbacks"])
        if not room:
            host.give_back(taken)
        await until(lambda: not host.pool.used and not here.pools.outbox("accelerator").pool.used)

    run()


def test_a_staged_shard_of_a_run_that_ends_is_freed() -> None:
    @on_cluster(workers=2)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        here = with_accelerator(a)
        shard = await here.offload(publish, here, b.address, np.zeros(NBYTES, np.uint8))
        reply = await here.comms.serve(
            "accelerator", shard.id, list(RUN), None, b.address, here.me.incarnation
        )
        assert len(reply["staged"]["offsets"]) == 2
        assert here.pools.outbox("host").pool.used > 0
        await here.withdraw(RUN)
        assert here.pools.outbox("host").pool.used == 0

    run()


@pytest.mark.parametrize("published", ["once the run is over", "while its owner lets go"])
def test_what_is_staged_as_a_run_ends_is_freed(published: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @on_cluster(workers=2)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        here = with_accelerator(a)
        device, copying, go_on = here.pools.device("accelerator"), threading.Event(), threading.Event()
        scatter = device.scatter

        def slowly(*args: Any, **options: Any) -> Any:
            copying.set()
            assert go_on.wait(10)
            return scatter(*args, **options)

        async def lets_go(producer: str, run: list[Any]) -> None:
            if published == "while its owner lets go":
                go_on.set()
                await serving

        monkeypatch.setattr(device, "scatter", slowly)
        b.handlers["gpurt_forget"] = lets_go
        shard = await here.offload(publish, here, b.address, np.zeros(NBYTES, np.uint8))
        serving = asyncio.create_task(
            here.comms.serve("accelerator", shard.id, list(RUN), None, b.address, here.me.incarnation)
        )
        assert await here.offload(copying.wait, 10)
        await here.withdraw(RUN)
        go_on.set()
        reply = await serving
        assert (reply["data"] is None) == (published == "once the run is over")
        assert not here.pools.outbox("host").pool.used
        assert not here.pools.outbox("accelerator").pool.used

    run()
