"""Start the cluster of chaos: every other worker keeps its address when it is replaced."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import Any

import dask
import psutil
from distributed import Client, LocalCluster
from distributed.core import Status

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.expr import find_in_one_step
from dask_gpurt.dask_hooks.properties import drop_class_lock
from dask_gpurt.dask_hooks.scheduler import start_missing_workers

logger = logging.getLogger(__name__)

#: Seconds for a cluster to come back to its size, and to end.
PATIENCE_S = 60
#: Dask's 30 s would be spent on each connection to a worker that was just killed.
CONNECT = "10s"
#: Dask's cluster closes the nanny of a worker that has been away for 15 s, while it starts another process: a
#: busy machine may take longer for that. The worker would never come back.
LOST_WORKER = "1h"
#: For workers and nannies that keep their address.
PORTS = range(15_000, 32_000)


def keeps_address(name: Any) -> bool:
    """Return whether the process that replaces this worker of ours gets the same address."""
    return int(name) % 2 == 0


def _with_fixed_ports(kind: type) -> type:
    """Derive a cluster whose new workers and nannies have fixed ports, every other one of them."""

    class FixedPorts(kind):  # type: ignore[misc]
        def new_worker_spec(self) -> dict[Any, dict[str, Any]]:
            specs: dict[Any, dict[str, Any]] = super().new_worker_spec()
            return {name: self._fixed(name, spec) for name, spec in specs.items()}

        def _fixed(self, name: Any, spec: dict[str, Any]) -> dict[str, Any]:
            if not keeps_address(name):
                return spec
            worker, nanny = _free_ports(2)
            return {**spec, "options": {**spec["options"], "worker_port": worker, "port": nanny}}

    return FixedPorts


def _free_ports(count: int) -> list[int]:
    """Find ports below those that the system gives to connections, which would take one that is free."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


@contextlib.contextmanager
def start_cluster(backend: str, workers: int, protocol: str | None) -> Iterator[tuple[Client, Any, str]]:
    """Start a cluster on this machine; yields a client, the cluster, and the directory of its workers."""
    # For good: several threads build sorts, which compute, also while the runtime is off.
    drop_class_lock(PatchSet())
    find_in_one_step()
    # A worker that takes the place of a killed one binds its port while connections of that one linger.
    os.environ.setdefault("UCX_TCP_CM_REUSEADDR", "y")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with tempfile.TemporaryDirectory(prefix="gpurt-chaos-", ignore_cleanup_errors=True) as directory:
        options: dict[str, Any] = {
            "threads_per_worker": 1,
            "protocol": protocol,
            "local_directory": directory,
            "dashboard_address": None,
            "scheduler_kwargs": {"dashboard_address": ":0"},
        }
        settings = {
            "distributed.comm.timeouts.connect": CONNECT,
            "distributed.deploy.lost-worker-timeout": LOST_WORKER,
        }
        with dask.config.set(settings):
            if backend == "cudf":
                kind = importlib.import_module("dask_cuda").LocalCUDACluster
                cluster = _with_fixed_ports(kind)(n_workers=workers, **options)
            else:
                # Only workers that LocalCluster is scaled to ask for a specification of their own.
                kind = _with_fixed_ports(LocalCluster)
                memory = psutil.virtual_memory().total // workers
                cluster = kind(n_workers=0, memory_limit=memory, silence_logs=logging.CRITICAL, **options)
                cluster.scale(workers)
            client = Client(cluster)
            try:
                client.wait_for_workers(workers, timeout=PATIENCE_S)
                yield client, cluster, directory
            finally:
                with contextlib.suppress(OSError, TimeoutError):
                    client.close(timeout=PATIENCE_S)
                with contextlib.suppress(OSError, TimeoutError):
                    cluster.close(timeout=PATIENCE_S)
                _end_children(before)


def restart_given_up(cluster: Any) -> int:
    """Start workers anew whose nannies have closed: they give up when a process can not start.

    Returns how many these are.
    """
    ended = (Status.closed, Status.failed)
    given_up = [
        name
        for name, nanny in list(cluster.workers.items())
        if name in cluster.worker_spec and nanny.status in ended
    ]
    if not given_up:
        return 0
    for name in given_up:
        logger.warning("the nanny of worker %s has given up and is replaced", name)
        cluster.workers.pop(name, None)
    try:
        start_missing_workers(cluster)
    except Exception as error:  # whatever a worker can not start with; it is tried again
        logger.warning("a worker could not be started: %r", error)
    return len(given_up)


class NannyLog(logging.Handler):
    """Keep the last lines that nannies have logged: they are in this process, and say why one gives up."""

    NAMES = ("distributed.nanny", __name__)

    def __init__(self, most: int = 100):
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=most)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        for name in self.NAMES:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def close(self) -> None:
        for name in self.NAMES:
            logging.getLogger(name).removeHandler(self)
        super().close()


def _end_children(before: set[int]) -> None:
    """End what the cluster has left: it may hang in its end where it was damaged."""
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before and "resource_tracker" not in " ".join(child.cmdline()):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
