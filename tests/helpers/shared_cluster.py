"""One cluster of processes for tests that leave it as it was: to start one takes longer than most of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import dask
from distributed import Client

from tests.helpers.clusters import CHECK, FAILURES, QUICK, cluster, enabled, nested, processes
from tests.helpers.waiting import until


class SharedCluster:
    """Keep a cluster of two processes for several tests, one after the other.

    The runtime goes on for each of them, with settings of its own, and off afterwards. Where a test fails, or
    leaves something behind, the cluster is closed, and the next test has a new one.
    """

    def __init__(self) -> None:
        self._local: Any = None
        #: What the cluster had when it was new.
        self._had: dict[str, Any] = {}

    @contextlib.contextmanager
    def client(self, backend: str = "pandas", **settings: Any) -> Iterator[Client]:
        """Have the runtime on, as on a :func:`cluster` of its own.

        Raises
        ------
        AssertionError
            When something is left behind: a task, data, a run of a shuffle, a plugin, a setting.
        """
        # Workers with GPUs or instruments are what they are from their start on.
        if backend != "pandas" or FAILURES or CHECK:
            with cluster(backend, **settings) as client:
                yield client
            return
        if self._local is None:
            with dask.config.set(QUICK):
                # Not with settings of the test: what a worker is started with goes before what it is told.
                self._local = processes()
            self._had = held(self._local)
        local, self._local = self._local, None  # until it is known to be as it was
        try:
            with dask.config.set({**QUICK, **nested(settings)}), enabled(local, workers=2) as client:
                yield client
            until(lambda: not self._changes(local), lambda: self._changes(local))
        except BaseException:
            local.close()
            raise
        self._local = local

    def _changes(self, local: Any) -> dict[str, Any]:
        return {name: now for name, now in held(local).items() if now != self._had[name]}

    def close(self) -> None:
        """End the processes."""
        if self._local is not None:
            self._local.close()


class Lease:
    """Hold one client for several tests, and another one after a test that has failed."""

    def __init__(self, opened: Callable[[], contextlib.AbstractContextManager[Client]]):
        self._opened = opened
        self._held: tuple[contextlib.AbstractContextManager[Client], Client] | None = None

    @property
    def client(self) -> Client:
        if self._held is None:
            context = self._opened()
            self._held = context, context.__enter__()
        return self._held[1]

    def end(self) -> None:
        """Let go of the client."""
        if self._held is not None:
            (context, _), self._held = self._held, None
            context.__exit__(None, None, None)

    def end_after_failure(self) -> None:
        """Let go of the client, of which nothing is expected any more."""
        if self._held is not None:
            (context, _), self._held = self._held, None
            error = RuntimeError("a test has failed")
            with contextlib.suppress(RuntimeError):
                context.__exit__(RuntimeError, error, None)


def held(local: Any) -> dict[str, Any]:
    """Return what a cluster holds, and the settings of this process: all that a test may leave behind."""
    scheduler = local.scheduler
    with Client(local, set_as_default=False) as client:
        return {
            "workers": client.run(_held_on_worker),
            "tasks": list(scheduler.tasks),
            "runs": list(scheduler.extensions["shuffle"].active_shuffles),
            "plugins": set(scheduler.plugins),
            "extensions": set(scheduler.extensions),
            "events": list(scheduler.extensions["events"]._events),
            "variables": list(scheduler.extensions["variables"].variables),
            "config": [dask.config.get(name, None) for name in ("dataframe", "gpurt", "distributed")],
        }


def _held_on_worker(dask_worker: Any) -> dict[str, Any]:
    return {
        "data": list(dask_worker.data),
        "tasks": list(dask_worker.state.tasks),
        "runs": list(dask_worker.plugins["shuffle"].shuffle_runs._runs),
        "plugins": set(dask_worker.plugins),
        "executors": set(dask_worker.executors),
        "config": dask.config.get("gpurt", None),
    }
