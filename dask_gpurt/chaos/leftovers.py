"""Find what is left when nothing runs any more: memory, files, mappings, threads and promises."""

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
from dask_gpurt.chaos.faults import SHM, Site
from dask_gpurt.dask_hooks.shuffle import active_runs

#: Seconds for everything to be let go after the last operation: peers that left are looked for now and then.
PATIENCE_S = 45.0
#: The growth of processes that is allowed from the first minute to the last.
GROWTH, GROWTH_BYTES = 1.25, 64 * 2**20
#: Seconds of the windows between which memory is compared.
WINDOW_S = 60.0
TIER_PREFIX, THREAD_PREFIX = "gpurt-tier-", "gpurt"


@dataclass(frozen=True)
class Probe:
    """List what a worker process holds.

    Attributes
    ----------
    anonymous
        Bytes of memory that are its own.
    pool_files
        Inodes of the nameless files that it has open: its pools.
    mapped
        Inodes of the nameless files of pools that it has mapped.
    incoming
        Shards that were offered to it and that it has not let go.
    runs
        Runs that it takes part in.
    threads
        Names of threads of the runtime.
    """

    anonymous: int
    pool_files: frozenset[int]
    mapped: frozenset[int]
    incoming: int
    runs: tuple[str, ...]
    threads: tuple[str, ...]


def probe(dask_worker: Any) -> Probe:
    """Look at this worker process."""
    shuffles = dask_worker.plugins.get("shuffle")
    active = active_runs(shuffles).values() if shuffles is not None else ()
    return Probe(
        anonymous=anonymous(),
        pool_files=frozenset(_open_pools()),
        mapped=frozenset(_mapped_pools()),
        incoming=sum(_is_incoming(thing) for thing in gc.get_objects()),
        runs=tuple(repr(run) for run in active if not run.closed),
        threads=tuple(t.name for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)),
    )


def trimmed(dask_worker: Any) -> int:
    """Give free memory back to the system; bytes that stay."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous()


def anonymous() -> int:
    """Return the bytes of memory that are this process's own."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


def _is_incoming(thing: Any) -> bool:
    # By the module, so that the name of the class may change.
    return type(thing).__module__ == "dask_gpurt.exchange.incoming" and hasattr(thing, "shard")


def _open_pools() -> Iterable[int]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            if _is_pool(os.readlink(link)):
                yield os.stat(link).st_ino
        except OSError:
            continue  # closed meanwhile


def _mapped_pools() -> Iterable[int]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _is_pool(fields[5]):
            yield int(fields[4])


def _is_pool(path: str) -> bool:
    return path.endswith("(deleted)") and path.startswith((f"{SHM}/#", "/memfd:dask-gpurt"))


# ---- at rest -------------------------------------------------------------------------


def wait_until_clean(site: Site) -> list[str]:
    """Wait until nothing is held; what still is after a while, in words."""
    ends = time.monotonic() + PATIENCE_S
    gc.collect()  # errors keep frames, which keep futures, which keep their tasks
    while (left := held(site)) and time.monotonic() < ends:
        time.sleep(0.5)
        gc.collect()
    return left


def held(site: Site) -> list[str]:
    """List what workers hold although nothing runs."""
    probes = site.ask(probe)
    missing = [f"{address} does not answer" for address in site.addresses() if address not in probes]
    return [*missing, *_tasks(site), *of_probes(probes), *_accounts(site)]


def _tasks(site: Site) -> list[str]:
    keys: list[str] = site.client.run_on_scheduler(_keys)
    return [f"{len(keys)} tasks on the scheduler: {', '.join(keys[:3])}"] if keys else []


def _keys(dask_scheduler: Any) -> list[str]:
    return [str(key) for key in dask_scheduler.tasks]


def of_probes(probes: dict[str, Probe]) -> list[str]:
    """Judge what processes hold. Pure."""
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
    """Ask the runtime itself what it has published, pulled and promised."""
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


# ---- afterwards ----------------------------------------------------------------------


def of_threads(probes: dict[str, Probe]) -> list[str]:
    """List threads that are left where the runtime is off. Pure."""
    return [
        f"{worker} keeps {len(one.threads)} threads when the runtime is off: {', '.join(one.threads[:5])}"
        for worker, one in probes.items()
        if one.threads
    ]


def spill_directories(directory: str) -> int:
    """Count directories of tiers below a directory."""
    return sum(1 for _ in Path(directory).rglob(f"{TIER_PREFIX}*"))


def named_shm() -> set[str]:
    """List names in /dev/shm, but for semaphores, which any process with multiprocessing has."""
    return {name for name in os.listdir(SHM) if not name.startswith("sem.")}


def growth(samples: Sequence[tuple[float, int]]) -> str | None:
    """Say whether memory has grown between the first and the last minute; None where not. Pure.

    Parameters
    ----------
    samples
        Seconds since the start, and bytes of the mean worker, when nothing ran.
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
