"""Read the counters of workers while a query runs: bytes read, moved and spilled, and seconds of CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed import Client

import dask_gpurt
from dask_gpurt.memory.tiers import Tier

#: The memory tiers of the runtime, from the top down.
TIERS = tuple(Tier)
SPILL_PREFIX, EXCHANGE_PREFIX = "memory.spill.bytes.", "exchange.bytes."


def read_counters(client: Client, has_runtime: bool) -> dict[str, float]:
    """Return counters that only grow, summed over the workers.

    Returns
    -------
    dict
        ``read_bytes``: what the processes have read from files (Linux's ``rchar``: read calls, wherever the
        bytes came from; what a GPU reads by itself does not count).
        ``moved_bytes``: results of tasks that workers sent, to each other and to the client, and shards: of
        the runtime those that changed their worker, of p2p all, since its log does not tell them apart.
        ``spilled_bytes``: what went down a memory tier, or, with Dask, to disk, p2p's files included.
        ``thread_cpu_seconds``: CPU time of the task threads.
        ``shuffles``: runs of the runtime's shuffles.
    """
    found: dict[str, float] = {}
    for counted in client.run(count_worker).values():
        for name, value in counted.items():
            found[name] = found.get(name, 0) + value
    if has_runtime:
        counters = dask_gpurt.report(client)["counters"]
        found["moved_bytes"] += sum(exchanged(counters))
        found["spilled_bytes"] += sum(spilled(counters))
        found["shuffles"] = counters.get("shuffle.runs", 0)
    return found


def count_worker(dask_worker: Any) -> dict[str, float]:
    """Return the counters of one worker that Dask and Linux keep."""
    digests: Mapping[Any, float] = dask_worker.digests_total
    io = Path(f"/proc/{os.getpid()}/io").read_text().split()
    return {
        "read_bytes": int(io[io.index("rchar:") + 1]),
        # The log of incoming transfers has room for so many of them only; this counts all, results included.
        "moved_bytes": dask_worker.transfer_outgoing_bytes_total
        + _total(digests, "process", "bytes", of="p2p"),
        "spilled_bytes": _total(digests, "disk-write", "bytes"),
        "thread_cpu_seconds": _total(digests, "thread-cpu", "seconds", of="execute"),
        "shuffles": 0,
    }


def begin_peaks(client: Client) -> bool:
    """Begin to measure the peak memory of each worker process; return whether that is possible."""
    return all(client.run(_begin_peak).values())


def _begin_peak() -> bool:
    """Set the kernel's high-water mark back, see proc(5); some containers do not let a process do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory(client: Client) -> int | None:
    """Return the bytes of the worker that had most since :func:`begin_peaks`; None if Linux does not tell."""
    peaks = [peak for peak in client.run(_peak).values() if peak is not None]
    return max(peaks, default=None)


def _peak() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _total(digests: Mapping[Any, float], label: str, unit: str, of: str | None = None) -> float:
    """Sum up Dask's fine performance metrics of a label.

    They count the work of p2p for a task twice, for the task and for p2p. So p2p's own metrics count only
    where it works in the background, and those of its comms only where it does not write.
    """

    def counts(key: Any) -> bool:
        if not isinstance(key, tuple) or key[-2:] != (label, unit) or (of is not None and key[0] != of):
            return False
        if key[0] != "p2p":
            return True
        return bool(key[2] == ("background-comms" if label == "process" else "background-disk"))

    return sum(value for key, value in digests.items() if counts(key))


def exchanged(counters: Mapping[str, float]) -> Iterable[float]:
    """Return the bytes of shards that changed their worker, by path."""
    for name, nbytes in counters.items():
        if name.startswith(EXCHANGE_PREFIX) and name != f"{EXCHANGE_PREFIX}local":
            yield nbytes


def spilled(counters: Mapping[str, float]) -> Iterable[float]:
    """Return the bytes that went down the memory tiers; what came up again has counters of its own."""
    for name, nbytes in counters.items():
        if name.startswith(SPILL_PREFIX):
            source, _, target = name.removeprefix(SPILL_PREFIX).partition(".")
            if source == "exchange" or TIERS.index(Tier(target)) > TIERS.index(Tier(source)):
                yield nbytes


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what was counted between two readings."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
