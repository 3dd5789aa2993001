"""Start the cluster for chaos, in which every other worker keeps its address when it is restarted."""

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
from distributed import Client, LocalCluster, SpecCluster
from distributed.core import Status

from dask_gpurt.dask_hooks.expression_threads import sharing_expressions

logger = logging.getLogger(__name__)

#: Timeout for a cluster to recover its size, and to close, in seconds.
PATIENCE_S = 60
#: Shorter than Dask's 30 s, which would be spent on each connection to a worker that was just killed.
CONNECT = "10s"
#: After 15 s without a worker, Dask's cluster closes its nanny, although the nanny may still be starting
#: another process on a busy machine. The worker would never come back.
LOST_WORKER = "1h"
#: Ports for workers and nannies that keep their address.
PORTS = range(15_000, 32_000)


def keeps_address(name: Any) -> bool:
    """Return whether a restart of this worker keeps its address."""
    return int(name) % 2 == 0


def _with_fixed_ports(kind: type) -> type:
    """Derive a cluster class in which every other worker and its nanny have fixed ports."""

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
    """Find free ports below the ephemeral range, from which the system would assign them to connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


@contextlib.contextmanager
def start_cluster(
    backend: str, workers: int, protocol: str | None, threads: int = 1
) -> Iterator[tuple[Client, Any, str]]:
    """Start a cluster on this machine; yield a client, the cluster, and the directory of its workers."""
    # A restarted worker binds its port while connections of the killed process still linger.
    os.environ.setdefault("UCX_TCP_CM_REUSEADDR", "y")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with tempfile.TemporaryDirectory(prefix="gpurt-chaos-", ignore_cleanup_errors=True) as directory:
        options: dict[str, Any] = {
            "threads_per_worker": threads,
            "protocol": protocol,
            "local_directory": directory,
            "dashboard_address": None,
            "scheduler_kwargs": {"dashboard_address": ":0"},
        }
        settings = {
            "distributed.comm.timeouts.connect": CONNECT,
            "distributed.deploy.lost-worker-timeout": LOST_WORKER,
        }
        # Several threads build sorts, which compute, even while the runtime is off.
        with dask.config.set(settings), sharing_expressions():
            if backend == "cudf":
                kind = importlib.import_module("dask_cuda").LocalCUDACluster
                cluster = _with_fixed_ports(kind)(n_workers=workers, **options)
            else:
                # LocalCluster calls new_worker_spec only for workers that are added by scaling.
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


def restart_given_up(cluster: SpecCluster) -> int:
    """Replace workers whose nannies have closed, as they do when a process fails to start.

    Returns the number of replaced workers.
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
        logger.warning("the nanny of worker %s has failed and is replaced", name)
        cluster.workers.pop(name, None)
    try:
        cluster.sync(cluster._correct_state)
    except Exception as error:  # starting a worker may raise anything; the caller tries again
        logger.warning("a worker could not be started: %r", error)
    return len(given_up)


class NannyLog(logging.Handler):
    """Keep the last log lines of nannies, which run in this process and log why they fail."""

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
    """Kill the remaining processes of the cluster: a damaged cluster may hang when it closes."""
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before and "resource_tracker" not in " ".join(child.cmdline()):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
