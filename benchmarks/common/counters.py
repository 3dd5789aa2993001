"""Read counters of workers around a query: bytes read, moved and spilled, CPU seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed import Client

import dask_gpurt
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.memory.ledger import Tier

#: The memory tiers of the runtime, from top to bottom.
TIERS = tuple(Tier)
SPILL_PREFIX, EXCHANGE_PREFIX = "memory.spill.bytes.", "exchange.bytes."


def read_counters(client: Client, has_runtime: bool) -> dict[str, float]:
    """Return monotonic counters, summed over the workers.

    Returns ``read_bytes``: bytes read by the processes (Linux's ``rchar``, which counts all read calls,
    whatever their source, but not direct reads by a GPU). ``moved_bytes``: results of tasks that workers sent
    to each other and to the client, plus shards: for the runtime those that moved to another worker, for p2p
    all, since its log does not distinguish them. ``spilled_bytes``: bytes moved to a lower memory tier or,
    with Dask, to disk, including p2p's files. ``thread_cpu_seconds``: CPU time of the task threads.
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


def count_worker(dask_worker: WorkerServer) -> dict[str, float]:
    """Return the counters that Dask and Linux keep for one worker."""
    digests: Mapping[Any, float] = dask_worker.digests_total
    io = Path(f"/proc/{os.getpid()}/io").read_text().split()
    return {
        "read_bytes": int(io[io.index("rchar:") + 1]),
        # Unlike the log of incoming transfers, which is bounded, this counts all, including results.
        "moved_bytes": dask_worker.transfer_outgoing_bytes_total
        + _total(digests, "process", "bytes", of="p2p"),
        "spilled_bytes": _total(digests, "disk-write", "bytes"),
        "thread_cpu_seconds": _total(digests, "thread-cpu", "seconds", of="execute"),
        "shuffles": 0,
    }


def _total(digests: Mapping[Any, float], label: str, unit: str, of: str | None = None) -> float:
    """Sum Dask's fine performance metrics with a label.

    Dask counts the work of p2p in a task twice, for the task and for p2p. So of p2p's own metrics, only the
    background work is included: of its comms for the label ``process``, of its disk for other labels.
    """

    def counts(key: Any) -> bool:
        if not isinstance(key, tuple) or key[-2:] != (label, unit) or (of is not None and key[0] != of):
            return False
        if key[0] != "p2p":
            return True
        return bool(key[2] == ("background-comms" if label == "process" else "background-disk"))

    return sum(value for key, value in digests.items() if counts(key))


def exchanged(counters: Mapping[str, float]) -> Iterable[float]:
    """Yield the bytes of shards that moved to another worker, by path."""
    for name, nbytes in counters.items():
        if name.startswith(EXCHANGE_PREFIX) and name != f"{EXCHANGE_PREFIX}local":
            yield nbytes


def spilled(counters: Mapping[str, float]) -> Iterable[float]:
    """Yield the bytes moved to lower tiers, without those moved back up."""
    for name, nbytes in counters.items():
        if name.startswith(SPILL_PREFIX):
            source, _, target = name.removeprefix(SPILL_PREFIX).partition(".")
            if source == "exchange" or TIERS.index(Tier(target)) > TIERS.index(Tier(source)):
                yield nbytes


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the differences of counters between two readings."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
