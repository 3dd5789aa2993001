"""Describe the queues of a worker's runtime, to diagnose a hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from dask_gpurt.observe.waiting import queued


def waiting(plugin: Any) -> dict[str, Any]:
    """Return the queues of each part of a worker's runtime, as plain values. On its event loop.

    Parameters
    ----------
    plugin
        The :class:`~dask_gpurt.plugins.worker.GpurtWorkerPlugin`; its setup may be incomplete.
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
    # A part that is not set up yet, or closed already, must not hide the other parts.
    except Exception as error:
        return f"unknown: {error!r}"


def _pulls(puller: Any) -> dict[str, int]:
    """Return the shards and bytes that are being pulled."""
    return {"under way": puller.under_way, "bytes": puller.nbytes}


def _shards(exchange: Any) -> dict[str, dict[str, int]]:
    """Count the offered shards by producer and state."""
    return {
        f"{producer.address} ({producer.incarnation})": dict(
            Counter(incoming.state.name for incoming in incoming_shards)
        )
        for producer, incoming_shards in list(exchange._incoming.items())
        if incoming_shards
    }


def _published(pools: Any) -> dict[str, dict[str, Any]]:
    """Count the shards that owners may still read, and the producers that wait for memory, by pool."""
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
