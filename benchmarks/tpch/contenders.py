"""Start the contenders: clusters with the runtime on, and Dask as shipped with its shuffle methods."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client

import dask_gpurt
from dask_gpurt.cli.cluster import local_cluster

from ..common.budget import TaskLog
from .gpu import Utilisation, wait_until_idle

GPURT, TASKS, P2P, CUDF_POLARS = "gpurt", "tasks", "p2p", "cudf-polars"
#: The runtime with the plans of Dask, in which each operation of a query is a task of its own. Run it and the
#: runtime as it is one after the other: a client keeps what it plans with until another is the current one.
PLANNED_BY_DASK = "gpurt-dask-plans"
#: The runtime without tasks of a worker that read beside the one that computes.
READS_FIRST = "gpurt-reads-first"
#: The runtime with tables in as many partitions as Dask reads them in.
UNSIZED = "gpurt-unsized"
#: The runtime as ``--preload dask_gpurt`` on the servers switches it on: the client has no setting.
FLAG = "gpurt-flag"
#: The runtime with an interposer, which caps kernels if it is told to.
CAPPED = "gpurt-capped"
#: The runtime with the driver's pool for memory of GPUs in place of rmm's.
DRIVER_POOL = "gpurt-driver-pool"
CONTENDERS = (
    *(GPURT, FLAG, PLANNED_BY_DASK, READS_FIRST, UNSIZED, CAPPED, DRIVER_POOL),
    *(TASKS, P2P, CUDF_POLARS),
)

#: As in the file that `pip install` puts into Dask's configuration.
PRELOAD = "dask_gpurt.preload"
#: The settings of contenders that run the runtime with non-default settings.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    FLAG: {
        "gpurt.enabled": True,
        "distributed.scheduler.preload": [PRELOAD],
        "distributed.nanny.preload": [PRELOAD],
    },
    CAPPED: {
        "gpurt.enabled": True,
        "gpurt.overlap.mode": 8,
        "distributed.nanny.preload": [PRELOAD],
    },
    DRIVER_POOL: {},
    PLANNED_BY_DASK: {"gpurt.planning.optimise": False},
    READS_FIRST: {"gpurt.reads.beside": 0},
    UNSIZED: {"gpurt.planning.partition-size": 0, "gpurt.planning.broadcast-size": 0},
}
#: Those that a client reads for each computation.
READ_EACH_TIME = (UNSIZED,)
WITH_RUNTIME = (GPURT, *SETTINGS)


@dataclass(frozen=True)
class ClusterOptions:
    """Hold the options that all clusters share."""

    backend: str
    workers: int
    threads: int
    protocol: str | None
    rmm_pool_size: str | float | None

    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a contender."""
        return SETTINGS.get(name, {})


@dataclass(frozen=True)
class Contender:
    """A client with a shuffle method."""

    name: str
    client: Client
    on_gpu: bool

    @property
    def has_runtime(self) -> bool:
        """Whether the runtime is on."""
        return self.name in WITH_RUNTIME

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Make this client and its shuffle method current."""
        # With the runtime on, a user sets nothing.
        chosen: dict[str, Any] = {"dataframe.shuffle.method": None if self.has_runtime else self.name}
        if self.name in READ_EACH_TIME:
            chosen |= SETTINGS[self.name]
        with self.client.as_current(), dask.config.set(chosen):
            yield


def clusters_of(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Group contenders by cluster: ``tasks`` and ``p2p`` share one."""
    plain = tuple(name for name in names if name in (TASKS, P2P))
    alone = [(name,) for name in WITH_RUNTIME if name in names]
    return [each for each in [*alone, plain] if each]


@contextmanager
def connected(cluster: Any, name: str) -> Iterator[Any]:
    """Connect a client to the cluster of a contender, or its address, and switch the runtime on for it."""
    with dask.config.set({"distributed.client.preload": [PRELOAD]}):
        client: Any = Client(cluster, set_as_default=False)
    with client:
        if name in WITH_RUNTIME and name != FLAG:
            dask_gpurt.enable(client)
        yield client


@contextmanager
def start(options: ClusterOptions, groups: Sequence[Sequence[str]]) -> Iterator[list[Contender]]:
    """Start a cluster for each group of contenders, all at the same time."""
    if options.backend == "cudf":
        importlib.import_module("dask_cudf")  # as a user's program would
        wait_until_idle()
    with ExitStack() as stack:
        found: list[Contender] = []
        for names in groups:
            with dask.config.set(options.settings(names[0])):
                cluster = stack.enter_context(
                    local_cluster(
                        options.backend,
                        options.workers,
                        options.protocol,
                        None if names[0] == DRIVER_POOL else options.rmm_pool_size,
                        threads=options.threads,
                        rmm_async=names[0] == DRIVER_POOL,
                    )
                )
                if names[0] != FLAG:
                    client = stack.enter_context(connected(cluster, names[0]))
            if names[0] == FLAG:  # without the settings of the servers
                client = stack.enter_context(connected(cluster, FLAG))
            client.wait_for_workers(options.workers)
            client.register_plugin(TaskLog(), name=TaskLog.name)
            if options.backend == "cudf":
                client.register_plugin(Utilisation(), name=Utilisation.name)
            found += [Contender(name, client, options.backend == "cudf") for name in names]
        yield found
