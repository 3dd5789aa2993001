"""Bytes that have changed their worker."""

from __future__ import annotations

from typing import Any

from distributed import Client

from dask_gpurt.cli.demo import exchange_bytes


def moved(client: Client) -> int:
    """Return the bytes that workers have got from others until now: inputs of tasks, and shards."""
    shards = sum(nbytes for path, nbytes in exchange_bytes(client).items() if path != "local")
    return sum(client.run(fetched).values()) + shards


def fetched(dask_worker: Any) -> int:
    """Return the bytes of inputs that a worker has got from others."""
    return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)
