"""One cluster of processes for the tests of a module that leave it as it was."""

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

    Parameters
    ----------
    failures
        Counts the tests that have failed.
    """

    def __init__(self, failures: Callable[[], int]) -> None:
        self._failures = failures
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
        failures = self._failures()
        local, self._local = self._local or self._start(), None
        try:
            with dask.config.set({**QUICK, **nested(settings)}), enabled(local, workers=2) as client:
                yield client
            if self._failures() == failures:
                until(lambda: not self._changes(local), lambda: self._changes(local))
                self._local = local
        finally:
            if self._local is None:
                local.close()

    def _start(self) -> Any:
        # Not with the settings of a test: what a worker is started with goes before what it is told.
        with dask.config.set(QUICK):
            local = processes()
        self._had = held(local)
        return local

    def _changes(self, local: Any) -> dict[str, Any]:
        return {name: now for name, now in held(local).items() if now != self._had[name]}

    def close(self) -> None:
        """End the processes."""
        if self._local is not None:
            self._local.close()


class Lease:
    """Hold one client for several tests, until it is ended."""

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
        """Let go of the client; who asks for one next has another."""
        if self._held is not None:
            (context, _), self._held = self._held, None
            context.__exit__(None, None, None)


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
