"""Put frames on the workers of one host, run a program on them, and derive the right result from them.

Functions that run on workers live here: those of a benchmark's ``__main__`` are pickled with their globals.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
from distributed import Client, Future, wait

import dask_gpurt
from benchmarks.common.rows import ROW_BYTES, arrays_of
from benchmarks.skew.frames import Size, join, left_part, right_part, with_right_columns

#: Share of the partitions on the first worker where data lie unevenly.
UNEVEN_SHARE = 0.9
#: Share of a worker's device tier that unused data take under pressure, and the number of frames there.
UNUSED_SHARE, UNUSED_FRAMES = 0.85, 16
#: Seconds in which a scheduler releases what is not needed any more.
RELEASE_S = 20.0


@dataclass(frozen=True)
class Cell:
    """Describe a measurement.

    Parameters
    ----------
    share
        Share of the partitions on the first worker; None to deal them evenly.
    unused
        Whether data that the program does not use nearly fill the first worker.
    slow_link
        Whether workers exchange data through Dask's connections over TCP only.
    """

    share: float | None = UNEVEN_SHARE
    unused: bool = False
    slow_link: bool = False


CELLS: Mapping[str, Cell] = {
    "uneven": Cell(),
    "pressure": Cell(share=None, unused=True),
    "slow-link": Cell(slow_link=True),
}


def size_of(nbytes: int, partitions: int, backend: str) -> Size:
    """Return the size of frames of which the left one has ``nbytes`` bytes."""
    return Size(max(1, nbytes // ROW_BYTES), partitions, backend)


# ---- where data lie --------------------------------------------------------------------


def homes(workers: Sequence[str], partitions: int, share: float | None) -> list[str]:
    """Return the worker of each partition.

    Parameters
    ----------
    share
        Share of the partitions on the first worker, the others take turns; None if all take turns.
    """
    first, *others = workers
    if share is None:
        return [workers[part % len(workers)] for part in range(partitions)]
    full = min(partitions, math.ceil(share * partitions))
    return [first] * full + [others[part % len(others)] for part in range(partitions - full)]


def left(part: int, size: Size, turn: int) -> Any:
    """Make a partition of the left frame; the turn only makes its key a new one."""
    return left_part(part, "even", size)


def right(part: int, size: Size, turn: int) -> Any:
    """Make a partition of the right frame; the turn only makes its key a new one."""
    return right_part(part, size)


def draw_in_pool() -> None:
    """Have cupy allocate from the RMM pool of this process, where frames count and can be spilled."""
    allocator = importlib.import_module("rmm.allocators.cupy").rmm_cupy_allocator
    importlib.import_module("cupy").cuda.set_allocator(allocator)


def unused(nbytes: int, backend: str) -> Any:
    """Make a frame of ``nbytes`` bytes."""
    ones = arrays_of(backend).ones(max(1, nbytes // 8), dtype="int64")
    return importlib.import_module(backend).DataFrame({"unused": ones})


def workers_of(client: Client) -> list[str]:
    """Return the addresses of the workers in the order of their names."""
    known = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return sorted(known, key=lambda address: str(known[address]["name"]))


@contextmanager
def prepared(client: Client, cell: Cell, size: Size, turn: int, limit: float) -> Iterator[tuple[Any, Any]]:
    """Hold the data of a cell on its workers, and yield both frames; at the end wait for their release.

    Parameters
    ----------
    turn
        Number of the turn.
    limit
        Seconds after which making the data, or releasing them, has failed.
    """
    workers = workers_of(client)
    with client.as_current():
        kept = fill(client, workers[0], size.backend, limit) if cell.unused else []
        where = homes(workers, size.partitions, cell.share)
        frames = [hold(client, make, where, size, turn, limit) for make in (left, right)]
        yield frames[0], frames[1]
    del frames, kept
    gc.collect()
    client.run_on_scheduler(until_empty, seconds=min(limit, RELEASE_S))


def hold(client: Client, make: Any, where: Sequence[str], size: Size, turn: int, limit: float) -> Any:
    """Persist each partition on its worker, and return all of them as a frame."""
    meta = make(0, Size(1, 1, size.backend), turn).iloc[:0]
    parts: dict[str, list[int]] = {}
    for part, worker in enumerate(where):
        parts.setdefault(worker, []).append(part)
    held = [
        client.persist(dd.from_map(make, mine, size=size, turn=turn, meta=meta), workers=[worker])
        for worker, mine in parts.items()
    ]
    wait(held, timeout=limit)
    return dd.concat(held)


def fill(client: Client, worker: str, backend: str, limit: float) -> list[Future]:
    """Fill most of a worker's device tier with frames that no task uses."""
    capacity, _ = device_tier(client, worker)
    nbytes = int(UNUSED_SHARE * capacity / UNUSED_FRAMES)
    made = [
        client.submit(unused, nbytes, backend, workers=[worker], pure=False) for _ in range(UNUSED_FRAMES)
    ]
    wait(made, timeout=limit)
    return made


