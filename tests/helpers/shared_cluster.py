"""Share one cluster of processes between the tests of a module that leave it unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import dask
from distributed import Client

import dask_gpurt.config  # noqa: F401  adds the defaults, before the settings are compared
from tests.helpers.clusters import CHECK, FAILURES, QUICK, cluster, enabled, nested, processes
from tests.helpers.waiting import until


class SharedCluster:
    """Keep a cluster of two processes for consecutive tests.

    The runtime is enabled for each test with its own settings, and disabled afterwards. If a test fails or
    leaves
    state behind, the cluster is closed, and the next test starts a new one.

    ``failures``: returns the number of failed tests.
    """

    def __init__(self, failures: Callable[[], int]) -> None:
        self._failures = failures
        self._local: Any = None
        #: Snapshot of the cluster when it was new.
        self._had: dict[str, Any] = {}

    @contextlib.contextmanager
    def client(self, backend: str = "pandas", **settings: Any) -> Iterator[Client]:
        """Enable the runtime, as on a :func:`cluster` of its own.

        Raises AssertionError if state is left behind: a task, data, a run of a shuffle, a plugin, a setting.
        """
        # Workers with GPUs or instruments are set up when they start, so they get a cluster of their own.
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
        # Not with a test's settings: configuration at a worker's start takes precedence over later messages.
        with dask.config.set(QUICK):
            local = processes()
        self._had = held(local)
        return local

    def _changes(self, local: Any) -> dict[str, Any]:
        return {name: now for name, now in held(local).items() if now != self._had[name]}

    def close(self) -> None:
        """Close the cluster."""
        if self._local is not None:
            self._local.close()


class Lease:
    """Keep one client open for several tests, until it is ended."""

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
        """Close the client; the next access opens another."""
        if self._held is not None:
            (context, _), self._held = self._held, None
            context.__exit__(None, None, None)


def held(local: Any) -> dict[str, Any]:
    """Snapshot the state of a cluster and the settings of this process that a test could leave behind."""
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
