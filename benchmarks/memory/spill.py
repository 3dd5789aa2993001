"""Measure the bandwidth between the device and the lower tiers while the device computes.

    python -m benchmarks.memory.spill --size 4GiB --object 256MiB --disk /tmp

Frames are put into a worker's tiered buffer (without a worker), spilled, and made live again, in turns with
plain copies that show the bandwidth of the bus. On a host without a GPU it measures copies in memory.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from dask.utils import parse_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from dask_gpurt.device.base import files_of
from dask_gpurt.device.discover import discover
from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.host import BlockPool, HostTier, PinnedTier
from dask_gpurt.memory.ledger import Ledger, Limits, Tier
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Metrics

GB = 1e9


def new_tiered_buffer(device: Any, directory: str, pinned: int, host: int, files: Any = None) -> TieredBuffer:
    """Return a tiered buffer with at most one memory tier, into which all objects are spilled."""
    pool = BlockPool(pinned, register=getattr(device, "register", None))
    pool.free(pool.allocate(pool.capacity))  # registers all of it
    return TieredBuffer(
        Limits(1 << 40, pinned, host, None),
        {
            Tier.PINNED: PinnedTier(pool),
            Tier.HOST: HostTier(host),
            Tier.DISK: DiskTier(directory, None, files or files_of(device, click.echo)),
        },
        home=lambda value: Tier.DEVICE,
        device=device,
        ledger=Ledger(dict.fromkeys(Tier, 1 << 40)),
        metrics=Metrics(),
        priority_of=lambda key: None,
        changed=lambda: None,
    )


def disk_tiered_buffers(device: Any, directory: Path) -> dict[str, TieredBuffer]:
    """Return tiered buffers without memory tiers, one per way to write files."""
    tiered_buffers = {"disk tier": new_tiered_buffer(device, str(directory), 0, 0)}
    if not device.on_host:
        from dask_gpurt.device.cuda_files import CudaFiles

        files = CudaFiles(device, click.echo, with_kvikio=False)
        tiered_buffers["disk tier without kvikio"] = new_tiered_buffer(device, str(directory), 0, 0, files)
    return tiered_buffers


def frames(on_host: bool, size: int, each: int) -> list[Any]:
    """Return frames of four columns each."""
    rows = each // 32
    if on_host:
        import pandas as library
    else:
        import cudf as library
    column = np.arange(rows)
    return [
        library.DataFrame({name: column + part for name in "abcd"}) for part in range(max(1, size // each))
    ]


@contextlib.contextmanager
def busy(on_host: bool, wanted: bool) -> Iterator[Callable[[], int]]:
    """Keep the device computing on a separate thread; yield a function that counts its rounds."""
    stop, rounds = threading.Event(), [0]

    def compute() -> None:
        if on_host:
            import numpy as arrays
        else:
            import cupy as arrays
        left = arrays.ones((4096, 4096), dtype="f4")
        while not stop.is_set():
            left = left @ left * 1e-4
            if not on_host:
                arrays.cuda.get_current_stream().synchronize()
            rounds[0] += 1

    thread = threading.Thread(target=compute)
    if wanted:
        thread.start()
    try:
        yield lambda: rounds[0]
    finally:
        stop.set()
        if wanted:
            thread.join()


def turn(tiered_buffer: TieredBuffer, objects: list[Any]) -> dict[str, float]:
    """Return the bytes per second down and up in one turn."""
    for at, frame in enumerate(objects):
        tiered_buffer[f"x{at}"] = frame
    nbytes = tiered_buffer.live_bytes(Tier.DEVICE)
    began = time.perf_counter()
    freed = tiered_buffer.spill(nbytes)
    down = time.perf_counter() - began
    if freed != nbytes:
        raise RuntimeError(f"{freed} of {nbytes} bytes were spilled: {tiered_buffer._metrics.snapshot()}")
    began = time.perf_counter()
    tiered_buffer.release(tiered_buffer.hold(list(tiered_buffer)))
    up = time.perf_counter() - began
    for key in list(tiered_buffer):
        del tiered_buffer[key]
    return {"down": nbytes / down, "up": nbytes / up}


def plain(device: Any, nbytes: int, pinned: bool) -> dict[str, float]:
    """Return the bytes per second of one copy of an array, down and up, pinned or pageable."""
    memory = np.zeros(nbytes, np.uint8)
    undo = device.register(memory) if pinned and hasattr(device, "register") else None
    buffer, fence = device.gather([memory])
    fence()
    began = time.perf_counter()
    device.scatter([buffer], [[memory]])()
    down = time.perf_counter() - began
    began = time.perf_counter()
    device.gather([memory])[1]()
    up = time.perf_counter() - began
    if undo:
        undo()
    return {"down": nbytes / down, "up": nbytes / up}


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="1GiB", show_default=True, help="All objects together.")
@click.option("--object", "each", default="64MiB", show_default=True, help="One object.")
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--disk", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Files go here.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(size: str, each: str, repeat: int, disk: Path | None, output: Path | None) -> None:
    nbytes, one = parse_bytes(size), parse_bytes(each)
    devices = discover(nbytes * 4)
    device = devices.get("cuda", devices["host"])
    if not device.on_host:
        import rmm

        # As in production: cudaMalloc and cudaFree would wait for all kernels.
        rmm.reinitialize(pool_allocator=True, initial_pool_size=6 * nbytes)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        tiered_buffers = {
            "pinned tier": new_tiered_buffer(device, directory, 2 * nbytes, 0),
            "host tier": new_tiered_buffer(device, directory, 0, 2 * nbytes),
            **(disk_tiered_buffers(device, disk) if disk else {}),
        }
        for _ in range(repeat + 1):
            for load in (False, True):
                with busy(device.on_host, load):
                    name = "busy" if load else "idle"
                    for tier, tiered_buffer in tiered_buffers.items():
                        objects = frames(device.on_host, nbytes, one)
                        found.setdefault(f"{tier}, {name}", []).append(turn(tiered_buffer, objects))
                        del objects
                    for pinned in (True, False):
                        what = f"one {'pinned' if pinned else 'pageable'} copy, {name}"
                        found.setdefault(what, []).append(plain(device, one, pinned))
        for tiered_buffer in tiered_buffers.values():
            tiered_buffer.close()
    figures = {
        what: {way: statistics.median(t[way] for t in turns[1:]) for way in ("down", "up")}
        for what, turns in found.items()
    }
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"size": nbytes, "object": one, "repeat": repeat, "device": device.kind},
        **environment(),
        "bytes_per_second": figures,
        "turns": found,
    }
    write(results, output)
    table = Table(box=SIMPLE_HEAD)
    for heading in ("what", "down GB/s", "up GB/s"):
        table.add_column(heading)
    for what, figure in figures.items():
        table.add_row(what, f"{figure['down'] / GB:.1f}", f"{figure['up'] / GB:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
