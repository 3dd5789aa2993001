"""Measure the speeds of this host's links, in a few seconds.

Each trial copies a block repeatedly and takes the best time, since other load can only slow it down.
"""

from __future__ import annotations

import asyncio
import importlib
import mmap
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from itertools import permutations
from typing import Any

import dask
import numpy as np
from distributed.comm.core import Comm, connect, listen
from distributed.protocol.serialize import to_serialize

from dask_gpurt.topology.hosts import Host
from dask_gpurt.topology.links import SHIPPED, Link, Speed

#: Bytes of a block, larger than a processor's caches, and seconds of one trial.
BLOCK_BYTES, TRIAL_S = 2**26, 0.3
#: The fraction of a NIC's nominal speed that TCP reaches.
NIC_SHARE = 0.9
#: Bytes of a copy that measures bandwidth, and of a copy that measures latency.
LARGE_COPY_BYTES, SMALL_COPY_BYTES = 2**28, 8

Best = Callable[[Callable[[], object]], float]


def measure(host: Host) -> dict[Link, Speed]:
    """Measure the links of this host. Takes a few seconds and some memory, disk and GPU memory.

    Parameters
    ----------
    host
        The devices and links of this host.

    Returns
    -------
    dict
        Speeds by class of link, without classes that cannot be measured here. TCP is measured over loopback
        by Dask's comms, and limited by the fastest NIC.
    """
    loopback = asyncio.run(_tcp())
    return {
        Link.SHARED_MEMORY: Speed(_shared_memory(), SHIPPED[Link.SHARED_MEMORY].latency),
        Link.LOOPBACK: loopback,
        Link.TCP: _behind_nic(loopback, host),
        Link.DISK: _disk(),
        **measure_gpus(host, best),
    }


def best(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls."""
    end = time.perf_counter() + TRIAL_S
    action()  # the first call touches all pages and sets up all connections
    times: list[float] = []
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def _shared_memory() -> float:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(BLOCK_BYTES)
        with closing(mmap.mmap(file.fileno(), BLOCK_BYTES)) as shared:
            source = np.frombuffer(shared, np.uint8).copy()
            shared[:] = source.tobytes()  # otherwise no pages are allocated to read

            def read() -> None:
                view = np.frombuffer(shared, np.uint8)
                np.copyto(source, view)

            return BLOCK_BYTES / best(read)


# ---- TCP -----------------------------------------------------------------------------


async def _tcp() -> Speed:
    with _answering() as address:
        comm = await connect(address)
        try:
            latency = await _exchange(comm, np.zeros(1, np.uint8))
            seconds = await _exchange(comm, np.zeros(BLOCK_BYTES, np.uint8))
        finally:
            await comm.close()
    return Speed(BLOCK_BYTES / max(seconds - latency, seconds / 2), latency)


async def _exchange(comm: Comm, block: np.ndarray) -> float:
    """Return the shortest round-trip time of a message, in seconds."""
    times: list[float] = []
    end = time.perf_counter() + TRIAL_S
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        await comm.write({"block": to_serialize(block)})
        await comm.read()
        times.append(time.perf_counter() - start)
    return min(times)


@contextmanager
def _answering() -> Iterator[str]:
    """Answer messages on a thread with its own event loop; yield its address."""
    address: Future[str] = Future()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def answer(comm: Comm) -> None:
        while True:
            try:
                await comm.read()
                await comm.write("got it")
            except OSError:
                return

    async def serve() -> None:
        async with listen("tcp://127.0.0.1:0", answer) as listener:
            address.set_result(listener.contact_address)
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield address.result(timeout=10)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def _behind_nic(speed: Speed, host: Host) -> Speed:
    fastest = max((nic.speed for nic in host.nics if nic.speed and not nic.rdma), default=None)
    if fastest is None:
        return speed
    return Speed(min(speed.bandwidth, fastest * NIC_SHARE), speed.latency)


# ---- the disk ------------------------------------------------------------------------


def _disk() -> Speed:
    """Measure the disk of the workers' local directories; return the slower of writing and reading."""
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)  # random, so that file systems cannot compress it
    with tempfile.TemporaryFile(dir=dask.config.get("temporary-directory", None), buffering=0) as file:

        def write() -> None:
            file.seek(0)
            file.write(block)
            os.fsync(file.fileno())

        def read() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            file.read(BLOCK_BYTES)

        def read_little() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(BLOCK_BYTES // 2)
            file.read(mmap.PAGESIZE)

        return Speed(BLOCK_BYTES / max(best(write), best(read)), best(read_little))


# ---- GPUs ----------------------------------------------------------------------------


def measure_gpus(host: Host, best: Best) -> dict[Link, Speed]:
    """Measure copies within, to, from and between the GPUs visible to this process.

    Parameters
    ----------
    host
        The links between the GPUs; for each class of link the slowest pair counts.
    best
        Returns the seconds that an action takes, such as :func:`best`.

    Returns
    -------
    dict
        Speeds by class of link; empty without a GPU or without cupy.
    """
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        count = runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return {}
    speeds: dict[Link, Speed] = {}
    for link, speed in _trials(runtime, count, host, best):
        known = speeds.get(link)
        if known is None or speed.bandwidth < known.bandwidth:
            speeds[link] = speed
    return speeds


def _trials(runtime: Any, count: int, host: Host, best: Best) -> Iterator[tuple[Link, Speed]]:
    if not count:
        return
    with _block(runtime, 0) as one, _block(runtime, 0) as other, _pinned(runtime) as pinned:
        pageable = np.ones(LARGE_COPY_BYTES, np.uint8).ctypes
        yield Link.SAME_DEVICE, _copy(runtime, one, other, best)
        yield Link.PINNED, _copy(runtime, pinned, one, best)
        yield Link.PAGEABLE, _copy(runtime, one, pageable.data, best)
    for here, there in permutations(range(count), 2):
        gpus = host.find(_uuid(runtime, here)), host.find(_uuid(runtime, there))
        join = host.joins.get(frozenset(gpu.id for gpu in gpus if gpu))
        if join is not None and runtime.deviceCanAccessPeer(here, there):
            with _block(runtime, here) as one, _block(runtime, there) as other:
                yield join.link, _copy(runtime, one, other, best)


def _uuid(runtime: Any, device: int) -> str:
    """Return the UUID of a device in NVML's notation."""
    return f"GPU-{uuid.UUID(bytes=bytes(runtime.getDeviceProperties(device)['uuid']))}"


@contextmanager
def _block(runtime: Any, device: int) -> Iterator[int]:
    runtime.setDevice(device)
    pointer = runtime.malloc(LARGE_COPY_BYTES)
    try:
        yield pointer
    finally:
        runtime.setDevice(device)
        runtime.free(pointer)


@contextmanager
def _pinned(runtime: Any) -> Iterator[int]:
    pointer = runtime.hostAlloc(LARGE_COPY_BYTES, 0)
    try:
        yield pointer
    finally:
        runtime.freeHost(pointer)


def _copy(runtime: Any, source: int, target: int, best: Best) -> Speed:
    def copy(nbytes: int) -> None:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, 0)
        runtime.streamSynchronize(0)

    latency, seconds = best(lambda: copy(SMALL_COPY_BYTES)), best(lambda: copy(LARGE_COPY_BYTES))
    return Speed(LARGE_COPY_BYTES / max(seconds - latency, seconds / 2), latency)
