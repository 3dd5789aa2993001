from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from dask.system import CPU_COUNT
from distributed import Client
from hypothesis import settings

from tests.helpers import caps
from tests.helpers.clusters import Library, fork_with_imports
from tests.helpers.examples import examples
from tests.helpers.gpus import cuda_devices, unaccepted_skip
from tests.helpers.shared_cluster import Lease, SharedCluster


def _without_lock(self: Any, instance: Any, owner: Any = None) -> Any:
    if instance is None:
        return self
    if self.attrname not in instance.__dict__:
        instance.__dict__[self.attrname] = self.func(instance)
    return instance.__dict__[self.attrname]


if sys.version_info < (3, 12):
    # Before Python 3.12, cached_property holds one lock for all instances while it computes. Here the client
    # and its scheduler share a process, and the client's property waits for the scheduler: that would
    # deadlock.
    functools.cached_property.__get__ = _without_lock  # type: ignore[method-assign]


settings.register_profile("gpurt", examples())
settings.load_profile("gpurt")

#: The folder that takes the place of the user's cache.
_CACHE = pytest.StashKey[str]()
#: Maximum number of test processes: each of them may start clusters.
MOST_PROCESSES = 4
#: Folders in the order in which their tests begin: what takes long would otherwise finish last.
LONGEST_FIRST = ("tests/system/", "tests/cluster/", "tests/unit/benchmarks/simulate/")
#: Tests of GPUs that were skipped on a host with a GPU, with reasons that are not accepted.
_unaccepted: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    # Tests start hundreds of processes, each of which would otherwise recompile the package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Dask logs the begin and end of every shuffle at INFO.
    logging.getLogger("distributed.shuffle._scheduler_plugin").setLevel(logging.ERROR)
    if os.environ.get("GPURT_REQUIRE_GPU") == "1" and not cuda_devices():
        raise pytest.UsageError("GPURT_REQUIRE_GPU=1 is set, but there is no CUDA device")
    # Neither read nor write the user's own cache, in which plans would last from one run to the next.
    os.environ["XDG_CACHE_HOME"] = config.stash[_CACHE] = tempfile.mkdtemp(prefix="gpurt-tests-cache-")
    caps.confine()
    fork_with_imports()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of cores plus one; 0 for a single file, or where tests share GPUs.

    Tests of clusters are idle for a part of their time. On two cores all take 270 to 290 s with three.
    """
    files = {argument.split("::")[0] for argument in config.args}
    if cuda_devices() or (all(file.endswith(".py") for file in files) and len(files) == 1):
        return 0
    return min(CPU_COUNT + 1, MOST_PROCESSES)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze all imported objects, so that the garbage collector does not scan them."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in caps.summary():
        terminalreporter.write_line(line)
    for test, reason in _unaccepted.items():
        terminalreporter.write_line(f"FAILED {test}: skipped although there is a GPU: {reason}", red=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [folder not in item.nodeid for folder in LONGEST_FIRST])
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not cuda_devices():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if cuda_devices() and (reason := unaccepted_skip(report)):
        _unaccepted[report.nodeid] = reason


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash.get(_CACHE, ""), ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unaccepted and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", params=["pandas", pytest.param("cudf", marks=pytest.mark.gpu)])
def library(request: pytest.FixtureRequest) -> Library:
    """Return pandas, then cudf: both behave alike."""
    # Import it before a cluster starts: later, two threads of this process may import it concurrently.
    # Thread 1, the test, makes a frame: `import cudf` holds the lock of cudf, and needs cudf.core.x. Thread
    # 2,
    # Dask's event loop, unpickles a frame from a reply: `import cudf.core.x` holds the lock of cudf.core.x,
    # and needs its parent cudf first. Python detects the deadlock, and either raises _DeadlockError in one of
    # the threads or lets it continue with a partial module: "partially initialized module 'cudf' has no
    # attribute …".
    importlib.import_module(request.param)
    return Library(request.param)


# Not of scope "session": Dask's gen_cluster kills all child processes that it finds, before and after a test.
@pytest.fixture(scope="module")
def shared_cluster(request: pytest.FixtureRequest) -> Iterator[SharedCluster]:
    """Keep a cluster of two processes for the tests of a module that leave it unchanged."""
    shared = SharedCluster(lambda: request.session.testsfailed)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def _lease(shared_cluster: SharedCluster, library: Library) -> Iterator[Lease]:
    lease = Lease(lambda: shared_cluster.client(library.name))
    yield lease
    lease.end()


@pytest.fixture
def client(_lease: Lease, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Enable the runtime on the shared cluster for all tests of a module, until one of them fails."""
    failures = request.session.testsfailed
    yield _lease.client
    if request.session.testsfailed > failures:
        _lease.end()
