"""Measure how busy the GPUs are: by CUPTI through PyTorch where it is installed, else by NVML."""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
from typing import Any

from distributed import Client, Worker, WorkerPlugin
from distributed.diagnostics import nvml

SAMPLE_INTERVAL_S = 0.02
#: The memory of a GPU without a process is used to less than this share; a worker's pool takes more.
IDLE_SHARE, IDLE_TIMEOUT_S, IDLE_POLL_INTERVAL_S = 0.03, 30.0, 0.1


class Utilisation(WorkerPlugin):
    """Sample NVML's utilisation of a worker's GPU.

    It is the share of NVML's own last period, a sixth of a second to a second, in which a kernel ran: coarse
    for queries that take less.
    """

    name = "tpch-utilisation"

    def setup(self, worker: Worker) -> None:
        """Begin to sample, on a thread."""
        self._samples: list[float] = []
        self._stopped = threading.Event()
        threading.Thread(target=self._sample, name=self.name, daemon=True).start()

    def teardown(self, worker: Worker) -> None:
        """End the thread."""
        self._stopped.set()

    def take(self) -> list[float]:
        """Return the samples since the last call, as shares."""
        samples, self._samples = self._samples, []
        return samples

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_INTERVAL_S):
            self._samples.append(nvml.real_time()["utilization"] / 100)


def wait_until_idle() -> None:
    """Wait until no process holds memory of a GPU: workers end a while after their cluster has closed.

    Raises
    ------
    TimeoutError
        When one still does: the next cluster would not find room for its pools.
    """
    import pynvml

    deadline = time.monotonic() + IDLE_TIMEOUT_S
    for index in range(nvml.device_get_count()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        while (memory := pynvml.nvmlDeviceGetMemoryInfo(handle)).used > IDLE_SHARE * memory.total:
            if time.monotonic() > deadline:
                held = f"{memory.used / 2**30:.1f} of {memory.total / 2**30:.1f} GiB"
                raise TimeoutError(f"processes still hold {held} of GPU {index}: end them, or wait longer")
            time.sleep(IDLE_POLL_INTERVAL_S)


def take_utilisation(client: Client) -> float | None:
    """Return the mean of NVML's utilisation since the last call, of all GPUs; None without samples."""
    taken = client.run(lambda dask_worker: dask_worker.plugins[Utilisation.name].take())
    samples = [share for each in taken.values() for share in each]
    return statistics.fmean(samples) if samples else None


def can_trace(client: Client) -> bool:
    """Tell whether all workers have PyTorch, whose profiler gets kernels and copies from CUPTI."""
    there = client.run(lambda: importlib.util.find_spec("torch") is not None)
    return bool(there) and all(there.values())


def begin_trace(client: Client) -> None:
    """Begin to trace the kernels and copies of all workers."""
    from ..overlap.gpu_timeline import begin

    client.run(begin)


def end_trace(client: Client) -> dict[str, Any]:
    """Return the busy share of the GPUs since :func:`begin_trace`, and what they did.

    Returns
    -------
    dict
        ``gpu_busy``: the share of the time from the first kernel or copy to the last in which there was one;
        ``kernels``: the longest by name in seconds; both over all workers.
    """
    from ..overlap.gpu_timeline import end

    traced = list(client.run(end).values())
    seconds = {side: sum(of["seconds"][side] for of in traced) for side in traced[0]["seconds"]}
    total = sum(seconds.values())
    kernels: dict[str, float] = {}
    for of in traced:
        for name, value in of["longest"]["compute"].items():
            kernels[name] = kernels.get(name, 0.0) + value
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:8]
    return {"gpu_busy": 1 - seconds["neither"] / total if total else None, "kernels": dict(longest)}
