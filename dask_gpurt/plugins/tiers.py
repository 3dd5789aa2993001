"""The tiers on a worker: its ``data`` becomes a ladder, and no move is made on the event loop.

Three of the worker's coroutines get a wrapper on the instance: inputs are made live, and
room for results is made, on threads of the tiers, before Dask's own code goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
from dask.typing import Key
from distributed.core import clean_exception
from distributed.spill import SpillBuffer
from distributed.system import MEMORY_LIMIT
from distributed.worker_state_machine import (
    ExecuteFailureEvent,
    ExecuteSuccessEvent,
    GatherDepSuccessEvent,
)
from tornado.ioloop import PeriodicCallback

from dask_gpurt.config import Settings
from dask_gpurt.device import Device
from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.frames import lives_on_device
from dask_gpurt.memory.ladder import Ladder, serving
from dask_gpurt.memory.ledger import Ledger
from dask_gpurt.memory.pageable import HostTier
from dask_gpurt.memory.pinned import BlockPool, PinnedTier
from dask_gpurt.memory.sizes import owned
from dask_gpurt.memory.tiers import Limits, Tier, limits
from dask_gpurt.observe import Metrics
from dask_gpurt.plugins.memory_reports import Reporter

logger = logging.getLogger("dask_gpurt")

#: Seconds between looks at the process as a whole and at the exchange pools.
LOOK = 0.2


class WorkerTiers:
    """Puts a ladder in the place of a worker's data, and gives the data back.

    Parameters
    ----------
    worker
        The Dask worker; must be new, or at rest.
    devices
        Those of the worker, by kind.
    pools
        Capacity and use of the exchange pools, by kind of device.
    """

    def __init__(
        self,
        worker: Any,
        settings: Settings,
        devices: dict[str, Device],
        metrics: Metrics,
        pools: Callable[[], dict[str, dict[str, int]]],
    ):
        self.worker = worker
        self.settings = settings
        self.metrics = metrics
        self.pools = pools
        self.device = devices.get("cuda", devices["host"])
        self.memory_limit: int = worker.memory_manager.memory_limit or MEMORY_LIMIT
        self.limits = self._limits(worker.data)
        self.ledger = Ledger(_capacities(self.limits))
        self.reporter = Reporter(worker, self.ledger)
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="gpurt-tiers")
        self.ladder = Ladder(
            self.limits,
            self._lower_tiers(),
            home=self._home,
            device=self.device,
            ledger=self.ledger,
            metrics=metrics,
            needed=self._needed,
            changed=self.reporter.changed,
        )
        self._spilling = False
        self._watch = PeriodicCallback(self._look, LOOK * 1000)

    def _limits(self, given: Any) -> Limits:
        _, device_memory = self.device.memory()
        directory = os.statvfs(self.worker.local_directory)
        return limits(
            self.settings.memory,
            on_host=self.device.on_host,
            memory_limit=self.memory_limit,
            device_memory=device_memory,
            given_device=getattr(getattr(given, "device_buffer", None), "n", None),
            target=self.worker.memory_manager.memory_target_fraction,
            disk_free=directory.f_bavail * directory.f_frsize,
        )

    def _lower_tiers(self) -> dict[Tier, Any]:
        pool = BlockPool(self.limits.pinned, register=getattr(self.device, "register", None))
        return {
            Tier.PINNED: PinnedTier(pool),
            Tier.HOST: HostTier(self.limits.host),
            Tier.DISK: DiskTier(self.worker.local_directory, self.limits.disk),
        }

    def _home(self, value: Any) -> Tier:
        return Tier.DEVICE if self.device.on_host or lives_on_device(value) else Tier.HOST

    def _needed(self, key: Key) -> tuple[Any, ...] | None:
        task = self.worker.state.tasks.get(key)
        if task is None:
            return None
        # The loop may change the set meanwhile; copying it is one step.
        waiting = [t.priority for t in tuple(task.dependents) if t.state not in _DONE and t.priority]
        return min(waiting, default=None)

    # ---- the worker's data -------------------------------------------------------------

    def install(self) -> None:
        """Take the worker's data over. On the event loop, since it is one step to everybody."""
        worker = self.worker
        self._before = worker.data
        live = _live_part(self._before)
        for key in list(self._before):
            if key in live:
                self.ladder[key] = live[key]
                del self._before[key]
            else:
                task = worker.state.tasks.get(key)
                nbytes = (task and task.nbytes) or 0
                self.ladder.adopt(key, nbytes, partial(self._before.pop, key))
        self._set_data(self.ladder)
        self._execute, self._gather_dep, self._get_data = worker.execute, worker.gather_dep, worker.get_data
        worker.execute, worker.gather_dep = self.execute, self.gather_dep
        worker.handlers["get_data"] = self.get_data
        self._watch.start()

    def _set_data(self, data: Any) -> None:
        self.worker.memory_manager.data = self.worker.state.data = data

    async def uninstall(self) -> None:
        """Give the worker its own mapping back, with every key."""
        self._watch.stop()
        worker = self.worker
        for name in ("execute", "gather_dep"):
            worker.__dict__.pop(name, None)
        worker.handlers["get_data"] = self._get_data
        while missing := [key for key in self.ladder if key not in self._before]:
            for key, value in (await self.offload(self.ladder.copies, missing[:1])).items():
                self._before[key] = value
        for key in [key for key in self._before if key not in self.ladder]:
            del self._before[key]  # released while the others were read
        self._set_data(self._before)
        self.reporter.close()
        await self.offload(self.ladder.close)
        self.executor.shutdown(wait=False)

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something that moves data on a thread of the tiers."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)

    # ---- in the place of the worker's own ----------------------------------------------

    async def execute(self, key: Key, *, stimulus_id: str) -> Any:
        """Make the inputs live, run the task, make room for its result."""
        task = self.worker.state.tasks[key]
        inputs = [dependency.key for dependency in task.dependencies]
        try:
            held = self.ladder.hold_live(inputs)
            if held is None:
                held = await self.offload(self.ladder.hold, inputs)
        except Exception as error:  # the task fails with it, as when Dask can not read its own files
            return ExecuteFailureEvent.from_exception(
                error, key=key, run_id=task.run_id, stimulus_id=f"gpurt-unspill-{stimulus_id}"
            )
        self._prefetch()
        try:
            event = await self._executed(key, task, stimulus_id)
        finally:
            self.ladder.release(held)
        if isinstance(event, ExecuteSuccessEvent):
            await self._make_room({key: event.value})
        return event

    async def _executed(self, key: Key, task: Any, stimulus_id: str) -> Any:
        for attempt in range(self.settings.memory.retries + 1):
            event = await self._execute(key, stimulus_id=stimulus_id)
            error = _out_of_memory(event)
            if error is None or task.state != "executing":
                return event
            if attempt < self.settings.memory.retries:
                self.metrics.add("memory.retries")
                await self.offload(self.ladder.spill, self.ladder.live_bytes(Tier.DEVICE))
        return ExecuteFailureEvent.from_exception(
            MemoryError(self._explained(error)),
            key=key,
            run_id=task.run_id,
            stimulus_id=f"gpurt-memory-{stimulus_id}",
        )

    def _explained(self, error: BaseException | None) -> str:
        tiers = ", ".join(f"{row['tier']} {row['used']} of {row['capacity']} bytes" for row in self.rows())
        largest = ", ".join(f"{key!r} ({nbytes} bytes)" for key, nbytes in self.ladder.largest(3))
        return (
            f"out of memory {self.settings.memory.retries + 1} times, with all spilled that could be: "
            f"{error}. "
            f"Tiers: {tiers}. Largest: {largest or 'none'}. Smaller partitions help, or fewer threads, or "
            "another gpurt.memory.device; gpurt.memory.retries says how often to try"
        )

    def rows(self) -> list[dict[str, Any]]:
        """Tier, bytes used and capacity."""
        return [
            {"tier": str(tier), "used": self.ledger.used(tier), "capacity": capacity}
            for tier, capacity in _capacities(self.limits).items()
        ]

    def _prefetch(self) -> None:
        """Make the inputs of the next task live while this one computes, if there is room."""
        for task in self.worker.state.ready.peekn(1):
            keys = self.ladder.lower(dependency.key for dependency in task.dependencies)
            if keys:
                self._in_background(self.ladder.bring, keys)

    async def gather_dep(self, worker: str, to_gather: Any, total_nbytes: int, *, stimulus_id: str) -> Any:
        """Make room for what has come from a peer."""
        event = await self._gather_dep(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
        if isinstance(event, GatherDepSuccessEvent):
            await self._make_room(event.data)
        return event

    async def get_data(
        self, comm: Any, keys: Iterable[Any], who: str | None = None, serializers: Any = None
    ) -> Any:
        """Serve a peer; what has been spilled from where it lies, without making it live."""
        keys = list(keys)
        held, lower = self.ladder.hold_where_live(keys)
        try:
            serving.set(await self.offload(self.ladder.copies, lower) if lower else {})
            return await self._get_data(comm, keys=keys, who=who, serializers=serializers)
        finally:
            serving.set(None)
            self.ladder.release(held)

    async def _make_room(self, values: dict[Key, Any]) -> None:
        """Promise room in its tier to each object that is about to be stored."""
        for key, value in values.items():
            home, nbytes = self._home(value), sum(owned(value).values())
            if not self.ladder.promise_at_once(key, nbytes, home):
                await self.offload(self.ladder.promise, key, nbytes, home)
            # A task that was cancelled meanwhile stores nothing.
            asyncio.get_running_loop().call_later(1, self.ladder.forget_promise, key)

    # ---- looking after it --------------------------------------------------------------

    def _look(self) -> None:
        for kind, pool in self.pools().items():
            self.ledger.set(Tier.DEVICE if kind == self.device.kind else Tier.HOST, "shards", pool["used"])
        process = self.worker.monitor.get_process_memory()
        self.ledger.set(Tier.HOST, "unmanaged", max(0, process - self._managed_on_host()))
        self.reporter.changed()
        too_much = max(self.ladder.over(), self._pressure(process))
        if too_much and not self._spilling:
            self._spilling = True
            self._in_background(self._relieve, too_much)

    def _in_background(self, function: Callable[..., Any], *args: Any) -> None:
        self.executor.submit(function, *args).add_done_callback(_complain)

    def _managed_on_host(self) -> int:
        device = self.ledger.used(Tier.DEVICE) if self.device.on_host else 0
        return device + self.ledger.cell(Tier.HOST, "partitions") + self.ledger.used(Tier.PINNED)

    def _pressure(self, process: int) -> int:
        """Bytes to spill because the process exceeds Dask's own thresholds."""
        manager = self.worker.memory_manager
        if not manager.memory_limit or not manager.memory_spill_fraction:
            return 0
        if process <= manager.memory_limit * manager.memory_spill_fraction:
            return 0
        goal = manager.memory_target_fraction or manager.memory_spill_fraction
        return int(process - manager.memory_limit * goal)

    def _relieve(self, nbytes: int) -> None:
        try:
            self.ladder.spill(nbytes, Tier.DEVICE if self.device.on_host else Tier.HOST)
            self.ladder.make_room(0, Tier.DEVICE)
        finally:
            self._spilling = False


_DONE = frozenset({"memory", "released", "forgotten", "error", "cancelled"})


def _capacities(of: Limits) -> dict[Tier, int]:
    disk = of.disk if of.disk is not None else psutil.disk_usage("/").total
    return {Tier.DEVICE: of.device, Tier.PINNED: of.pinned, Tier.HOST: of.host, Tier.DISK: disk}


def _live_part(data: Any) -> Any:
    """The part of a mapping of Dask's or dask-cuda's that reads without a copy."""
    if isinstance(data, SpillBuffer):
        return data.fast
    if hasattr(data, "device_buffer"):
        return {**data.others, **data.device}
    return data


def _complain(done: Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("moving data between tiers failed", exc_info=error)


def _out_of_memory(event: Any) -> BaseException | None:
    """What a task failed with, if it was the memory."""
    if not isinstance(event, ExecuteFailureEvent):
        return None
    _, error, _ = clean_exception(event.exception.data)
    return error if isinstance(error, MemoryError) else None
