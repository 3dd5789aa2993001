"""Start real clusters for tests, and pick between the two dataframe libraries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait
from distributed.utils import get_mp_context

import dask_gpurt
from dask_gpurt.observe import Fallback
from tests.helpers import caps
from tests.helpers.gpus import cuda_devices
from tests.helpers.instruments import Instruments

#: Whether all tests' workers check for memory that changes hands too early.
CHECK = os.environ.get("GPURT_TEST_HANDOVERS") == "1"
#: One allocation in this many fails, in runs of the tests with injected failures; 0 for none.
FAILURES = int(os.environ.get("GPURT_TEST_FAILURES", 0))
#: Configuration key of the method by which Dask starts worker processes.
METHOD = "distributed.worker.multiprocessing-method"
QUICK = {
    "distributed.comm.timeouts.connect": "5s",
    "distributed.scheduler.allowed-failures": 20,
    # As in Dask's own tests, workers are forked from a process that has imported these modules. Not on hosts
    # with GPUs: workers get theirs by an environment variable, which a fork reads no more.
    METHOD: "spawn" if cuda_devices() else "forkserver",
    **caps.SETTINGS,
}
if FAILURES:
    # An output allocates for each of its shards. One of thousands would fail all of the usual tries.
    QUICK["gpurt.memory.retries"] = 8


def fork_with_imports() -> None:
    """Have all workers forked from a process that has imported their modules: :mod:`tests.helpers.forked`."""
    dask.config.set({METHOD: QUICK[METHOD]})
    if QUICK[METHOD] == "forkserver":
        get_mp_context().set_forkserver_preload(["tests.helpers.forked"])


@contextlib.contextmanager
def cluster(
    backend: str = "pandas",
    workers: int = 2,
    *,
    threads: int = 1,
    memory_limit: str = "auto",
    failures: int = FAILURES,
    handovers: bool = CHECK,
    here: bool = False,
    **settings: Any,
) -> Iterator[Client]:
    """Run a cluster with the runtime enabled; ``settings`` are keys under ``gpurt``.

    ``here``: whether workers are threads of this process, which is faster, instead of processes.
    """
    # A process that has used CUDA cannot be forked.
    method = {METHOD: "spawn"} if backend == "cudf" else {}
    with (
        dask.config.set({**QUICK, **method, **nested(settings)}),
        processes(backend, workers, threads, memory_limit, here=here) as local,
        enabled(local, workers, failures=failures, handovers=handovers) as client,
    ):
        yield client


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as keys of Dask's configuration under ``gpurt``."""
    return {f"gpurt.{name.replace('__', '.')}": value for name, value in settings.items()}


@contextlib.contextmanager
def enabled(local: Any, workers: int, *, failures: int = 0, handovers: bool = False) -> Iterator[Client]:
    """Enable the runtime for a client of a cluster of ``workers`` workers."""
    with Client(local) as client:
        instrument(client, failures=failures, handovers=handovers)
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            # Dask's LocalCluster hangs if it is closed while a nanny restarts a worker.
            with contextlib.suppress(OSError, TimeoutError):
                client.wait_for_workers(workers, timeout=30)
            with contextlib.suppress(OSError, TimeoutError):
                caps.count(client)
                too_early = told_too_early(client) if CHECK else []
                dask_gpurt.disable(client)
                assert not too_early, too_early


def instrument(client: Client, *, failures: int = FAILURES, handovers: bool = CHECK) -> None:
    """Inject allocation failures and checks of handovers on workers, before the runtime is enabled."""
    if failures or handovers:
        client.register_plugin(Instruments(failures, handovers=handovers))


def told_too_early(client: Client) -> list[Any]:
    """Return the workers' reports of memory that changed hands too early."""
    workers = dask_gpurt.report(client)["workers"].values()
    early = Fallback.OVERLAP_HANDED_OVER_EARLY.id
    return [worker["fallbacks"][early] for worker in workers if early in worker.get("fallbacks", ())]


def processes(
    backend: str = "pandas",
    workers: int = 2,
    threads: int = 1,
    memory_limit: str = "auto",
    *,
    here: bool = False,
) -> Any:
    """Start a cluster of processes, or of threads of this process, without the runtime."""
    options: dict[str, Any] = {
        "n_workers": workers,
        "threads_per_worker": threads,
        "memory_limit": memory_limit,
        "dashboard_address": ":0",
    }
    if backend == "cudf":
        from tests.helpers.gpus import cuda_devices

        if cuda_devices() >= workers:
            from dask_cuda import LocalCUDACluster

            return LocalCUDACluster(protocol=os.environ.get("GPURT_TEST_PROTOCOL", "tcp"), **options)
    return LocalCluster(processes=not here, protocol="tcp", **options)


@dataclass
class Library:
    """Build and compare collections of pandas or cudf."""

    name: str

    def frame(self, frame: pd.DataFrame) -> Any:
        if self.name == "pandas":
            return frame
        import cudf

        return cudf.from_pandas(frame)

    def collection(self, parts: list[pd.DataFrame]) -> Any:
        """Return a collection with these partitions, in the workers' memory."""
        return self.lazy(parts).persist()

    def lazy(self, parts: list[pd.DataFrame]) -> Any:
        """Return a collection with these partitions that workers and this process can compute."""
        frames = [dask.delayed(self.frame)(part) for part in parts]
        return dd.from_delayed(frames, meta=self.frame(parts[0].iloc[:0]), verify_meta=False)


def by_tasks(build: Callable[..., Any], *collections: Any) -> list[pd.DataFrame]:
    """Return the partitions that Dask's ``tasks`` method makes of collections that are not on workers.

    They are computed in this process, since a cluster would take longer than the computation under test.
    """
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        return partitions(build(*collections))


def partitions(collection: Any) -> list[pd.DataFrame]:
    """Return the partitions of a collection as pandas frames."""
    done = collection.persist()
    wait(done)
    frames = dask.compute(*(dask.delayed(to_pandas)(part) for part in done.to_delayed()))
    return list(frames)


def to_pandas(frame: Any) -> Any:
    return frame.to_pandas() if hasattr(frame, "to_pandas") else frame


def canonical(frame: Any, *, index: bool = True) -> Any:
    """Sort rows, so that their order does not depend on arrival."""
    table = frame.to_frame("value") if frame.ndim == 1 else frame
    named = table.reset_index(drop=not index)
    return named.iloc[_order(named)].reset_index(drop=True)


def _order(named: pd.DataFrame) -> Any:
    columns = [column.to_numpy() for _, column in named.items()]
    if columns and all(column.dtype.kind in "biufmM" for column in columns):
        return np.lexsort(columns)
    rows = [repr(row) for row in named.itertuples(index=False, name=None)]
    return sorted(range(len(rows)), key=rows.__getitem__)


def assert_same_partitions(ours: list[Any], theirs: list[Any], *, in_order: bool, index: bool = True) -> None:
    """Compare partition by partition, in any order of rows; without ``index``, ignore the index."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if not in_order:
            mine, other = canonical(mine, index=index), canonical(other, index=index)
        if not len(mine) and not len(other):
            assert list(getattr(mine, "columns", ())) == list(getattr(other, "columns", ()))
            continue
        compare = pd.testing.assert_series_equal if mine.ndim == 1 else pd.testing.assert_frame_equal
        compare(mine, other, check_categorical=False, check_exact=True)


def counters(client: Client) -> dict[str, float]:
    """Return the runtime's counters, summed over the cluster."""
    return dict(dask_gpurt.report(client)["counters"])
