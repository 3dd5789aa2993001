"""Start a cluster on this machine, or connect to a running one."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

import click
import dask
from distributed import Client, LocalCluster
from distributed.deploy.cluster import Cluster

from dask_gpurt.client.addresses import require_scheduler
from dask_gpurt.device.discover import gpu_count

#: Timeout for closing a connection to a scheduler, in seconds.
CLOSE_TIMEOUT_S = 2.0

#: The option of commands that start a cluster, named as that of ``dask cuda worker``.
rmm_pool_option = click.option(
    "--rmm-pool-size",
    default="0.5",
    show_default=True,
    help="RMM pool of each GPU worker of a local cluster: a size such as 4GiB, or a share of the GPU.",
)


def choose_backend(backend: str) -> str:
    """Resolve ``auto``: cudf if there are GPUs and the packages for them, else pandas."""
    missing = [name for name in ("dask_cudf", "dask_cuda") if importlib.util.find_spec(name) is None]
    if backend == "auto":
        return "pandas" if missing or not gpu_count() else "cudf"
    if backend == "cudf" and missing:
        raise click.UsageError(
            f"--backend cudf needs {' and '.join(missing)}: pip install 'dask-gpurt[cuda13]' (or [cuda12])"
        )
    return backend


def default_workers(backend: str) -> int:
    """Return the default number of workers: two, or one per GPU."""
    return gpu_count() if backend == "cudf" else 2


@contextmanager
def local_cluster(
    backend: str,
    workers: int,
    protocol: str | None = None,
    rmm_pool_size: str | float | None = 0.5,
    *,
    threads: int = 1,
    rmm_async: bool = False,
) -> Iterator[Cluster]:
    """Start a cluster on this machine, without a takeover of Dask's own ``p2p``.

    ``backend``: ``pandas`` for processes on the host, ``cudf`` for one process per GPU.
    ``protocol``: protocol of the cluster; by default Dask's default.
    ``rmm_pool_size``: size of the RMM pool of each GPU worker, in bytes, as text, or as a fraction of the
    device.
    ``threads``: task threads per worker.
    ``rmm_async``: whether memory of GPUs comes from the driver's pool; then ``rmm_pool_size`` is None.
    Yields the running cluster.
    Raises click.ClickException if not all workers start.
    """
    # Otherwise the runtime would take over p2p shuffles, and a comparison would time it against itself.
    with dask.config.set({"gpurt.takeover": False, "dataframe.backend": backend}):
        common = {
            "n_workers": workers,
            "threads_per_worker": threads,
            "protocol": protocol,
            "dashboard_address": None,
            # Use any free port for the scheduler's HTTP server; the default may be in use.
            "scheduler_kwargs": {"dashboard_address": ":0"},
        }
        with _without_interrupts():
            if backend == "cudf":
                cluster_class = importlib.import_module("dask_cuda").LocalCUDACluster
                cluster = cluster_class(rmm_pool_size=rmm_pool_size, rmm_async=rmm_async, **common)
            else:
                cluster = LocalCluster(processes=True, silence_logs=logging.ERROR, **common)
        with cluster, _silent_once_interrupted():
            _require_workers(cluster, workers)
            yield cluster


def _require_workers(cluster: LocalCluster, count: int) -> None:
    """Raise ClickException unless all workers of a new cluster have started.

    dask-cuda starts its workers twice: first in a callback, whose errors are only logged, and again for the
    caller, who finds nothing left to start. So a cluster may have fewer workers than asked for.
    """
    assert cluster.scheduler is not None
    started = len(cluster.scheduler.workers)
    if started < count:
        raise click.ClickException(
            f"only {started} of {count} workers started, see their messages above. If it was for lack of "
            "memory: other programs on a GPU may have taken that of the worker's RMM pool (`nvidia-smi` "
            "shows them); a smaller `--rmm-pool-size` may fit"
        )


@contextmanager
def _silent_once_interrupted() -> Iterator[None]:
    """Log nothing from ctrl-C on: the command ends with one line of its own.

    Closing the client and the cluster breaks off what they do at the moment, such as gathering a result or
    switching the runtime on, and Dask would log each task and each connection of it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # another handler takes ctrl-C, or it is ignored
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        logging.disable()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep ctrl-C from all threads and processes that are started meanwhile, and from those that they start.

    The terminal sends it to the whole process group. The cluster's event loop starts the workers, also later
    ones, and they inherit its mask: they end when this process closes the cluster, instead of each on its own
    with a traceback. For this thread a ctrl-C is only delayed.
    """
    # Otherwise the thread that starts the first worker would start it, which unblocks the signal there.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Connect to a cluster without changing it.

    Yields the client.
    Raises click.ClickException if the address is invalid, or no scheduler answers in time.
    """
    try:
        require_scheduler(address)
    except (ValueError, ConnectionError) as error:
        raise click.ClickException(str(error)) from error
    # A client's preload hook would switch the runtime on, which changes the cluster.
    with dask.config.set({"distributed.client.preload": []}):
        client = Client(address, set_as_default=False)
    try:
        yield client
    finally:
        client.close(timeout=CLOSE_TIMEOUT_S)
