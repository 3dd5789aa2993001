"""Copy objects on a device into one buffer each, and read them as a peer does."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from distributed.protocol import dumps, loads, to_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_serialize
from hypothesis import given

from dask_gpurt.device import PoolFull
from dask_gpurt.memory import peer_copies
from dask_gpurt.memory.peer_copies import Loan, PeerCopies
from dask_gpurt.observe import Metrics
from tests.helpers.far_device import Far, FarDevice
from tests.helpers.in_process import until
from tests.helpers.waiting import on_a_loop

MIB = 1 << 20
#: Those of Dask's comms over UCX.
SERIALIZERS = ("cuda", "dask", "pickle", "error")


class OnDevice:
    """Have some arrays on the device."""

    def __init__(self, *arrays: np.ndarray):
        self.arrays = arrays


class OfGpu(Far):
    """Name itself as device memory."""

    __cuda_array_interface__: dict[str, Any] = {}


class Gpu(FarDevice):
    """Fake a GPU whose memory only its comms can read."""

    serializer = "cuda"

    def carried_by(self, protocol: str) -> bool:
        return True

    def for_comm(self, source: Any) -> OfGpu:
        return OfGpu(source)

    def from_comm(self, sources: Sequence[Any]) -> list[Any]:
        return list(sources)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Have these objects be of a library for GPUs, with Dask's "cuda" serializers."""
    module = "cupy.of_this_test"
    for family in (cuda_serialize, dask_serialize):  # Dask looks for the latter in collections
        family.register(OnDevice)(
            lambda value: (
                {"shapes": [array.shape for array in value.arrays]},
                [OfGpu(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for array in value.arrays],
            )
        )
    cuda_deserialize.register(OnDevice)(
        lambda header, frames: OnDevice(
            *(
                np.frombuffer(frame, np.int64).reshape(shape)
                for shape, frame in zip(header["shapes"], frames, strict=True)
            )
        )
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        if find_spec("cupy") is None:
            monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
        monkeypatch.setitem(sys.modules, module, sys.modules[__name__])
        monkeypatch.setattr(OnDevice, "__module__", module)
        yield
    for family in (cuda_serialize, dask_serialize, cuda_deserialize):
        del family._lookup[OnDevice]


def no_room(nbytes: int) -> Loan:
    raise PoolFull(nbytes)


def copies_of(
    nbytes: int = MIB, device: FarDevice | None = None, lend: Callable[[int], Loan] = no_room
) -> tuple[PeerCopies, Metrics]:
    metrics = Metrics()
    copies = PeerCopies(device or Gpu(), 100 * nbytes, lend, metrics)
    assert copies.nbytes == nbytes
    return copies, metrics


def used(copies: PeerCopies) -> int:
    return 0 if copies._pool is None else copies._pool.used


def over_the_wire(message: Any) -> Any:
    """Return the object as received by a peer, from a message that Dask makes of it."""
    frames = dumps({"x": to_serialize(message)}, serializers=SERIALIZERS, frame_split_size=1000)
    sent = [bytes(frame.memory if isinstance(frame, OfGpu) else frame) for frame in frames]
    return loads(sent, deserializers=SERIALIZERS)["x"]


def equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, OnDevice):
        assert len(found.arrays) == len(expected.arrays)
        for one, other in zip(found.arrays, expected.arrays, strict=True):
            np.testing.assert_array_equal(one, other)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, (list, tuple, dict)):
        assert len(found) == len(expected)
        items = expected if isinstance(expected, dict) else range(len(expected))
        for item in items:
            equal(found[item], expected[item])
    else:
        assert found == expected


shapes = st.lists(st.integers(0, 400), min_size=1, max_size=4)
objects = shapes.map(lambda sizes: OnDevice(*(np.random.default_rng(n).integers(9, size=n) for n in sizes)))
nested = st.lists(objects | st.integers() | st.text(max_size=5) | st.just(np.arange(70)), max_size=4)


@given(objects | nested | st.dictionaries(st.text(max_size=3), objects, max_size=3))
@on_a_loop
async def test_a_peer_gets_the_object_that_was_sent_as_one_buffer(value: Any) -> None:
    copies, metrics = copies_of()
    with ExitStack() as sending:
        found = await copies.messages({"x": value}, sending)
        if "x" in found:
            there = [frame for frame in found["x"].frames if isinstance(frame, OfGpu)]
            assert len(there) == 1
            assert used(copies) >= metrics.snapshot()["counters"]["memory.peer-copies.bytes"] > 0
            equal(over_the_wire(found["x"]), value)
        else:  # nothing of it is on the device
            assert used(copies) == 0
    assert used(copies) == 0
    copies.close()


