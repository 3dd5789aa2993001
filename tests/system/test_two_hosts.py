"""Run the runtime on two hosts with a network between them: paths and lost workers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, Event

import dask_gpurt
from benchmarks.two_hosts.hosts import ADDRESSES, LINK, PATIENCE_S, UnsupportedError, host_of, make_hosts
from tests.helpers.clusters import QUICK, assert_same_partitions, by_tasks, counters, instrument, partitions

# ---- two hosts of one machine ----------------------------------------------------------------------

#: The scheduler's ports by protocol; the client, which is on neither host, uses the first one.
PORTS = {"tcp": 8786, "ucx": 8788}
#: UCX uses TCP over the link, within a host too: it takes two namespaces of one kernel for one host.
UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}


@contextlib.contextmanager
def two_hosts(scratch: Path, workers: int = 2, *, protocol: str = "tcp") -> Iterator[Client]:
    """Run a cluster with the runtime enabled, with ``workers`` workers on each of two hosts.

    The scheduler runs on the first host.

    ``scratch``: folder of the workers' files.
    ``protocol``: protocol of the workers' comms; "ucx" runs over TCP.
    """
    with dask.config.set(QUICK), contextlib.ExitStack() as stack:
        try:
            hosts = make_hosts(stack, None, UCX)
        except UnsupportedError as error:
            pytest.skip(str(error))
        dask_command = (sys.executable, "-m", "dask")
        hosts[0].start(
            *dask_command, "scheduler", "--host", ADDRESSES[0], "--no-dashboard", *_doors(protocol)
        )
        for host in hosts:
            options = ("--host", host.address, "--no-nanny", "--no-dashboard", "--nthreads", "1")
            for _ in range(workers):
                where = ("--protocol", protocol, "--local-directory", str(scratch))
                host.start(*dask_command, "worker", _scheduler(protocol), *options, *where)
        with hosts[0].network():
            client = stack.enter_context(Client(_scheduler("tcp"), timeout=PATIENCE_S))
        client.wait_for_workers(2 * workers, timeout=PATIENCE_S)
        instrument(client)
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                dask_gpurt.disable(client)


def _scheduler(protocol: str) -> str:
    return f"{protocol}://{ADDRESSES[0]}:{PORTS[protocol]}"


def _doors(protocol: str) -> tuple[str, ...]:
    """Return the options of a scheduler that listens on TCP and on the protocol of its workers."""
    protocols = list(dict.fromkeys(("tcp", protocol)))
    ports = ",".join(str(PORTS[each]) for each in protocols)
    return "--protocol", ",".join(protocols), "--port", ports


def on_other_host(client: Client) -> list[str]:
    """Return the workers that are not on the scheduler's host."""
    workers = client.nthreads()
    return [worker for worker in workers if host_of(worker) != ADDRESSES[0]]


# ---- tests ----------------------------------------------------------------------------------------

PARTS, ROWS = 8, 20_000


def make(part: int, waits: str | None = None, rows: int = ROWS) -> pd.DataFrame:
    if waits and part == PARTS - 1:
        Event(f"{waits}-reached").set()
        Event(waits).wait(timeout=60)
    random = np.random.default_rng(part)
    return pd.DataFrame({"key": random.integers(0, 9999, rows), "row": np.arange(rows) + part * rows})


def collection(**options: Any) -> Any:
    return dd.from_map(make, range(PARTS), meta=make(0).iloc[:0], **options)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shuffle(df: Any) -> Any:
    return df.shuffle("key", ignore_index=True)


def shuffled(df: Any) -> list[pd.DataFrame]:
    return partitions(shuffle(df))


def assert_like_tasks(ours: list[pd.DataFrame], df: Any) -> None:
    assert_same_partitions(ours, by_tasks(shuffle, df), in_order=False, index=False)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield two hosts with two workers each, shared by tests that leave them unchanged."""
    with two_hosts(tmp_path_factory.mktemp("workers")) as client:
        yield client


@pytest.mark.slow
def test_a_shuffle_over_both(hosts: Client) -> None:
    df = collection()
    assert_like_tasks(shuffled(df), df)
    moved = counters(hosts)
    # With two workers each, half of all bytes cross hosts, and a quarter go to the neighbour.
    assert moved["exchange.bytes.comms"] == pytest.approx(2 * moved["exchange.bytes.shared-memory"], rel=0.2)
    for worker, known in dask_gpurt.report(hosts, connect=True)["workers"].items():
        for peer, path in known["paths"].items():
            if peer != worker:
                same = host_of(peer) == host_of(worker)
                assert path["path"] == ("shared-memory" if same else "comms"), (worker, peer, path)


@pytest.mark.nightly
def test_a_shuffle_over_both_by_ucx(tmp_path: Path) -> None:
    pytest.importorskip("distributed_ucxx", reason="UCX between hosts takes distributed-ucxx")
    with two_hosts(tmp_path, protocol="ucx") as client:
        df = collection()
        assert_like_tasks(shuffled(df), df)
        moved = counters(client)
        assert moved["exchange.bytes.comms"] == pytest.approx(
            2 * moved["exchange.bytes.shared-memory"], rel=0.2
        )
        workers = dask_gpurt.report(client)["workers"]
        assert {worker.partition("://")[0] for worker in workers} == {"ucx"}
        assert {host_of(worker) for worker in workers} == set(ADDRESSES)


@pytest.mark.nightly
def test_a_worker_on_the_other_host_is_killed(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as client:
        out = collection(waits="go").shuffle("key", ignore_index=True).persist()
        Event("go-reached", client=client).wait(timeout=60)
        victim = on_other_host(client)[0]
        client.run(die, workers=[victim], on_error="return")
        Event("go", client=client).set()
        ours = partitions(out)
        assert_like_tasks(ours, collection())
        assert len(client.nthreads()) == 3
