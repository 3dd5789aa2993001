"""Start a cluster on this machine, or connect to one that runs."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import click
import dask
from distributed import Client, LocalCluster
from distributed.deploy.cluster import Cluster
from distributed.diagnostics import nvml


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


def connected(address: str) -> Client:
    """Connect to a cluster, and leave it as it is.

    Parameters
    ----------
    address
        The scheduler's address.

    Raises
    ------
    click.ClickException
        When no scheduler answers.
    """
    # The preload hook of a client would switch the runtime on, and so change the cluster.
    with dask.config.set({"distributed.client.preload": []}):
        try:
            return Client(address, set_as_default=False)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"no scheduler answers at {address}: {error}") from error