def device_tier(client: Client, worker: str) -> tuple[int, int]:
    """Return the capacity of a worker's device tier and what is free of it, in bytes."""
    usage = dask_gpurt.memory_usage(client).to_pandas(names="metrics")
    (tier,) = usage[(usage.worker == worker) & (usage.tier == "device")].itertuples()
    return int(tier.capacity), int(tier.headroom)


async def until_empty(dask_scheduler: Any, seconds: float) -> None:
    """Block until the scheduler has no task, so that memory is free in the next turn."""
    async with asyncio.timeout(seconds):
        while dask_scheduler.tasks:
            await asyncio.sleep(0.005)


# ---- the program -----------------------------------------------------------------------


def program(both: tuple[Any, Any]) -> Any:
    """Join both frames, and sum and count by a column with about a thousand values."""
    return join(*both).groupby("weight").payload.agg(["sum", "count"])


def run(both: tuple[Any, Any], limit: float) -> Any:
    """Run the program, and return its result.

    Raises
    ------
    TimeoutError
        If it takes more than ``limit`` seconds.
    """
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        result = program(both).persist()
        wait(result, timeout=limit)
        return result.compute()


def plain(result: Any) -> pd.DataFrame:
    """Return a result as a frame of pandas, in the order of its groups, with the same names everywhere."""
    found = on_host(result)
    found.columns = found.columns.get_level_values(-1)
    return found[["sum", "count"]].sort_index().astype("int64")


def on_host(frame: Any) -> Any:
    return frame.to_pandas() if hasattr(frame, "to_pandas") else frame


def partial(part: int, size: Size) -> pd.DataFrame:
    """Sum and count the rows of a partition of the left frame.

    It takes no join: the columns of the right frame follow from the key.
    """
    rows = with_right_columns(left_part(part, "even", size))
    found: pd.DataFrame = on_host(rows.groupby("weight").payload.agg(["sum", "count"]))
    return found


def expected(client: Client, size: Size, limit: float) -> pd.DataFrame:
    """Return the right result; the workers group their partitions, this process adds them up."""
    with client.as_current():
        parts = client.map(partial, range(size.partitions), size=size, pure=False)
        wait(parts, timeout=limit)
        return plain(pd.concat(client.gather(parts)).groupby(level=0).sum())


# ---- counters --------------------------------------------------------------------------


def placement_counters(dask_scheduler: Any) -> dict[str, float]:
    """Return the scheduler's counters of placement; none where it is off."""
    known = dask_scheduler.extensions["gpurt"].metrics.snapshot()["counters"]
    return {name: count for name, count in known.items() if name.startswith("placement.")}


def held_bytes(dask_scheduler: Any) -> dict[str, int]:
    """Return the bytes of results that each worker holds."""
    return {address: state.nbytes for address, state in dask_scheduler.workers.items()}
