"""Build the tiers of a worker, and run the threads that move data between them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from dask.typing import Key
from distributed.core import Status
from distributed.system import MEMORY_LIMIT
from tornado.ioloop import PeriodicCallback

from dask_gpurt.config import Settings, Size
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.device import Allocator, Pinning, discover
from dask_gpurt.device.base import DeviceFiles, Guard, files_of, no_fence
from dask_gpurt.device.host import few_left
from dask_gpurt.device.libraries import spilled_by_libraries
from dask_gpurt.exchange.calls import in_thread, is_exiting
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.frames.registry import tables_on
from dask_gpurt.memory.budget import Memory, Shares, gpu_memory, host_memory, share_out
from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.host import BlockPool, HostTier, PinnedTier
from dask_gpurt.memory.ledger import CACHED, PARTITIONS, SPILLED_BY_LIBRARY, Ledger, LedgerMessage, Tier
from dask_gpurt.memory.peer_copies import COPIES_BYTES, COPIES_OF_LIMIT
from dask_gpurt.memory.spilling import next_use
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.reads.below import ColumnsBelow
from dask_gpurt.reads.caches import RangeCache
from dask_gpurt.reads.columns import ColumnCache

logger = logging.getLogger(__name__)

#: Seconds between polls of the process's memory and of the exchange pools.
PRESSURE_POLL_INTERVAL_S = 0.2
#: Seconds between polls of the free space of the file system that takes spilled data.
DISK_POLL_INTERVAL_S = 2.0
#: The share of its memory limit above which a process drops the mapped pages of peers' pools at each poll, so
#: that they do not count as its own memory.
DROP_PAGES_FROM = 0.5

#: The most of a live tier that cached ranges or columns of files have by default.
CACHE_SHARE = 0.5
#: The least share of the cached columns that is dropped for an allocation that failed: there may be holes.
DROPPED_AT_LEAST = 1 / 8


class WorkerBuffer(TieredBuffer):
    """Let Dask's memory monitor spill the tiered buffer, as a ``distributed.spill.ManualEvictProto``.

    The monitor compares the process's memory with ``distributed.worker.memory.spill``, and calls
    :meth:`evict` on the event loop until the process is below its target.
    """

    #: Always true, so that the monitor calls evict(): dropping mapped pages of pools may help too.
    fast = True
    relieve: Callable[[], None] = staticmethod(no_fence)

    def evict(self) -> int:
        """Start to spill in the background, and return -1 to end the monitor's loop.

        Dask's own buffer spills one value within this call. Here the event loop never blocks on a spill; the
        monitor calls again at its next poll if the process is still too large.
        """
        self.relieve()
        return -1


class WorkerTiers:
    """Hold the tiered buffer of a worker, its ledger, and the threads that move data.

    ``worker``: the Dask worker; it is not changed.
    ``pools``: the devices of the worker and their exchange pools, whose memory the ledger counts too.
    """

    def __init__(self, worker: WorkerServer, settings: Settings, pools: Pools, metrics: Metrics):
        self.worker = worker
        self.settings = settings
        self._metrics = metrics
        self.pools = pools
        self.device = pools.device(pools.main)
        self.memory_limit: int = self._memory_limit()
        self.host = self._host_memory()
        shares = self._shares(worker.data)
        self.limits, self._spare = shares.limits, shares.spare
        pools.most = {"host": shares.shared_memory, pools.main: shares.pool}
        self.pinned = BlockPool(
            self.limits.pinned,
            register=self.device.register if isinstance(self.device, Pinning) else None,
            failed=lambda error: metrics.fallback(Fallback.MEMORY_NOT_PINNED, str(error)),
        )
        self._pinned_tier = PinnedTier(self.pinned, lambda nbytes: self.below.release(nbytes))
        self.disk = DiskTier(worker.local_directory, self.limits.disk, self._device_files())
        live, pinned, below = self.limits.device, self.limits.pinned, self.limits.host
        capacities = {Tier.DEVICE: live, Tier.PINNED: pinned, Tier.HOST: below, Tier.DISK: self.disk.limit()}
        self.ledger = Ledger(capacities)
        self.ledger.shared_memory = self._shared_memory()
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="gpurt-tiers")
        self.tiered_buffer = WorkerBuffer(
            self.limits,
            self._lower_tiers(),
            home=self.home,
            device=self.device,
            ledger=self.ledger,
            metrics=metrics,
            priority_of=self._priority_of,
            changed=self._changed,
            beside=self._beside,
        )
        self.tiered_buffer.relieve = self._relieve_soon
        self._host_tier = self.tiered_buffer.host_tier
        self._counting = threading.Lock()
        #: Ranges of files that tasks have read, in what the live tier in host memory has left.
        self.ranges = RangeCache(self._left_for_ranges, self._kept_on_host)
        self.tables = partial(tables_on, self.device.kind)
        #: Columns of files that were on the device, in what the pinned tier has left.
        self.below = ColumnsBelow(
            self._pinned_tier,
            self.device,
            self.tables,
            self._left_below,
            partial(self.ledger.set, Tier.PINNED, CACHED),
        )
        #: Columns of files, in what the device tier of a GPU has left; on a host in what ranges leave.
        self.columns = (
            ColumnCache(self._left_for_columns, self._kept_on_host, source="memory")
            if self.device.on_host
            else ColumnCache(
                self._left_for_columns, partial(self.ledger.set, Tier.DEVICE, CACHED), self.below
            )
        )
        self._dropping = False
        self._given_back = 0
        self._seen = threading.local()
        self._guard: Guard | None = None
        self._relieving = False
        #: Whether the runtime is being switched off. Work that has started before may still end later.
        self.closed = False
        self._watch = PeriodicCallback(self._poll_memory, PRESSURE_POLL_INTERVAL_S * 1000)
        # Polled on another thread: a network file system may block.
        self._watch_disk = PeriodicCallback(
            partial(self.in_background, self._poll_disk), DISK_POLL_INTERVAL_S * 1000
        )

    def start(self) -> None:
        """Start polling the process and the disk. On the event loop."""
        self._watch.start()
        self._watch_disk.start()
        self.in_background(self._poll_disk)

    async def report(self) -> LedgerMessage:
        """Return the bytes in all tiers and pools at this moment (handler)."""
        self._poll_memory()
        return self.ledger.snapshot()

    def guard(self) -> None:
        """Have failed device allocations spill and retry. Blocks."""
        if isinstance(self.device, Allocator):
            self._guard = self.device.guard(self._short)

    def _short(self, nbytes: int) -> bool:
        """Free memory for a failed allocation of this thread.

        Returns whether memory was freed since this thread's previous failure, so that a retry may succeed.
        """
        if getattr(self._seen, "spares", False):
            return False
        if self.columns.release(max(nbytes, int(DROPPED_AT_LEAST * self.columns.nbytes))):
            self._metrics.add("reads.dropped")
        releases, self._seen.releases = getattr(self._seen, "releases", 0), self.columns.releases
        if releases != self._seen.releases:  # by this thread, or by others
            return True
        if getattr(self._seen, "spilling", False):
            return False  # spilling itself may allocate: do not recurse
        self._metrics.add("memory.short")
        self._seen.spilling = True
        try:
            self.tiered_buffer.spill(nbytes)
        finally:
            self._seen.spilling = False
        before, self._seen.removals = getattr(self._seen, "removals", 0), self.tiered_buffer.removals
        return bool(self._seen.removals != before)

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """Have failed allocations of this thread raise rather than free memory for them."""
        self._seen.spares = True
        try:
            yield
        finally:
            self._seen.spares = False

    def _shared_memory(self) -> int | None:
        """Return the exchange pool's capacity in bytes if tasks compute on the host, else None."""
        if not self.device.on_host:
            return None
        return int(self.pools.describe().get(self.device.kind, {}).get("capacity", 0))

    async def close(self) -> None:
        """Stop polling, and release everything in the tiers."""
        self.closed = True
        self._watch.stop()
        self._watch_disk.stop()
        if self._guard is not None:
            self._guard.remove()
        await in_thread(self.columns.close)
        await in_thread(self.below.close)
        await in_thread(self.tiered_buffer.close)
        self.executor.shutdown(wait=False)

    def _memory_limit(self) -> int:
        """Return the bytes of host memory that the worker may use."""
        limit = self.worker.memory_manager.memory_limit or MEMORY_LIMIT
        if self.device.on_host:
            return limit
        try:
            # Dask derives it from the system's total, which may include GPU memory as NUMA nodes.
            return min(limit, discover.memory_of_host(discover.gpu_library()))
        except Exception as error:  # NVML may fail for any GPU of the host, such as one that is lost
            self._metrics.fallback(Fallback.MEMORY_GPU_NODES_UNKNOWN, repr(error))
            return limit

    def _host_memory(self) -> Memory:
        manager, process = self.worker.memory_manager, self.worker.monitor.get_process_memory()
        data = self.worker.state.nbytes  # of which some may be on a GPU or on disk
        pause = manager.memory_pause_fraction if manager.memory_limit else False
        return host_memory(self.memory_limit, max(0, process - data), pause, self.device.buffers)

    def _gpu_memory(self) -> Memory | None:
        if (total := self.device.own_memory()) is None:
            return None
        copies = 0 if self.device.integrated else min(COPIES_BYTES, int(COPIES_OF_LIMIT * total))
        return gpu_memory(total, copies, integrated=self.device.integrated)

    def _shares(self, given: Any) -> Shares:
        given_device = getattr(getattr(given, "device_buffer", None), "n", None)
        directory, on_host = os.statvfs(self.worker.local_directory), self.device.on_host
        return share_out(
            self.settings.memory,
            self.pools.claim(self.device),
            host=self.host,
            gpu=self._gpu_memory(),
            given_device=given_device,
            target=self.worker.memory_manager.memory_target_fraction,
            disk_free=directory.f_bavail * directory.f_frsize,
            shared_memory=0 if on_host else self.pools.claim(self.pools.device("host")).automatic,
            integrated=self.device.integrated,
        )

    def _beside(self) -> int:
        """Return the bytes by which the live tier in host memory has to shrink. From any thread."""
        return max(0, self.pools.host_pages() + self._dask_bytes() - self._spare)

    def _left_for_ranges(self) -> int:
        """Return the bytes that ranges of files may have now. From any thread."""
        headroom = self.ledger.headroom(self._host_tier) - self._beside()
        return self._left_to_keep(self.limits.live(self._host_tier), self.memory_limit, headroom)

    def _left_for_columns(self) -> int:
        """Return the bytes that columns of files may have now. From any thread."""
        if self.device.on_host:
            return max(0, self._left_for_ranges() - self.ranges.nbytes)
        if self._guard is None:  # without which allocations of others would fail
            return 0
        return self._left_to_keep(self.limits.device, self.limits.device, self.ledger.headroom(Tier.DEVICE))

    def _left_below(self) -> int:
        """Return the bytes that columns of files may have now in the pinned tier. From any thread."""
        if self._guard is None:
            return 0
        others = self.pinned.used - self.below.nbytes
        return self._left_to_keep(self.limits.pinned, self.limits.pinned, self.limits.pinned - others)

    def _left_to_keep(self, live: int, total: int, headroom: int) -> int:
        asked = self.settings.cache
        most = asked.of(total) if isinstance(asked, Size) else int(CACHE_SHARE * live)
        return max(0, min(most, headroom))

    def _kept_on_host(self, _: int) -> None:
        """Count what is kept of files in host memory, by a cache or the other one. From any thread."""
        with self._counting:  # or the sum of the one that was first could be set last
            columns = self.columns.nbytes if self.device.on_host else 0
            self.ledger.set(self._host_tier, CACHED, self.ranges.nbytes + columns)

    def _changed(self) -> None:
        """Give way to a change of the ledger. From any thread."""
        if self.device.on_host:
            self.columns.fit()
        self.ranges.fit()
        if self.columns.excess() > 0 and not self._dropping:
            self._dropping = True
            self.in_background(self._drop_columns)

    def _drop_columns(self) -> None:
        """Drop columns that there is no room for any more. Freeing memory of a GPU may block."""
        self._dropping = False
        self.columns.fit()

    def _dask_bytes(self) -> int:
        """Return the bytes in host memory of data that Dask keeps, if the runtime leaves them to it."""
        fast = None if self.settings.memory.tiers else getattr(self.worker.data, "fast", None)
        return int(getattr(fast, "total_weight", 0))

    def _lower_tiers(self) -> dict[Tier, Any]:
        return {
            Tier.PINNED: self._pinned_tier,
            # An integrated GPU shares the host's memory: a copy there would free nothing.
            Tier.HOST: HostTier(0 if self.device.integrated else self.limits.host),
            Tier.DISK: self.disk,
        }

    def _device_files(self) -> DeviceFiles | None:
        return files_of(self.device, partial(self._metrics.fallback, Fallback.MEMORY_FILES_WITHOUT_KVIKIO))

    def peak(self) -> int:
        """Return the peak bytes of user code on the device since the last call; 0 if it does not count."""
        return self.device.peak() if isinstance(self.device, Allocator) else 0

    def home(self, value: Any) -> Tier:
        """Return the tier in which an object is live."""
        return Tier.DEVICE if self.device.holds(value) else Tier.HOST

    def _priority_of(self, key: Key) -> tuple[Any, ...] | None:
        return next_use(self.worker.state.tasks.get(key))

    # ---- threads -----------------------------------------------------------------------

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function that moves data on a thread of the tiers."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)

    def in_background(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a function on a thread of the tiers without waiting for it; errors are logged."""
        if self.closed or is_exiting():
            return
        self.executor.submit(function, *args).add_done_callback(_log_failure)

    # ---- memory pressure ---------------------------------------------------------------

    def _poll_memory(self) -> None:
        if self._guard is not None:
            self._guard.renew()
        for kind, pool in self.pools.describe().items():
            self.ledger.set(Tier.DEVICE if kind == self.device.kind else Tier.HOST, "published", pool["used"])
        self.ledger.shared_memory = self._shared_memory()
        if (spilled := spilled_by_libraries()) is not None:
            self.ledger.set(Tier.HOST, SPILLED_BY_LIBRARY, sum(spilled.values()))
            self.tiered_buffer.set_elsewhere(spilled)
        process = self.worker.monitor.get_process_memory()
        self.ledger.set(Tier.HOST, "unmanaged", max(0, process - self._managed_on_host()))
        allocated = self.device.allocated() if isinstance(self.device, Allocator) else 0
        beyond = allocated - self.tiered_buffer.live_bytes(Tier.DEVICE) - self.columns.nbytes
        self.ledger.set(Tier.DEVICE, "unmanaged", max(0, beyond))
        too_much = self.tiered_buffer.reservations.overshoot()
        if not self.settings.memory.tiers:
            # Dask's monitor only spills Dask's own data; shards are in these tiers nevertheless.
            too_much = max(too_much, self._pressure(process))
        if too_much or process > DROP_PAGES_FROM * self.memory_limit:
            self._relieve_soon()

    def _poll_disk(self) -> None:
        """Update the capacity of the disk tier, since others write there too; look at file descriptors."""
        if (reason := few_left()) is not None:
            self._metrics.fallback(Fallback.EXCHANGE_FEW_DESCRIPTORS, reason)
        try:
            limit = self.disk.limit()
        except OSError:  # the directory is gone
            limit = self.disk.used
        self.ledger.set_capacity(Tier.DISK, limit)

    def _relieve_soon(self) -> None:
        if not self._relieving:
            self._relieving = True
            self.in_background(self._relieve)

    def _managed_on_host(self) -> int:
        device = self.ledger.used(Tier.DEVICE) if self.tiered_buffer.host_tier is Tier.DEVICE else 0
        cells = sum(self.ledger.cell(Tier.HOST, kind) for kind in (PARTITIONS, SPILLED_BY_LIBRARY))
        cells += self.ranges.nbytes + self.below.nbytes + (self.columns.nbytes if self.device.on_host else 0)
        return device + cells + self.ledger.used(Tier.PINNED)

    def _pressure(self, process: int) -> int:
        """Return the bytes to spill because the process exceeds Dask's own thresholds."""
        manager = self.worker.memory_manager
        if not manager.memory_limit or not manager.memory_spill_fraction:
            return 0
        if process <= manager.memory_limit * manager.memory_spill_fraction:
            return 0
        goal = manager.memory_target_fraction or manager.memory_spill_fraction
        return int(process - manager.memory_limit * goal)

    def _relieve(self) -> None:
        try:
            # First reduce the process by mapped pages and unused pool memory, which need no spilling.
            self.pools.drop_pages()
            if pressure := self._pressure(self.worker.monitor.get_process_memory()):
                if self.device.on_host:
                    pressure -= self.columns.release(pressure)
                    self._give_back()
                self.ranges.release(pressure)
                self.pools.trim()
            process = self.worker.monitor.get_process_memory()
            if too_much := max(self.tiered_buffer.reservations.overshoot(), self._pressure(process)):
                self.tiered_buffer.spill(too_much, self.tiered_buffer.host_tier)
                self.tiered_buffer.make_room(0, Tier.DEVICE)
            self._drain()
        finally:
            self._relieving = False

    def _give_back(self) -> None:
        """Have the system take back what dropped columns had, since the last time. Blocks."""
        if self.columns.releases > self._given_back:
            self._given_back = self.columns.releases
            import_module("dask_gpurt.reads.arrow_tables").give_back()

    def _drain(self) -> None:
        """Have the pool in host memory emptied if the process is so large that Dask has paused the worker.

        Otherwise it would keep the pages, and start no tasks without which nobody reads them::

            Worker                                    Owners
            publishes shards until it is paused
                                                      wait for the barrier
            starts no more transfers, and so the
            barrier waits for this worker
        """
        if self.worker.status is Status.paused:
            self.pools.drain_host()

    def out_of_memory(self, error: BaseException | None) -> MemoryError:
        """Return the user's error for when nothing is left to spill."""
        of = self.ledger.capacity.items()
        tiers = ", ".join(f"{tier} {self.ledger.used(tier)} of {nbytes} bytes" for tier, nbytes in of)
        largest = ", ".join(f"{key!r} ({nbytes} bytes)" for key, nbytes in self.tiered_buffer.largest(3))
        return MemoryError(
            f"out of memory {self.settings.memory.retries + 1} times, with everything possible spilled: "
            f"{error}. "
            f"Tiers: {tiers}. Largest: {largest or 'none'}. Use smaller partitions or fewer threads, or "
            "change gpurt.memory.device"
        )


def _log_failure(done: Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("moving data between tiers failed", exc_info=error)
