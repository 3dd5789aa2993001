"""Describe what waits in the runtime of a worker, part by part, for when a cluster stands still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from dask_gpurt.observe.waiting import queued


def waiting(plugin: Any) -> dict[str, Any]:
    """Return the waiting lists of a worker's runtime, as plain values; on its event loop.

    Parameters
    ----------
    plugin
        The :class:`~dask_gpurt.plugins.worker.GpurtWorkerPlugin`, set up wholly or in part.
    """
    parts: dict[str, Callable[[], Any]] = {
        "admission": lambda: plugin.data.waiting() if plugin.data is not None else "tiers are off",
        "tiers": lambda: {**(queued(plugin.tiers.executor) or {}), "used": plugin.tiers.rows()},
        "moving": lambda: list(map(str, plugin.tiers.tiered_buffer.moving())),
        "exchange": lambda: queued(plugin.exchange.executor),
        "pulls": lambda: _pulls(plugin.exchange.puller),
        "shards": lambda: _shards(plugin.exchange),
        "published": lambda: _published(plugin.exchange.pools),
        "counters": lambda: plugin.metrics.snapshot(),
    }
    return {name: _described(part) for name, part in parts.items()}


def _described(part: Callable[[], Any]) -> Any:
    try:
        return part()
    # A part that is not set up yet, or gone already: the others are told of all the same.
    except Exception as error:
        return f"not known: {error!r}"


def _pulls(puller: Any) -> dict[str, int]:
    """Return how many shards are being pulled, and how many bytes."""
    return {"under way": puller.under_way, "bytes": puller.nbytes}


def _shards(exchange: Any) -> dict[str, dict[str, int]]:
    """Count the shards that were offered, by producer and by where they are."""
    return {
        f"{producer.address} ({producer.incarnation})": dict(
            Counter(incoming.state.name for incoming in incoming_shards)
        )
        for producer, incoming_shards in list(exchange._incoming.items())
        if incoming_shards
    }


def _published(pools: Any) -> dict[str, dict[str, Any]]:
    """Count the shards that owners may still read, and the producers that wait for room, by pool."""
    return {
        kind: {
            "by owner": dict(Counter(chain.from_iterable(map(_readers, list(outbox._entries.values()))))),
            "producers that wait": outbox.waiting,
            "used": outbox.pool.used,
        }
        for kind, outbox in list(pools._outboxes.items())
    }


def _readers(entry: Any) -> set[str]:
    return set(entry.readers.values())
