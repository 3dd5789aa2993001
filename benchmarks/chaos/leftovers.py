"""Find resources still held while the cluster is idle: memory, files, mappings, threads, reservations."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask_gpurt
from benchmarks.chaos.faults import SHM, Site
from dask_gpurt.dask_hooks.shuffle import active_runs
from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerServer
from dask_gpurt.protocol import NAME

#: Seconds for all resources to be released after the last operation; workers poll for peers that have left.
PATIENCE_S = 45.0
#: Allowed growth of a process from the first minute to the last, as a factor and in bytes.
GROWTH, GROWTH_BYTES = 1.25, 64 * 2**20
#: Length of the windows between which memory is compared, in seconds.
WINDOW_S = 60.0
TIER_PREFIX, THREAD_PREFIX = "gpurt-tier-", "gpurt"


@dataclass(frozen=True)
class Probe:
    """Hold the resources of a worker process.

    ``anonymous``: anonymous memory in bytes.
    ``pool_files``: inodes of the unnamed files of its own pools.
    ``mapped``: inodes of the unnamed files of pools that it has mapped.
    ``incoming``: number of shards that were offered to it and that it has not released.
    """

    anonymous: int
    pool_files: frozenset[int]
    mapped: frozenset[int]
    incoming: int
    runs: tuple[str, ...]
    threads: tuple[str, ...]


def probe(dask_worker: WorkerServer) -> Probe:
    """Collect the resources of this worker process."""
    gc.collect()  # errors keep frames, which keep runs, which keep shards
    shuffles: Any = dask_worker.plugins.get("shuffle")
    active = active_runs(shuffles).values() if shuffles is not None else ()
    return Probe(
        anonymous=anonymous(),
        pool_files=frozenset(_open_pools()),
        mapped=frozenset(_mapped_pools()),
        incoming=sum(_is_incoming(thing) for thing in gc.get_objects()),
        runs=tuple(repr(run) for run in active if not run.closed),
        threads=tuple(t.name for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)),
    )


def trimmed(dask_worker: WorkerServer) -> int:
    """Return free memory to the system; return the remaining anonymous bytes, without the pinned tier."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous() - _pinned(dask_worker)


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


def _pinned(dask_worker: WorkerServer) -> int:
    # It grows to its capacity as it is needed, and keeps what it has been given.
    runtime: Any = dask_worker.plugins.get(NAME)
    return int(runtime.tiers.pinned.backed) if runtime is not None and runtime.is_on else 0


def _is_incoming(thing: Any) -> bool:
    # Matched by module, independently of the name of the class.
    return type(thing).__module__ == "dask_gpurt.exchange.incoming" and hasattr(thing, "shard")


def _open_pools() -> Iterable[int]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            if _is_pool(os.readlink(link)):
                yield os.stat(link).st_ino
        except OSError:
            continue  # closed since it was listed


def _mapped_pools() -> Iterable[int]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _is_pool(fields[5]):
            yield int(fields[4])


def _is_pool(path: str) -> bool:
    return path.endswith("(deleted)") and path.startswith((f"{SHM}/#", "/memfd:dask-gpurt"))


# ---- while the runtime is on ---------------------------------------------------------


def wait_until_clean(site: Site) -> list[str]:
    """Wait until no resource is held; return descriptions of those still held after :data:`PATIENCE_S`."""
    ends = time.monotonic() + PATIENCE_S
    gc.collect()  # errors keep frames, which keep futures, which keep their tasks
    while (left := held(site)) and time.monotonic() < ends:
        time.sleep(0.5)
        gc.collect()
    return left


def held(site: Site) -> list[str]:
    """Describe the resources that workers hold although nothing runs."""
    probes = site.ask(probe)
    missing = [f"{address} does not answer" for address in site.addresses() if address not in probes]
    return [*missing, *_tasks(site), *of_probes(probes), *_accounts(site)]


def _tasks(site: Site) -> list[str]:
    keys: list[str] = site.client.run_on_scheduler(_keys)
    return [f"{len(keys)} tasks on the scheduler: {', '.join(keys[:3])}"] if keys else []


def _keys(dask_scheduler: SchedulerServer) -> list[str]:
    return [str(key) for key in dask_scheduler.tasks]


def of_probes(probes: dict[str, Probe]) -> list[str]:
    """Describe the resources that should have been released. Pure."""
    alive = frozenset[int]().union(*(probe.pool_files for probe in probes.values()))
    found = []
    for worker, one in probes.items():
        if dead := one.mapped - alive:
            found.append(f"{worker} maps {len(dead)} pools of processes that have ended")
        if one.incoming:
            found.append(f"{worker} keeps {one.incoming} shards that were offered to it")
        found += [f"{worker} keeps {run}" for run in one.runs]
    return found


def _accounts(site: Site) -> list[str]:
    """Describe the published, pulled and reserved bytes that the runtime itself reports."""
    found = []
    for worker, reply in dask_gpurt.report(site.client).get("workers", {}).items():
        for kind, pool in reply.get("pools", {}).items():
            if pool["used"]:
                found.append(f"{worker} has {pool['used']} bytes published in its {kind} pool")
    for row in dask_gpurt.memory_usage(site.client):
        for column in ("partitions", "shards", "reservations"):
            if row[column] <= 0:
                continue
            found.append(f"{row['worker']} has {row[column]} bytes of {column} in the tier {row['tier']}")
    return found


# ---- after it was switched off -------------------------------------------------------


def of_threads(probes: dict[str, Probe]) -> list[str]:
    """Describe threads that are left after the runtime was switched off. Pure."""
    return [
        f"{worker} keeps {len(one.threads)} threads when the runtime is off: {', '.join(one.threads[:5])}"
        for worker, one in probes.items()
        if one.threads
    ]


def spill_directories(directory: str) -> int:
    """Count directories of tiers below a directory."""
    return sum(1 for _ in Path(directory).rglob(f"{TIER_PREFIX}*"))


def named_shm() -> set[str]:
    """Return the names in /dev/shm, except semaphores, which any process with multiprocessing creates."""
    return {name for name in os.listdir(SHM) if not name.startswith("sem.")}


def growth(samples: Sequence[tuple[float, int]]) -> str | None:
    """Describe a growth of memory from the first to the last minute; return None if there is none. Pure.

    ``samples``: seconds since the start, and mean bytes of a worker while idle.
    """
    if not samples or samples[-1][0] - samples[0][0] < 2 * WINDOW_S:
        return None
    first = statistics.median(nbytes for at, nbytes in samples if at <= samples[0][0] + WINDOW_S)
    last = statistics.median(nbytes for at, nbytes in samples if at >= samples[-1][0] - WINDOW_S)
    if last <= max(first * GROWTH, first + GROWTH_BYTES):
        return None
    return (
        f"a worker has {last / 2**20:.0f} MiB of its own in the last minute, {first / 2**20:.0f} in the first"
    )
