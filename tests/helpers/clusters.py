"""Real clusters for the tests, and the two libraries that partitions may belong to."""

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
from dask_gpurt.testing import Instruments
from tests.helpers import caps
from tests.helpers.gpus import cuda_devices

#: Whether the workers of all tests check memory that changes hands, which none of them may do too early.
CHECK = os.environ.get("GPURT_TEST_HANDOVERS") == "1"
#: One of so many allocations fails, in a run of the tests that is about that.
FAILURES = int(os.environ.get("GPURT_TEST_FAILURES", 0))
#: The way in which Dask starts the processes of workers.
METHOD = "distributed.worker.multiprocessing-method"
#: Modules that each worker of a test imports, which take it most of the time until it is there.
IMPORTED = ["distributed", "dask.dataframe", "dask_gpurt.plugins.worker", "dask_gpurt.shuffle.spec"]
QUICK = {
    "distributed.comm.timeouts.connect": "5s",
    "distributed.scheduler.allowed-failures": 20,
    # As in Dask's own tests: workers are forked from a process that has done its imports. Not where there are
    # GPUs: these are hidden from workers on the host by their environment, which a fork does not look at.
    METHOD: "spawn" if cuda_devices() else "forkserver",
    **caps.SETTINGS,
}


def fork_with_imports() -> None:
    """Have workers forked, whoever starts them, from a process that has imported all that they need."""
    dask.config.set({METHOD: QUICK[METHOD]})
    if QUICK[METHOD] == "forkserver":
        get_mp_context().set_forkserver_preload(IMPORTED)


@contextlib.contextmanager
def cluster(
    backend: str = "pandas",
    workers: int = 2,
    *,
    threads: int = 1,
    memory_limit: str = "auto",
    failures: int = FAILURES,
    handovers: bool = CHECK,
    **settings: Any,
) -> Iterator[Client]:
    """Run a cluster of processes with the runtime on; ``settings`` are keys under ``gpurt``."""
    # A process that has used CUDA cannot be forked.
    method = {METHOD: "spawn"} if backend == "cudf" else {}
    with (
        dask.config.set({**QUICK, **method, **nested(settings)}),
        processes(backend, workers, threads, memory_limit) as local,
        enabled(local, workers, failures=failures, handovers=handovers) as client,
    ):
        yield client


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as keys of Dask's configuration under ``gpurt``."""
    return {f"gpurt.{name.replace('__', '.')}": value for name, value in settings.items()}


@contextlib.contextmanager
def enabled(local: Any, workers: int, *, failures: int = 0, handovers: bool = False) -> Iterator[Client]:
    """Have the runtime on for a client of a cluster of so many workers."""
    with Client(local) as client:
        instrument(client, failures=failures, handovers=handovers)
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            # Dask's LocalCluster hangs when it is closed while a nanny restarts a worker.
            with contextlib.suppress(OSError, TimeoutError):
                client.wait_for_workers(workers, timeout=30)
            with contextlib.suppress(OSError, TimeoutError):
                caps.count(client)
                too_early = told_too_early(client) if CHECK else []
                dask_gpurt.disable(client)
                assert not too_early, too_early


def instrument(client: Client, *, failures: int = FAILURES, handovers: bool = CHECK) -> None:
    """Have allocations fail on workers, and memory that changes hands checked, before the runtime is on."""
    if failures or handovers:
        client.register_plugin(Instruments(failures, handovers=handovers))


def told_too_early(client: Client) -> list[Any]:
    """Return the workers' reports of memory that has changed hands too early."""
    workers = dask_gpurt.report(client)["workers"].values()
    early = Fallback.OVERLAP_HANDED_OVER_EARLY.id
    return [worker["fallbacks"][early] for worker in workers if early in worker.get("fallbacks", ())]


def processes(backend: str = "pandas", workers: int = 2, threads: int = 1, memory_limit: str = "auto") -> Any:
    """Start a cluster of processes without the runtime."""
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
    return LocalCluster(processes=True, **options)


@dataclass
class Library:
    """pandas or cudf."""

    name: str

    def frame(self, frame: pd.DataFrame) -> Any:
        if self.name == "pandas":
            return frame
        import cudf

        return cudf.from_pandas(frame)

    def collection(self, parts: list[pd.DataFrame]) -> Any:
        """Return a collection with these partitions, on the workers."""
        return self.lazy(parts).persist()

    def lazy(self, parts: list[pd.DataFrame]) -> Any:
        """Return a collection with these partitions that can be computed on workers, and in this process."""
        frames = [dask.delayed(self.frame)(part) for part in parts]
        return dd.from_delayed(frames, meta=self.frame(parts[0].iloc[:0]), verify_meta=False)


def by_tasks(build: Callable[..., Any], *collections: Any) -> list[pd.DataFrame]:
    """Return the partitions that Dask's ``tasks`` makes of collections that are not on workers.

    They are computed in this process: on a cluster that takes longer than what is compared with them.
    """
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        return partitions(build(*collections))


def partitions(collection: Any) -> list[pd.DataFrame]:
    """Return the partitions of a collection, as pandas frames."""
    done = collection.persist()
    wait(done)
    frames = dask.compute(*(dask.delayed(to_pandas)(part) for part in done.to_delayed()))
    return list(frames)


def to_pandas(frame: Any) -> Any:
    return frame.to_pandas() if hasattr(frame, "to_pandas") else frame


def canonical(frame: Any, *, index: bool = True) -> Any:
    """Sort rows so that their order does not depend on how they came."""
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
    """Compare partition by partition: the same rows; without ``index``, whatever numbers they have."""
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
