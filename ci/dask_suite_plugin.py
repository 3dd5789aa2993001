"""A pytest plugin that sends Dask's own shuffle tests through the runtime on a real cluster.

The tests ship inside the installed ``dask``, and most of them compute on the synchronous scheduler. Here that
scheduler is replaced by the client of a :class:`~distributed.LocalCluster`, and tests that are parametrized
by shuffle method include the runtime's. The session fails if no shuffle went through the runtime.

``GPURT_SUITE_BASELINE=1`` leaves the runtime off, uses ``p2p`` instead and runs every test: tests that fail
then fail in Dask itself. ``GPURT_SUITE_METHODS=gpurt`` leaves out the variants by ``disk`` and ``tasks``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import dask
import pytest
from dask.base import named_schedulers
from dask.dataframe.dask_expr.tests import _util
from distributed import Client, LocalCluster

BASELINE = os.environ.get("GPURT_SUITE_BASELINE") == "1"
METHODS = os.environ.get("GPURT_SUITE_METHODS", "disk,tasks,gpurt").split(",")

OLD, NEW = "dask/dataframe/tests/test_shuffle.py", "dask/dataframe/dask_expr/tests/test_shuffle.py"
_by_tasks = "shuffles by tasks, whatever is on: it takes longest of all, and never meets the runtime"

#: Reasons for deselecting tests, most of which cannot work on such a cluster, by the start of their node id.
DESELECTED: dict[str, str] = {
    f"{OLD}::test_disk_shuffle_with_unknown_compression": (
        "expects the workers to see a setting that the test makes in the client's process"
    ),
    f"{OLD}::test_set_index_consistent_divisions": "sorts in other processes, which never meet the runtime",
    f"{NEW}::test_task_shuffle": _by_tasks,
    f"{NEW}::test_task_shuffle_index": _by_tasks,
}

if sys.version_info < (3, 12):
    # Before 3.12 all objects of a class share the lock of a functools.cached_property. The client holds the
    # lock of `divisions` while it waits for the quantiles, and the scheduler needs it to build their graph.
    # In a LocalCluster both are in one process and deadlock, with or without the runtime.
    _lock = "client and scheduler of one process deadlock on cached_property's lock (Python 3.11)"
    DESELECTED |= {
        f"{OLD}::test_set_index_sorts": _lock,
        f"{OLD}::test_set_index_empty_partition": _lock,
        f"{OLD}::test_empty_partitions": _lock,
    }

_client = pytest.StashKey[Client]()
_runs = pytest.StashKey[int]()
RUNS = "gpurt_shuffle_runs"


def _deselecting_entry(item: pytest.Item) -> str | None:
    return next((test for test in DESELECTED if f"{test}[" in f"{item.nodeid}["), None)


_original_assert_eq = _util.assert_eq


def _assert_eq(a: Any, b: Any, *args: Any, **kwargs: Any) -> None:
    """Compare as Dask's tests do, but compute the divisions beforehand.

    Dask's tests build the graph while pickling expressions is forbidden. Building it may need divisions,
    which the client computes by sending a pickled expression. Building the graph once before caches them.
    """
    for collection in (a, b):
        if hasattr(collection, "dask"):
            _ = collection.dask
    _original_assert_eq(a, b, *args, **kwargs)


def _only_hands_out(config: pytest.Config) -> bool:
    """Return whether the tests run in worker processes of pytest-xdist, each with its own cluster."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if _only_hands_out(session.config):
        return
    if not BASELINE:
        dask.config.set({"gpurt.enabled": True})
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
    )
    client = Client(cluster)
    session.config.stash[_client] = client
    if not BASELINE:
        import dask_gpurt

        dask_gpurt.enable(client)
    for name in ("sync", "synchronous", "single-threaded"):
        named_schedulers[name] = client.get
    # Patch it before the test modules are imported, as they import it by name.
    _util.assert_eq = _assert_eq


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shuffle_method" in metafunc.fixturenames:
        methods = ["disk", "tasks", "p2p"] if BASELINE else METHODS
        metafunc.definition.add_marker(pytest.mark.parametrize("shuffle_method", methods, indirect=True))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if BASELINE:
        return
    by_test = {item: test for item in items if (test := _deselecting_entry(item))}
    if stale := DESELECTED.keys() - set(by_test.values()):
        raise pytest.UsageError(f"these tests are deselected but do not exist: {', '.join(sorted(stale))}")
    items[:] = [item for item in items if item not in by_test]
    config.hook.pytest_deselected(items=list(by_test))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (client := session.config.stash.get(_client, None)) is not None:
        _end(client, session.config)
    if not (BASELINE or session.config.option.collectonly or session.config.stash.get(_runs, 0)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _end(client: Client, config: pytest.Config) -> None:
    """Count this process's runs, and close its cluster."""
    try:
        if not BASELINE and not config.option.collectonly:
            import dask_gpurt

            runs = int(dask_gpurt.report(client)["counters"].get("shuffle.runs", 0))
            config.stash[_runs] = runs
            if hasattr(config, "workeroutput"):
                config.workeroutput[RUNS] = runs
    finally:
        client.close()
        client.cluster.close()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up the counts of pytest-xdist's processes."""
    stash = node.config.stash
    stash[_runs] = stash.get(_runs, 0) + getattr(node, "workeroutput", {}).get(RUNS, 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if BASELINE:
        terminalreporter.section("the runtime was left off")
        return
    terminalreporter.section("left out")
    for test, why in DESELECTED.items():
        terminalreporter.write_line(f"{test}: {why}")
    runs = config.stash.get(_runs, 0)
    terminalreporter.write_line(
        f"{runs} shuffle runs went through the runtime, summed over the workers"
        + ("" if runs else ": these tests have shown nothing about it"),
        green=bool(runs),
        red=not runs,
    )
