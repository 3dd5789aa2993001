"""Measure the upper bound of a shuffle: all workers of one host copy from each other at full speed."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dask.utils import parse_bytes
from distributed import Client

BLOCK = parse_bytes("128MiB")
ROUNDS = 8
_offered: list[int] = []


def link_limit(client: Client, backend: str) -> dict[str, Any]:
    """Measure the bandwidth between workers while all of them copy at once.

    Parameters
    ----------
    client
        A client of a cluster whose workers are on one host.
    backend
        ``pandas`` for shared memory, ``cudf`` for peer copies between GPUs.

    Returns
    -------
    dict
        ``bytes_per_second`` of all workers together, and ``what``, a description of the measurement.
    """
    workers = list(client.nthreads())
    if backend == "pandas":
        return _measure_shared_memory(client, workers)
    if len(workers) == 1:
        return _everywhere(client, workers, _copy_on_device, "copy inside the memory of the one GPU")
    return _measure_peer_copies(client, workers)


def _measure_shared_memory(client: Client, workers: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gpurt-link-", dir="/dev/shm") as folder:
        files = [str(Path(folder) / str(i)) for i in range(len(workers))]
        _on_each(client, workers, _write_block, files)
        neighbours = files[1:] + files[:1]
        rates = _on_each(client, workers, _copy_from_file, neighbours)
    return {
        "what": "memcpy out of a peer's shared memory, every worker at once",
        "bytes_per_second": sum(rates),
    }


def _measure_peer_copies(client: Client, workers: Sequence[str]) -> dict[str, Any]:
    handles = _on_each(client, workers, _offer_block, range(len(workers)))
    # Each GPU starts with a different peer, so that no GPU is read by all at once.
    peers = [[*handles[i + 1 :], *handles[:i]] for i in range(len(workers))]
    try:
        rates = _on_each(client, workers, _copy_from_peers, peers)
    finally:
        client.run(_withdraw_blocks)
    return {"what": "all-to-all copies between GPUs over CUDA IPC", "bytes_per_second": sum(rates)}


def _everywhere(client: Client, workers: Sequence[str], function: Any, what: str) -> dict[str, Any]:
    return {"what": what, "bytes_per_second": sum(_on_each(client, workers, function, range(len(workers))))}


def _on_each(client: Client, workers: Sequence[str], function: Any, arguments: Sequence[Any]) -> list[Any]:
    pinned = {"pure": False, "allow_other_workers": False}
    futures = [
        client.submit(function, argument, workers=[worker], **pinned)
        for worker, argument in zip(workers, arguments, strict=True)
    ]
    return list(client.gather(futures))


def _write_block(file: str) -> None:
    np.ones(BLOCK, dtype="uint8").tofile(file)


def _copy_from_file(file: str) -> float:
    source = np.memmap(file, dtype="uint8", mode="r")
    target = np.array(source)  # touches every page of both before the clock starts
    start = time.perf_counter()
    for _ in range(ROUNDS):
        np.copyto(target, source)
    return ROUNDS * BLOCK / (time.perf_counter() - start)


def _offer_block(_: int) -> bytes:
    runtime = importlib.import_module("cupy").cuda.runtime
    # A peer cannot always map memory from a pool; it can map memory of cudaMalloc.
    _offered.append(runtime.malloc(BLOCK))
    return bytes(runtime.ipcGetMemHandle(_offered[-1]))


def _withdraw_blocks() -> None:
    while _offered:
        importlib.import_module("cupy").cuda.runtime.free(_offered.pop())


def _copy_from_peers(handles: Sequence[bytes]) -> float:
    runtime = importlib.import_module("cupy").cuda.runtime
    sources = [runtime.ipcOpenMemHandle(handle) for handle in handles]
    try:
        return _copy_rate(sources)
    finally:
        for source in sources:
            runtime.ipcCloseMemHandle(source)


def _copy_on_device(_: int) -> float:
    cupy = importlib.import_module("cupy")
    block = cupy.ones(BLOCK, dtype="uint8")
    return _copy_rate([block.data.ptr])


def _copy_rate(sources: Sequence[int]) -> float:
    """Copy repeatedly from each source, on a stream each; return bytes per second."""
    cuda = importlib.import_module("cupy").cuda
    target = cuda.runtime.malloc(BLOCK * len(sources))
    streams = [cuda.Stream(non_blocking=True) for _ in sources]

    def copy(rounds: int) -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            for i, (source, stream) in enumerate(zip(sources, streams, strict=True)):
                kind = cuda.runtime.memcpyDeviceToDevice
                cuda.runtime.memcpyAsync(target + i * BLOCK, source, BLOCK, kind, stream.ptr)
        for stream in streams:
            stream.synchronize()
        return rounds * BLOCK * len(sources) / (time.perf_counter() - start)

    try:
        copy(2)
        # Long enough for the workers to overlap although they do not start at the same time.
        return copy(50 * ROUNDS)
    finally:
        cuda.runtime.free(target)
