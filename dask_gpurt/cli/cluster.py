"""Start a cluster on this machine, or connect to one that runs."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import click
import dask
from distributed import Client, LocalCluster
from distributed.comm.addressing import parse_address, parse_host_port
from distributed.core import rpc
from distributed.deploy.cluster import Cluster
from distributed.diagnostics import nvml
from distributed.security import Security

#: Seconds for a scheduler to answer, and for the end of a connection to it.
CONNECT_TIMEOUT_S, CLOSE_TIMEOUT_S = 6.0, 2.0


def choose_backend(backend: str) -> str:
    """Resolve ``auto``: cudf where there are GPUs and the packages for them, else pandas."""
    missing = [name for name in ("dask_cudf", "dask_cuda") if importlib.util.find_spec(name) is None]
    if backend == "auto":
        return "pandas" if missing or not visible_gpus() else "cudf"
    if backend == "cudf" and missing:
        raise click.UsageError(
            f"--backend cudf needs {' and '.join(missing)}: pip install 'dask-gpurt[cuda13]' (or [cuda12])"
        )
    return backend


def visible_gpus() -> int:
    """Count the GPUs for a cluster started by this process: all, or those in ``CUDA_VISIBLE_DEVICES``."""
    there: int = nvml.device_get_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not there:
        return there
    # One GPU may be named in several parts (MIG), so the names count.
    return sum(name.strip() not in ("", "-1") for name in named.split(","))


def default_workers(backend: str) -> int:
    """Return the default number of workers: two, or one per GPU."""
    return visible_gpus() if backend == "cudf" else 2


@contextmanager
def local_cluster(
    backend: str,
    workers: int,
    protocol: str | None = None,
    rmm_pool_size: str | float | None = 0.5,
    *,
    threads: int = 1,
) -> Iterator[Cluster]:
    """Start a cluster on this machine on which ``p2p`` stays as Dask ships it.

    Parameters
    ----------
    backend
        ``pandas`` for processes on the host, ``cudf`` for one process per GPU.
    workers
        How many worker processes.
    protocol
        Protocol of the cluster; Dask's default when not given.
    rmm_pool_size
        Size of the RMM pool of each GPU worker, in bytes, as text, or as a share of the device.
    threads
        Threads for tasks of each worker.

    Yields
    ------
    Cluster
        The running cluster.
    """
    # Otherwise the runtime would take p2p shuffles over, and a comparison would time it against itself.
    with dask.config.set({"gpurt.takeover": False, "dataframe.backend": backend}):
        common = {
            "n_workers": workers,
            "threads_per_worker": threads,
            "protocol": protocol,
            "dashboard_address": None,
            # Any free port will do for the scheduler's HTTP server; its default may be taken.
            "scheduler_kwargs": {"dashboard_address": ":0"},
        }
        if backend == "cudf":
            cluster_class = importlib.import_module("dask_cuda").LocalCUDACluster
            cluster = cluster_class(rmm_pool_size=rmm_pool_size, **common)
        else:
            cluster = LocalCluster(processes=True, silence_logs=logging.ERROR, **common)
        with cluster:
            yield cluster


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Connect to a cluster, and leave it as it is.

    Parameters
    ----------
    address
        The scheduler's address.

    Yields
    ------
    Client
        It is not the default one of this process.

    Raises
    ------
    click.ClickException
        When no scheduler can be there, or none answers within :data:`CONNECT_TIMEOUT_S`.
    """
    _refuse_without_port(address)
    try:
        asyncio.run(_try_out(address))
    except TimeoutError as error:
        reason = f"no answer within {CONNECT_TIMEOUT_S:g} s"
        raise click.ClickException(f"no scheduler answers at {address}: {reason}") from error
    except MemoryError as error:  # the first bytes of an answer in HTTP, read as a length
        raise click.ClickException(f"no scheduler answers at {address}, but another server") from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"no scheduler answers at {address}: {error}") from error
    # The preload hook of a client would switch the runtime on, and so change the cluster.
    with dask.config.set({"distributed.client.preload": []}):
        client = Client(address, set_as_default=False)
    try:
        yield client
    finally:
        client.close(timeout=CLOSE_TIMEOUT_S)


def _refuse_without_port(address: str) -> None:
    """Refuse what Dask would try to connect to for ever."""
    scheme, place = parse_address(address)
    if scheme == "inproc":
        raise click.ClickException(
            f"{address} can be reached only from within the scheduler's own process: call "
            "dask_gpurt.report(client) there, or start the cluster with processes=True"
        )
    try:
        parse_host_port(place)
    except ValueError as error:
        raise click.ClickException(
            f"{address} is no address of a scheduler, expected tcp://HOST:PORT"
        ) from error


async def _try_out(address: str) -> None:
    """Make sure that a scheduler answers: another server may take the connection and say nothing."""
    arguments = Security().get_connection_args("client")
    async with asyncio.timeout(CONNECT_TIMEOUT_S), rpc(address, connection_args=arguments) as scheduler:
        await scheduler.identity(n_workers=0)
