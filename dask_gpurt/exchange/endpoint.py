"""Define the components that the classes of the exchange share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.exchange.calls import Calls
from dask_gpurt.exchange.links import Links, Traffic
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.exchange.shard import Peer
from dask_gpurt.observe import Metrics


@dataclass(frozen=True)
class Endpoint:
    """Hold the shared components of a worker's exchange."""

    me: Peer
    worker: WorkerServer
    pools: Pools
    links: Links
    traffic: Traffic
    calls: Calls
    metrics: Metrics
    offload: Callable[..., Awaitable[Any]]
