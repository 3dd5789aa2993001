"""Run cells with all contenders in turns, and check every result."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import dask
from distributed import Client, futures_of, wait
from rich.console import Console

from benchmarks.skew.clusters import outputs_moved, peaks, processor_seconds, shuffle_method
from benchmarks.skew.figures import Run
from benchmarks.skew.frames import Size, delayed_digests, expected, join, left_frame, right_frame, total

#: Seconds after which a run counts as hung.
RUN_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.005


#: The keys of the left side of the timed join, by cell.
CELLS = ("even", "zipf", "hot")
#: The cell that each cell is compared with.
YARDSTICKS = {"zipf": "even", "hot": "even"}


def in_order(cells: Sequence[str]) -> list[str]:
    """Return the cells of a turn: the requested cells and their yardsticks."""
    wanted = {each for cell in cells for each in (cell, YARDSTICKS[cell])}
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

    Attributes
    ----------
    runs
        The timed runs.
    """

    def __init__(self, clients: Mapping[str, Client], size: Size, cells: Sequence[str]):
        self.runs: list[Run] = []
        self._clients = clients
        self._size = size
        self._cells = cells
        self._expected = {cell: expected(cell, size) for cell in cells}
        self._frames = {client: self._frames_on(client) for client in set(clients.values())}

    def _frames_on(self, client: Client) -> dict[str, tuple[Any, Any]]:
        """Return both sides for each kind of keys, on the workers."""
        with client.as_current():
            right = right_frame(self._size).persist()
            found = {cell: (left_frame(cell, self._size).persist(), right) for cell in self._cells}
            wait(list(found.values()))
        return found

    def turn(self, number: int) -> None:
        """Run every cell with every contender."""
        contenders = list(self._clients)
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            for cell in self._cells:
                run = self._run(cell, contender, number)
                self.runs.append(run)
                Console(stderr=True).print(
                    f"{cell}, {contender}, run {number}: {run.seconds:.2f} s", style="dim"
                )

    def _run(self, cell: str, contender: str, turn: int) -> Run:
        client = self._clients[contender]
        sides = self._frames[client][cell]
        client.run(gc.collect)
        peaks(client)
        workers, used, moved = client.nthreads(), processor_seconds(client), outputs_moved(client)
        with client.as_current(), dask.config.set({"dataframe.shuffle.method": shuffle_method(contender)}):
            began = time.perf_counter()
            result = join(*sides).persist()
            wait(result, timeout=RUN_TIMEOUT_S)
            seconds = time.perf_counter() - began
        now, taken = processor_seconds(client), peaks(client)
        rows = self._checked(client, result, f"{cell} by {contender}, run {turn}")
        outputs = [future.key for future in futures_of(result)]
        del result
        gc.collect()
        client.run_on_scheduler(_until_forgotten, keys=outputs)
        return Run(
            cell,
            contender,
            turn,
            seconds,
            rows,
            [now[worker] - used[worker] for worker in workers],
            [taken[worker]["host"] for worker in workers],
            [taken[worker]["device"] for worker in workers if "device" in taken[worker]],
            outputs_moved(client) - moved,
        )

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
