"""Map the tiers of a worker to their display names. Pure.

Metrics use the same names on all workers: the tier in which tasks compute is ``device``,
and published shards count beside it. On a worker without a GPU that tier is host memory, and the pool of
published shards is in shared memory. Whatever is printed for people uses the display names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dask_gpurt.observe.metrics import UnknownMetricError, find

Row = Mapping[str, Any]

#: Display names used only for workers without a GPU.
MEMORY, SHARED_MEMORY = "memory", "shared memory"
#: All display names, from fast to slow.
SHOWN = ("device", MEMORY, SHARED_MEMORY, "pinned", "host", "disk")
#: Display names of the exchange pools, by kind of device.
SHOWN_POOLS: Mapping[str, str] = {"host": SHARED_MEMORY, "cuda": "device"}
#: The labels of metrics that name a tier.
_TIER_LABELS = ("tier", "from", "to")


def shown_tiers(rows: Iterable[Row], shared_memory: Mapping[str, int]) -> Iterator[Row]:
    """Yield the rows of workers and tiers with display names.

    ``rows``: rows with the names of metrics, for each worker and tier, or for each prefix of tasks in a tier.
    The tiers of a worker must be adjacent.
    ``shared_memory``: capacity of the exchange pool in bytes, by worker without a GPU.
    """
    rows = list(rows)
    beside: dict[str, Row] = {row["worker"]: row for row in rows if row["tier"] == "host"}
    for row in rows:
        worker, tier = row["worker"], row["tier"]
        if worker not in shared_memory or tier == "disk":
            yield row
        elif "prefix" in row:
            yield {**row, "tier": MEMORY} if tier == "device" else row
        elif tier == "device":
            # The process's other memory is host memory too, but is counted in the tier below.
            own = {kind: row[kind] + beside[worker][kind] for kind in ("cudf", "unmanaged")}
            yield {**row, **own, "tier": MEMORY, "published": 0}
            yield _pool(row, shared_memory[worker])
        elif row["capacity"]:  # zero unless the user has set it
            yield {**row, "cudf": 0, "unmanaged": 0}


def _pool(row: Row, capacity: int) -> Row:
    return {
        **dict.fromkeys(row, 0),
        "worker": row["worker"],
        "tier": SHARED_MEMORY,
        "capacity": capacity,
        "headroom": capacity - row["published"],
        "published": row["published"],
    }


def shown_metric(name: str) -> str:
    """Return the name of a metric of workers without a GPU, followed by the display names of its tiers."""
    try:
        metric = find(name)
    except UnknownMetricError:  # from a worker with another version
        return name
    found = metric.pattern.fullmatch(name)
    values = zip(metric.labels, found.groups() if found else (), strict=True)
    tiers = [value for label, value in values if label in _TIER_LABELS]
    if "device" not in tiers:
        return name
    return f"{name} ({' to '.join(MEMORY if tier == 'device' else tier for tier in tiers)})"
