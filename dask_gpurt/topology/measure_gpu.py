"""How fast bytes get to and from GPUs, and between them, by copies of one process."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import numpy as np

from dask_gpurt.topology.hosts import Host
from dask_gpurt.topology.links import Link, Speed

#: Bytes of a large and of a small copy: one takes as long as the bandwidth says, the other as the latency.
LARGE, SMALL = 2**28, 8

Best = Callable[[Callable[[], object]], float]


def measure_gpus(host: Host, best: Best) -> dict[Link, Speed]:
    """Copy in, to, from and between the GPUs that CUDA shows to this process.

    Parameters
    ----------
    host
        What joins them; of a class of link the slowest pair counts.
    best
        The seconds that an action takes.

    Returns
    -------
    dict
        By class of link; empty without a GPU or without cupy.
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
        pageable = np.ones(LARGE, np.uint8).ctypes
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
    """As NVML writes it."""
    return f"GPU-{uuid.UUID(bytes=bytes(runtime.getDeviceProperties(device)['uuid']))}"


@contextmanager
def _block(runtime: Any, device: int) -> Iterator[int]:
    runtime.setDevice(device)
    pointer = runtime.malloc(LARGE)
    try:
        yield pointer
    finally:
        runtime.setDevice(device)
        runtime.free(pointer)


@contextmanager
def _pinned(runtime: Any) -> Iterator[int]:
    pointer = runtime.hostAlloc(LARGE, 0)
    try:
        yield pointer
    finally:
        runtime.freeHost(pointer)


def _copy(runtime: Any, source: int, target: int, best: Best) -> Speed:
    def copy(nbytes: int) -> None:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, 0)
        runtime.streamSynchronize(0)

    latency, seconds = best(lambda: copy(SMALL)), best(lambda: copy(LARGE))
    return Speed(LARGE / max(seconds - latency, seconds / 2), latency)
