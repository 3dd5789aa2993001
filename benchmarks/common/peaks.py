"""Sample the peak memory per tier inside the workers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
from distributed import Client, Worker, WorkerPlugin
from distributed.diagnostics import nvml

INTERVAL = 0.02
SHARED_MEMORY = Path("/dev/shm")


class PeakMemory(WorkerPlugin):
    """Sample a worker's memory on a separate thread, and keep the peak of each tier."""

    name = "peak-memory"

    def setup(self, worker: Worker) -> None:
        self.process = psutil.Process()
        self.has_gpu = nvml.device_get_count() > 0
        self.peaks: dict[str, int] = {}
        self.stopped = threading.Event()
        threading.Thread(target=self._sample_until_stopped, name=self.name, daemon=True).start()

    def teardown(self, worker: Worker) -> None:
        self.stopped.set()

    def take(self) -> dict[str, int]:
        """Return the peaks since the last call."""
        peaks, self.peaks = self.peaks, {}
        return {tier: max(size, peaks.get(tier, 0)) for tier, size in self._now().items()}

    def _sample_until_stopped(self) -> None:
        while not self.stopped.wait(INTERVAL):
            for tier, size in self._now().items():
                self.peaks[tier] = max(size, self.peaks.get(tier, 0))

    def _now(self) -> dict[str, int]:
        tiers = {"host": self.process.memory_info().rss, "shm": shared_memory_in_use()}
        if self.has_gpu:
            tiers["device"] = nvml.real_time()["memory-used"]
        return tiers


def shared_memory_in_use() -> int:
    """Return the bytes in ``/dev/shm``, of all processes on this host."""
    if not SHARED_MEMORY.exists():
        return 0
    room = os.statvfs(SHARED_MEMORY)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def take_peaks(client: Client) -> dict[str, int]:
    """Return the peak of each tier since the last call, on the worker where it was highest.

    ``host`` is the resident memory of a process, including shared memory that it has touched; ``shm`` is the
    use of ``/dev/shm``; ``device`` is the use that the driver reports, including pools.
    """
    taken = client.run(lambda dask_worker: dask_worker.plugins[PeakMemory.name].take())
    peaks: dict[str, int] = {}
    for by_tier in taken.values():
        for tier, size in by_tier.items():
            peaks[tier] = max(size, peaks.get(tier, 0))
    return peaks
