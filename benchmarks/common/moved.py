"""Count bytes transferred between workers."""

from __future__ import annotations

from typing import Any

from distributed import Client

from dask_gpurt.tools.demo.command import exchange_bytes


def moved(client: Client) -> int:
    """Return the bytes that workers have received so far: inputs of tasks, and shards."""
    shards = sum(nbytes for path, nbytes in exchange_bytes(client).items() if path != "local")
    return sum(client.run(fetched).values()) + shards


def fetched(dask_worker: Any) -> int:
    """Return the bytes of task inputs that a worker has fetched."""
    return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)
