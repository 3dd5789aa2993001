"""Run cells with all contenders in turns, and check every result."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client, futures_of, wait
from rich.console import Console

from benchmarks.skew.clusters import outputs_moved, peaks, pids, processor_seconds, shuffle_method
from benchmarks.skew.figures import Run, capacity_left
from benchmarks.skew.frames import (
    Digest,
    Size,
    delayed_digests,
    expected,
    join,
    join_groupby,
    left_frame,
    right_frame,
    total,
)
from benchmarks.skew.slowed import half_speed
from benchmarks.two_hosts.servers import link_bytes
from benchmarks.two_hosts.star import Star

#: Seconds after which a run counts as hung.
RUN_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.005


@dataclass(frozen=True)
class Cell:
    """Describe a measurement.

    Parameters
    ----------
    build
        Builds the collection to time from both sides.
    keys
        The kind of keys of the left side.
    persisted
        Whether both sides are on the workers before the clock starts; otherwise the timed tasks make them.
    slow
        Whether one worker is slowed down.
    slow_link
        Whether the link of one worker is slowed down.
    counts
        Whether it is reported; if not, it only lets the cluster learn that no worker is slow any more.
    """

    build: Callable[[Any, Any], Any]
    keys: str = "even"
    persisted: bool = False
    slow: bool = False
    slow_link: bool = False
    counts: bool = True


CELLS: Mapping[str, Cell] = {
    "even": Cell(join, persisted=True),
    "zipf": Cell(join, "zipf", persisted=True),
    "hot": Cell(join, "hot", persisted=True),
    "full-speed": Cell(join_groupby),
    "half-speed": Cell(join_groupby, slow=True),
    "half-speed-known": Cell(join_groupby, slow=True),
    "slow-link": Cell(join_groupby, slow_link=True),
    "slow-link-known": Cell(join_groupby, slow_link=True),
    "settle": Cell(join_groupby, counts=False),
}
YARDSTICKS = {
    "zipf": "even",
    "hot": "even",
    "half-speed": "full-speed",
    "half-speed-known": "full-speed",
    "slow-link": "full-speed",
    "slow-link-known": "full-speed",
}
#: Cells that need workers with links of their own.
LINKED = ("slow-link", "slow-link-known")
#: Further cells that a cell needs in its turn.
BESIDE = {
    "zipf": ("even",),
    "hot": ("even",),
    "half-speed": ("full-speed", "settle"),
    "half-speed-known": ("full-speed", "half-speed", "settle"),
    "slow-link": ("full-speed", "settle"),
    "slow-link-known": ("full-speed", "slow-link", "settle"),
}
ON_ONE_HOST = tuple(cell for cell in BESIDE if cell not in LINKED)


def in_order(cells: Sequence[str]) -> list[str]:
    """Return the cells of a turn: the requested cells and the cells that they need."""
    wanted = {each for cell in cells for each in (cell, *BESIDE[cell])}
    return [cell for cell in CELLS if cell in wanted]


class Contest:
    """Run cells with contenders on their clusters.

    Parameters
    ----------
    clients
        A client of the cluster of each contender.
    size
        Size of the frames.
    cells
        Cells in the order of a turn.
    star
        The hosts of the workers; None if all are on this host.

    Attributes
    ----------
    runs
        The timed runs.
    """

    def __init__(
        self, clients: Mapping[str, Client], size: Size, cells: Sequence[str], star: Star | None = None
    ):
        self.runs: list[Run] = []
        self._clients = clients
        self._size = size
        self._cells = cells
        self._star = star
        self._expected = _expected(cells, size)
        self._frames = {client: self._frames_on(client) for client in set(clients.values())}

    def _frames_on(self, client: Client) -> dict[tuple[str, bool], tuple[Any, Any]]:
        """Return both sides for each kind of keys, persisted and lazy."""
        found = {}
        with client.as_current():
            right = right_frame(self._size)
            kept = right.persist()
            for cell in (CELLS[name] for name in self._cells):
                left = left_frame(cell.keys, self._size)
                if (cell.keys, cell.persisted) not in found:
                    sides = (left.persist(), kept) if cell.persisted else (left, right)
                    found[cell.keys, cell.persisted] = sides
                    wait(sides)
        return found

    def turn(self, number: int) -> None:
        """Run every cell with every contender."""
        contenders = list(self._clients)
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            for cell in self._cells:
                run = self._run(cell, contender, number)
                if CELLS[cell].counts:
                    self.runs.append(run)
                    Console(stderr=True).print(
                        f"{cell}, {contender}, run {number}: {run.seconds:.2f} s",
                        style="dim",
                    )

    def _run(self, name: str, contender: str, turn: int) -> Run:
        cell, client = CELLS[name], self._clients[contender]
        sides = self._frames[client][cell.keys, cell.persisted]
        client.run(gc.collect)
        peaks(client)
        threads, used, moved = client.nthreads(), processor_seconds(client), outputs_moved(client)
        slow = max(threads) if cell.slow or cell.slow_link else None
        crossed = link_bytes(client)
        with (
            client.as_current(),
            dask.config.set({"dataframe.shuffle.method": shuffle_method(contender)}),
            self._slow_link(slow if cell.slow_link else None) as rate,
            slowed(client, slow if cell.slow else None) as stopped_seconds,
        ):
            before, began = stopped_seconds(), time.perf_counter()
            result = cell.build(*sides).persist()
            wait(result, timeout=RUN_TIMEOUT_S)
            seconds = time.perf_counter() - began
            stopped = (stopped_seconds() - before) / seconds
        now, taken = processor_seconds(client), peaks(client)
        crosses = link_bytes(client)
        each, cores = max(threads.values()), len(os.sched_getaffinity(0))
        rows = self._checked(client, result, f"{name} by {contender}, run {turn}")
        outputs = [future.key for future in futures_of(result)]
        del result
        gc.collect()
        client.run_on_scheduler(_until_forgotten, keys=outputs)
        return Run(
            name,
            contender,
            turn,
            seconds,
            capacity_left(len(threads), each, stopped, cores),
            rows,
            [now[worker] - used[worker] for worker in threads],
            [taken[worker]["host"] for worker in threads],
            [taken[worker]["device"] for worker in threads if "device" in taken[worker]],
            outputs_moved(client) - moved,
            None if slow is None else list(threads).index(slow),
            *([crosses[worker][way] - crossed[worker][way] for worker in threads] for way in (0, 1)),
            rate,
            each,
            cores,
        )

    @contextmanager
    def _slow_link(self, worker: str | None) -> Iterator[int]:
        """Slow down the link of a worker, if given; yield its bytes per second, else 0."""
        if worker is None or self._star is None:
            yield 0
            return
        with self._star.slow(worker) as rate:
            yield rate

    def _checked(self, client: Client, result: Any, run: str) -> list[int]:
        """Check all rows of a result, and return their number by worker.

        Raises
        ------
        ValueError
            If the result is wrong.
        """
        holders = client.who_has(futures_of(result))
        digests = client.gather(client.compute(delayed_digests(result)))
        wanted = self._expected[run.partition(" ")[0]]
        if total(digests) != wanted:
            raise ValueError(f"{run}: the result is {total(digests)}, but {wanted} is right")
        rows = [each.rows for each in digests]
        return rows_by_worker(rows, holders, list(client.nthreads()))


async def _until_forgotten(keys: Sequence[Any], dask_scheduler: Any) -> None:
    """Block until results are released, as the next run would reuse results of tasks with equal keys."""
    async with asyncio.timeout(RUN_TIMEOUT_S):
        while not dask_scheduler.tasks.keys().isdisjoint(keys):
            await asyncio.sleep(POLL_INTERVAL_S)


def _expected(cells: Sequence[str], size: Size) -> dict[str, Digest]:
    """Return the expected digest of each cell; equal cells are computed once."""
    kinds = {cell: (CELLS[cell].keys, CELLS[cell].build is join_groupby) for cell in cells}
    known = {kind: expected(kind[0], size, grouped=kind[1]) for kind in set(kinds.values())}
    return {cell: known[kind] for cell, kind in kinds.items()}


@contextmanager
def slowed(client: Client, worker: str | None) -> Iterator[Callable[[], float]]:
    """Run a worker, if given, at half speed; yield a function that returns the seconds it was stopped."""
    if worker is None:
        yield lambda: 0.0
        return
    with half_speed(pids(client)[worker]) as cycle:
        yield lambda: cycle.stopped_seconds


def rows_by_worker(
    rows: Sequence[int], holders: Mapping[tuple[str, int], Sequence[str]], workers: Sequence[str]
) -> list[int]:
    """Add up rows of outputs by worker.

    Parameters
    ----------
    rows
        Rows of each output.
    holders
        The workers that hold an output, by its key; the first counts.
    workers
        Workers in the order of the result.
    """
    found = dict.fromkeys(workers, 0)
    for (_, output), (holder, *_) in holders.items():
        found[holder] += rows[output]
    return list(found.values())
