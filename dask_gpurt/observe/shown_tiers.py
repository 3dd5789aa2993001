"""Name the tiers of a worker as they are shown to people. Pure.

Metrics have names that are the same on all workers: the tier in which tasks compute is ``device``, and what
a worker publishes counts beside it. Without a GPU that tier is the memory of the host, and the pool of
published shards is shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

#: The tiers of workers without a GPU that others do not have.
MEMORY, SHARED_MEMORY = "memory", "shared memory"
#: All names that are shown, from fast to slow.
SHOWN = ("device", MEMORY, SHARED_MEMORY, "pinned", "host", "disk")


def shown_tiers(rows: Iterable[Row], shared_memory: Mapping[str, int]) -> Iterator[Row]:
    """Yield the rows of workers and tiers with the names that are shown.

    Parameters
    ----------
    rows
        By the names of metrics: of each worker and tier, all tiers of a worker together; or of each prefix of
        tasks in it.
    shared_memory
        By worker without a GPU, the bytes that its exchange pool may take.
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
            # Other memory of the process is in the same place, and is counted for the tier below it.
            own = {kind: row[kind] + beside[worker][kind] for kind in ("cudf", "unmanaged")}
            yield {**row, **own, "tier": MEMORY, "published": 0}
            yield _pool(row, shared_memory[worker])
        elif row["capacity"]:  # set by the user, else there is none
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
