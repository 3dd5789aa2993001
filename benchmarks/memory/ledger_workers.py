"""Run the processes of the ledger benchmark: a scheduler, and workers whose ledgers change."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from typing import Any

import dask
from distributed import Scheduler, Worker

from dask_gpurt.memory.ledger import KINDS, PARTITIONS, Label, Ledger, Tier
from dask_gpurt.worker import tiers
from dask_gpurt.worker.reports import MemoryReporter

#: By worker and tier: bytes by kind, and by prefix.
Truth = dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]]
CELLS = tuple(itertools.product(Tier, KINDS))
#: Task prefixes of partitions, used in turn.
PREFIXES = tuple(f"prefix-{letter}" for letter in "abcdefgh")
#: Seconds between two checks of how many changes are due.
TICK = 0.001
#: Seconds between polls; keeps a worker from overwriting the benchmark's figures with its own.
NEVER = 1e6
#: Settings of the workers only: their background work would compete with the changes for cores.
QUIET = {
    "gpurt.exchange.pool": "1 MiB",
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "2s",
    "distributed.admin.system-monitor.interval": "10s",
}


def change(ledger: Ledger, step: int, number: int) -> None:
    """Change one cell: all cells in turn, with a different prefix in each round."""
    turn, cell = divmod(step, len(CELLS))
    tier, kind = CELLS[cell]
    if kind == PARTITIONS:
        ledger.add(tier, Label(kind, PREFIXES[turn % len(PREFIXES)]), 1)
    else:
        ledger.set(tier, kind, number)


class Senders:
    """Run the commands of the benchmark on the workers of one process."""

    def __init__(self, workers: Sequence[Any], rate: float):
        self.workers = workers
        self.rate = rate
        self.made = 0

    def tiers(self) -> list[Any]:
        """Return the tiers plugin of each worker."""
        return [worker.plugins["gpurt"].tiers for worker in self.workers]

    async def begin(self) -> None:
        """Start reporting and changing."""
        for worker, own in zip(self.workers, self.tiers(), strict=True):
            own.reporter = MemoryReporter(worker, own.ledger)
        self.changes = asyncio.create_task(self._change())

    async def _change(self) -> None:
        pairs = [(own.ledger, own.reporter) for own in self.tiers()]
        start, done = time.perf_counter(), 0
        while True:
            due = int((time.perf_counter() - start) * self.rate)
            for step in range(done, due):
                self._change_each(pairs, step)
            done = due
            await asyncio.sleep(TICK)

    def _change_each(self, pairs: Sequence[tuple[Ledger, MemoryReporter]], step: int) -> None:
        for ledger, reporter in pairs:
            self.made += 1
            change(ledger, step, self.made)
            reporter.changed()

    async def count(self) -> dict[str, float]:
        """Return the totals so far, and the messages due per second if no worker is late."""
        streams = [worker.batched_stream for worker in self.workers]
        sent = sum(stream.message_count - len(stream.buffer) for stream in streams)
        due = sum(1 / (own.reporter.pause + TICK) for own in self.tiers())
        return {"changes": self.made, "messages": sent, "senders": time.process_time(), "due": due}

    async def halt(self) -> Truth:
        """Stop changing, and return the contents of the ledgers by worker and tier."""
        self.changes.cancel()
        return {
            (worker.address, str(tier)): (
                {kind: own.ledger.cell(tier, kind) for kind in KINDS},
                own.ledger.prefixes(tier),
            )
            for worker, own in zip(self.workers, self.tiers(), strict=True)
            for tier in Tier
        }

    async def end(self) -> None:
        """Stop reporting."""
        for own in self.tiers():
            own.reporter.close()


async def schedule(pipe: Connection) -> None:
    """Run the scheduler, and send its address."""
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        pipe.send(scheduler.address)
        await scheduler.finished()


async def send(pipe: Connection, address: str, count: int, rate: float) -> None:
    """Run ``count`` workers that execute the commands from the pipe."""
    tiers.PRESSURE_POLL_INTERVAL_S = NEVER
    with dask.config.set(QUIET):
        async with AsyncExitStack() as stack:
            workers = [Worker(address, nthreads=1, dashboard=False, memory_limit=0) for _ in range(count)]
            await asyncio.gather(*map(stack.enter_async_context, workers))
            senders = Senders(workers, rate)
            gc.freeze()  # keeps collections from traversing the objects of so many workers
            pipe.send(len(workers))
            while name := await asyncio.to_thread(pipe.recv):
                pipe.send(await getattr(senders, name)())


def run(function: Callable[..., Any], *args: Any) -> None:
    """Run a coroutine function as the main function of a process."""
    logging.getLogger("distributed").setLevel(logging.WARNING)
    asyncio.run(function(*args))
