"""Run a cluster for each kind of contender, and measure the load of its workers."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import click
import dask
from distributed import Client, LocalCluster

import dask_gpurt
from benchmarks.common.peaks import PeakMemory
from dask_gpurt.config import KEYS

OURS, UNBALANCED = "gpurt", "gpurt-unbalanced"
#: The runtime; the runtime with fixed owners of outputs; and Dask's own methods, on a cluster where the
#: runtime was never on.
CONTENDERS = (OURS, UNBALANCED, "tasks", "p2p")
BALANCE = "gpurt.shuffle.balance"


@dataclass(frozen=True)
class Plan:
    """Describe a cluster.

    Parameters
    ----------
    workers, threads
        Processes, and task threads of each.
    backend
        ``pandas`` or ``cudf``.
    memory_limit
        Bytes of host memory of each worker.
    protocol
        Protocol of the cluster; None for Dask's default.
    rmm_pool_size
        Initial size of a worker's pool, as a share of the GPU or in bytes; None for no pool.
    """

    workers: int
    threads: int
    backend: str
    memory_limit: int
    protocol: str | None = None
    rmm_pool_size: float | str | None = None


def require(contenders: Sequence[str]) -> None:
    """Raise for contenders that this version does not support.

    Raises
    ------
    click.UsageError
        If owners cannot be kept from moving.
    """
    if UNBALANCED in contenders and BALANCE not in KEYS:
        raise click.UsageError(f"{UNBALANCED} needs the setting {BALANCE}, which this version does not have")


@contextmanager
def clusters(plan: Plan, contenders: Sequence[str]) -> Iterator[dict[str, Client]]:
    """Yield a client for each contender; Dask's contenders share a cluster."""
    with ExitStack() as stack:
        made: dict[str, Client] = {}
        for contender in contenders:
            kind = contender if contender in (OURS, UNBALANCED) else "dask"
            if kind not in made:
                made[kind] = stack.enter_context(_cluster(plan, kind))
        yield {each: made.get(each) or made["dask"] for each in contenders}


@contextmanager
def _cluster(plan: Plan, kind: str) -> Iterator[Client]:
    settings = {BALANCE: False} if kind == UNBALANCED else {}
    with (
        dask.config.set({"dataframe.backend": plan.backend, **settings}),
        _local(plan) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        if kind != "dask":
            dask_gpurt.enable(client)
        client.register_plugin(PeakMemory())
        yield client


def _local(plan: Plan) -> Any:
    options: dict[str, Any] = {
        "n_workers": plan.workers,
        "threads_per_worker": plan.threads,
        "memory_limit": plan.memory_limit,
        "protocol": plan.protocol,
        "dashboard_address": ":0",
    }
    if plan.backend == "pandas":
        return LocalCluster(processes=True, silence_logs=logging.ERROR, **options)
    return importlib.import_module("dask_cuda").LocalCUDACluster(rmm_pool_size=plan.rmm_pool_size, **options)


def shuffle_method(contender: str) -> str:
    """Return the name of a contender's shuffle method for Dask."""
    return OURS if contender == UNBALANCED else contender


def processor_seconds(client: Client) -> dict[str, float]:
    """Return the CPU seconds of each worker so far."""
    found: dict[str, float] = client.run(time.process_time)
    return found


def peaks(client: Client) -> dict[str, dict[str, int]]:
    """Return the peak bytes of each worker by tier since the last call, its resident memory as ``host``."""
    found: dict[str, dict[str, int]] = client.run(_take_peaks)
    return found


def _take_peaks(dask_worker: Any) -> Any:
    return dask_worker.plugins[PeakMemory.name].take()


def outputs_moved(client: Client) -> int:
    """Return the number of outputs moved to other owners so far, once their sizes were known."""
    found: int = client.run_on_scheduler(_outputs_moved)
    return found


def _outputs_moved(dask_scheduler: Any) -> int:
    runtime = dask_scheduler.extensions.get("gpurt")
    counters = runtime.metrics.snapshot()["counters"] if runtime is not None else {}
    return int(counters.get("shuffle.outputs.moved", 0))