@on_a_loop
async def test_objects_without_room_are_left_to_dask() -> None:
    copies, metrics = copies_of(64 << 10)
    half, too_large = OnDevice(np.arange(5000)), OnDevice(np.arange(10000))
    with ExitStack() as sending:
        assert list(await copies.messages({"a": half, "b": half, "c": too_large}, sending)) == ["a"]
    assert metrics.snapshot()["counters"]["memory.peer-copies.full"] == 2
    with ExitStack() as sending:
        assert list(await copies.messages({"b": half}, sending)) == ["b"]


class Refusing(Gpu):
    """Have no memory left."""

    asked = 0

    def create_pool(self, nbytes: int) -> Any:
        self.asked += 1
        raise MemoryError("out of memory")


@on_a_loop
async def test_a_device_without_memory_for_copies_is_asked_once() -> None:
    device = Refusing()
    copies, metrics = copies_of(device=device)
    with ExitStack() as sending:
        for _ in range(2):
            assert await copies.messages({"x": OnDevice(np.arange(9))}, sending) == {}
    assert device.asked == 1
    assert metrics.fallbacks()["memory.no-peer-copies"]["count"] == 1


class FailingLater(Gpu):
    """Fail to copy the second object."""

    copied = 0

    def scatter(self, *args: Any, **options: Any) -> Any:
        self.copied += 1
        if self.copied == 2:
            raise RuntimeError("an illegal memory access")
        return super().scatter(*args, **options)


class Waiting(Gpu):
    """Copy once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def scatter(self, *args: Any, **options: Any) -> Any:
        self.entered.set()
        assert self.go_on.wait(20)
        return super().scatter(*args, **options)


async def sent(copies: PeerCopies, objects: dict[str, Any]) -> None:
    with ExitStack() as sending:
        await copies.messages(objects, sending)


@on_a_loop
async def test_a_copy_that_fails_takes_no_room() -> None:
    """Nor do those that were made before it."""
    copies, _ = copies_of(device=FailingLater())
    values = {"x": OnDevice(np.arange(9)), "y": OnDevice(np.arange(9))}
    with pytest.raises(RuntimeError, match="illegal"):
        await sent(copies, values)
    assert used(copies) == 0


@on_a_loop
async def test_a_send_is_cancelled_while_its_objects_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copies, "KEPT_AFTER_FAILURE_S", 0)
    device = Waiting()
    copies, _ = copies_of(device=device)
    sending = asyncio.create_task(sent(copies, {"x": OnDevice(np.arange(9))}))
    await asyncio.to_thread(device.entered.wait, 20)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    copies.close()
    assert used(copies) > 0
    device.go_on.set()
    await until(lambda: copies._pool is None)


@on_a_loop
async def test_copies_are_kept_for_a_while_if_their_connection_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may still read them."""
    monkeypatch.setattr(peer_copies, "KEPT_AFTER_FAILURE_S", 0.01)
    copies, _ = copies_of()
    freed = asyncio.Event()
    free = copies._free
    monkeypatch.setattr(copies, "_free", lambda blocks: (free(blocks), freed.set()))
    sending = ExitStack()
    assert await copies.messages({"x": OnDevice(np.arange(9))}, sending)
    failure = OSError("the connection was closed")
    sending.__exit__(OSError, failure, None)
    assert used(copies) > 0
    copies.close()
    assert used(copies) > 0
    await asyncio.wait_for(freed.wait(), 10)
    assert copies._pool is None


@on_a_loop
async def test_memory_is_freed_once_nothing_is_sent_from_it() -> None:
    copies, _ = copies_of()
    value = OnDevice(np.arange(9))
    with ExitStack() as sending:
        found = await copies.messages({"x": value}, sending)
        copies.close()
        equal(over_the_wire(found["x"]), value)
        assert await copies.messages({"y": value}, sending) == {}
    assert copies._pool is None


class Other:
    """Lend blocks of another pool."""

    def __init__(self, device: FarDevice):
        self.pool = device.create_pool(MIB)

    def lend(self, nbytes: int) -> Loan:
        block = self.pool.allocate(nbytes)
        return Loan(block, self.pool, lambda: self.pool.free(block))


@on_a_loop
async def test_objects_without_room_are_copied_into_another_pool() -> None:
    device = Gpu()
    other = Other(device)
    copies, metrics = copies_of(64 << 10, device, other.lend)
    values = [OnDevice(np.arange(n)) for n in (5000, 5001, 10000, 200_000)]
    with ExitStack() as sending:
        found = await copies.messages(dict(enumerate(values)), sending)
        assert list(found) == [0, 1, 2]  # the second one since the first takes the room
        assert used(copies) == 40_192
        assert other.pool.used == 40_192 + 80_128
        for which, message in found.items():
            equal(over_the_wire(message), values[which])
    assert used(copies) == other.pool.used == 0
    assert metrics.snapshot()["counters"]["memory.peer-copies.full"] == 1
