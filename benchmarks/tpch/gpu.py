"""Measure how busy the GPUs are: with CUPTI through PyTorch if it is installed, else with NVML."""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
from typing import Any

from distributed import Client, Worker, WorkerPlugin
from distributed.diagnostics import nvml

SAMPLE_INTERVAL_S = 0.02
#: An idle GPU uses less than this share of its memory; a worker's pool uses more.
IDLE_SHARE, IDLE_TIMEOUT_S, IDLE_POLL_INTERVAL_S = 0.03, 30.0, 0.1


class Utilisation(WorkerPlugin):
    """Sample NVML's utilisation of a worker's GPU.

    It is the share of NVML's last sampling period in which a kernel ran. A period lasts from a sixth of a
    second to a second, which is coarse for shorter queries.
    """

    name = "tpch-utilisation"

    def setup(self, worker: Worker) -> None:
        """Start sampling on a thread."""
        self._samples: list[float] = []
        self._stopped = threading.Event()
        threading.Thread(target=self._sample, name=self.name, daemon=True).start()

    def teardown(self, worker: Worker) -> None:
        """Stop the thread."""
        self._stopped.set()

    def take(self) -> list[float]:
        """Return the samples since the last call, as shares."""
        samples, self._samples = self._samples, []
        return samples

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_INTERVAL_S):
            self._samples.append(nvml.real_time()["utilization"] / 100)


def wait_until_idle() -> None:
    """Block until no process holds GPU memory, as workers end a while after their cluster has closed.

    Raises
    ------
    TimeoutError
        If some process still does: the next cluster would have no room for its pools.
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
    """Return NVML's mean utilisation of all GPUs since the last call; None without samples."""
    taken = client.run(lambda dask_worker: dask_worker.plugins[Utilisation.name].take())
    samples = [share for each in taken.values() for share in each]
    return statistics.fmean(samples) if samples else None


def can_trace(client: Client) -> bool:
    """Return whether all workers have PyTorch, whose profiler records kernels and copies with CUPTI."""
    there = client.run(lambda: importlib.util.find_spec("torch") is not None)
    return bool(there) and all(there.values())


def begin_trace(client: Client) -> None:
    """Start tracing the kernels and copies of all workers."""
    from ..overlap.gpu_timeline import begin

    client.run(begin)


def end_trace(client: Client) -> dict[str, Any]:
    """Return the busy share of the GPUs since :func:`begin_trace`, and their longest kernels.

    Returns
    -------
    dict
        ``gpu_busy``: the share of the time from the first kernel or copy to the last in which there was one;
        ``gpu_seconds``: the seconds in which there was one;
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
    busy = total - seconds["neither"]
    return {"gpu_busy": busy / total if total else None, "gpu_seconds": busy, "kernels": dict(longest)}
