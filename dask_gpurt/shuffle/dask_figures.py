"""Report a worker's part of a run in the terms of Dask's shuffle dashboard page.

Dask's own shuffles have a buffer for comms and one for the disk. Here the exchange pools, which all runs of
the worker share, are reported as the comm buffer. There is no disk buffer, since spilled data are written at
once.
"""

from __future__ import annotations

import time
from typing import Any

from dask_gpurt.exchange import Exchange
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe.progress import RunProgress


class DaskFigures:
    """Report the figures of a run since it began on this worker.

    Disk traffic is that of the whole worker since then.
    """

    def __init__(self, run: RunKey, exchange: Exchange, progress: RunProgress):
        self._run = run
        self._exchange = exchange
        self._progress = progress
        self._start = time.time()
        self._disk_before = exchange.disk_traffic()

    def heartbeat(self) -> dict[str, Any]:
        """Return the figures as they are now."""
        figures, exchange = self._progress.snapshot(), self._exchange
        pools = exchange.pools.describe().values()
        written, read = (
            now - before for now, before in zip(exchange.disk_traffic(), self._disk_before, strict=True)
        )
        shards = max(1, figures["offered_shards"])
        return {
            "comm": {
                "memory": sum(pool["used"] - pool["retained"] for pool in pools),
                "memory_limit": sum(pool["capacity"] for pool in pools),
                "total": figures["offered_bytes"],
                "buckets": len(exchange.pools.shares(self._run)),
                "written": figures["offered_bytes"],
                "read": figures["received_bytes"],
                "avg_size": figures["offered_bytes"] / shards,
                "avg_duration": figures["packing"] / shards,
            },
            "disk": {
                **dict.fromkeys(("memory", "memory_limit", "buckets", "avg_size", "avg_duration"), 0),
                **{"total": written, "written": written, "read": read},
            },
            "start": self._start,
        }
