"""Hold the parts that all of one worker's end of the exchange share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.exchange.calls import Calls
from dask_gpurt.exchange.links import Links
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.exchange.shard import Peer
from dask_gpurt.exchange.traffic import Traffic
from dask_gpurt.observe import Metrics


@dataclass(frozen=True)
class Endpoint:
    """Hold the parts that the exchange of a worker shares among its classes.

    Attributes
    ----------
    me
        This worker, as peers know it.
    worker
        The Dask worker.
    pools
        The devices of the worker and their pools.
    links
        The links from peers.
    traffic
        Measured transfers.
    calls
        Calls handlers of peers.
    metrics
        The counters of the worker.
    offload
        Runs a function that blocks on a thread.
    """

    me: Peer
    worker: WorkerServer
    pools: Pools
    links: Links
    traffic: Traffic
    calls: Calls
    metrics: Metrics
    offload: Callable[..., Awaitable[Any]]
