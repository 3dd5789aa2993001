"""Test that workers keep what they read of files of an object store, and that reads go there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import dask
import dask.dataframe as dd
import fsspec
import pandas as pd
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest
from distributed import Client, Event
from fsspec.implementations.dirfs import DirFileSystem
from pyarrow.dataset import ParquetFileFormat

import dask_gpurt
from benchmarks.reads.store import serve
from dask_gpurt.memory.ledger import CACHED, Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.reads.caches import RangeCache
from dask_gpurt.reads.columns import Column, ColumnCache, Kept
from dask_gpurt.reads.remote import Reading
from tests.helpers.clusters import cluster

pytest.importorskip("s3fs")

FILES, ROWS = 6, 500
MIB = 1 << 20
WAYS = ("fsspec", "folder", "arrow")


class Bucket:
    """Hold a table in a store."""

    def __init__(self, folder: Path, port: int):
        self.folder = folder / "table"
        self.port = port
        self.folder.mkdir()

    def write(self, number: int, value: int) -> None:
        """Write or replace a file; all have the same size, and the same time of modification."""
        path, new = self.folder / f"{number}.parquet", self.folder / ".new"
        frame = pd.DataFrame({"x": [value] * ROWS, "y": range(ROWS)})
        frame.to_parquet(new, compression=None)
        os.utime(new, (1e9, 1e9))
        assert not path.exists() or path.stat().st_size == new.stat().st_size
        new.replace(path)

    def arrow(self) -> Any:
        """Return Arrow's file system of the store."""
        return pa_fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            access_key="k",
            secret_key="s",
            region="us-east-1",
        )

    def requests(self) -> int:
        """Return the number of requests so far, with this one."""
        with urlopen(f"http://127.0.0.1:{self.port}/requests") as answer:
            return int(answer.read())

    def table(self, way: str, **given: Any) -> Any:
        """Return the table. Listings are not kept, as in other programs than this one."""
        if way == "arrow":
            return dd.read_parquet("bucket/table", filesystem=self.arrow(), **given)
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{self.port}"}
        options |= {"use_listings_cache": False}
        if way == "folder":
            folder = DirFileSystem("bucket", fs=fsspec.filesystem("s3", **options))
            return dd.read_parquet("table", filesystem=folder, **given)
        return dd.read_parquet("s3://bucket/table", storage_options=options, **given)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    server = serve(tmp_path)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    bucket = Bucket(tmp_path, server.server_port)
    for number in range(FILES):
        bucket.write(number, number + 1)
    yield bucket
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    # Workers that are idle for a moment would steal reads.
    with dask.config.set({"distributed.scheduler.work-stealing": False}), cluster("pandas", 2) as client:
        yield client


def from_store(client: Client) -> int:
    """Return the bytes that tasks have read from the store, since the last call."""

    def counted(dask_worker: Any) -> int:
        metrics = dask_worker.plugins["gpurt"].metrics
        total = metrics.total("reads.bytes.{source}").get(("store",), 0)
        before, metrics.before = getattr(metrics, "before", 0), total
        return int(total - before)

    return sum(client.run(counted).values())


@pytest.mark.parametrize("way", WAYS)
def test_a_second_query_reads_nothing_from_the_store(client: Client, bucket: Bucket, way: str) -> None:
    expected = sum(range(1, FILES + 1)) * ROWS
    from_store(client)
    assert bucket.table(way).x.sum().compute() == expected
    first = from_store(client)
    assert first >= FILES * ROWS * 8 / 4  # at most, values are stored by a dictionary
    # A query of its own that reads the same column, so that results of the first are of no use.
    decoded = dask_gpurt.report(client)["counters"]["reads.bytes.decoded"]
    assert bucket.table(way).x.max().compute() == FILES
    assert from_store(client) == 0
    assert dask_gpurt.report(client)["counters"]["reads.bytes.decoded"] == decoded
    memory = dask_gpurt.memory_usage(client).to_pandas()
    assert memory.cached.sum() >= first


def test_the_store_of_a_column_that_is_kept_is_asked_for_its_version_only(bucket: Bucket) -> None:
    store, schema = bucket.arrow(), pq.read_schema(bucket.folder / "0.parquet")
    columns = ColumnCache(lambda: MIB, lambda nbytes: None)
    ranges = RangeCache(lambda: MIB, lambda nbytes: None)

    def read() -> Any:
        reading = Reading(ranges, Metrics(), columns)
        file = ParquetFileFormat().make_fragment("bucket/table/0.parquet", store)
        through = partial(reading.of_fragment, file, None, ["x"], schema)
        return reading.run(partial(through, lambda part, names: part.to_table(columns=names)), read)

    first, before = read(), bucket.requests()
    assert read() == first
    assert bucket.requests() - before == 2  # for the version, and this request


@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_the_same_size_and_time_is_read_anew(client: Client, bucket: Bucket, way: str) -> None:
    for value in (100, 200, 300):
        bucket.write(3, value)
        assert bucket.table(way).x.max().compute() == value


@pytest.mark.parametrize("way", WAYS)
def test_row_groups_without_rows_for_the_filters_are_not_read(
    client: Client, bucket: Bucket, way: str
) -> None:
    pd.DataFrame({"x": range(200_000)}).to_parquet(bucket.folder / "0.parquet", row_group_size=10_000)
    from_store(client)
    assert len(bucket.table(way, filters=[("x", "==", 100_000)]).compute()) == 1
    assert from_store(client) < (bucket.folder / "0.parquet").stat().st_size / 2


def test_the_cache_gives_way_to_reservations_at_once(client: Client) -> None:
    def sizes(dask_worker: Any) -> list[int]:
        tiers, found = dask_worker.plugins["gpurt"].tiers, []
        tiers.ranges.keep("file", 0, {0: bytes(MIB), MIB: bytes(MIB)})
        column = Column("x", "int", None, MIB)
        tiers.columns.keep(("file", None, ()), Kept(0, {}, {}, {"x": column}))
        found.append(tiers.ranges.nbytes + tiers.columns.nbytes)
        assert tiers.ledger.cell(tiers._host_tier, CACHED) == found[0] >= 3 * MIB
        reservations = tiers.tiered_buffer.reservations
        assert reservations.try_reserve("key", tiers.limits.device - MIB, Tier.DEVICE)
        found.append(tiers.ranges.nbytes + tiers.columns.nbytes)
        reservations.cancel("key")
        return found

    for before, after in client.run(sizes).values():
        assert before >= 3 * MIB
        assert after <= MIB


def test_what_two_threads_keep_at_once_is_counted(client: Client) -> None:
    def counted(dask_worker: Any) -> tuple[int, int]:
        tiers = dask_worker.plugins["gpurt"].tiers
        column, original = Column("x", "int", None, MIB), tiers.ledger.set
        kept = Kept(0, {}, {}, {"x": column})
        other = threading.Thread(target=tiers.columns.keep, args=(("of two", None, ()), kept))

        def interrupted(*args: Any) -> None:
            tiers.ledger.set = original
            other.start()
            other.join(0.2)  # it ends only if it does not wait for this one
            original(*args)

        tiers.ledger.set = interrupted
        tiers.ranges.keep("of two", 0, {0: bytes(MIB)})
        other.join()
        return tiers.ledger.cell(tiers._host_tier, CACHED), tiers.ranges.nbytes + tiers.columns.nbytes

    for found, expected in client.run(counted).values():
        assert found == expected >= 2 * MIB


def test_the_cache_of_a_killed_worker_is_read_elsewhere(bucket: Bucket) -> None:
    expected = sum(range(1, FILES + 1)) * ROWS
    with cluster("pandas", 2) as client:
        assert bucket.table("fsspec").x.sum().compute() == expected
        pid = next(iter(client.run(os.getpid).values()))
        bucket.write(0, 1)
        os.kill(pid, signal.SIGKILL)
        assert (bucket.table("fsspec").x + 1).sum().compute() == expected + FILES * ROWS


def stop_here() -> None:
    """Block the thread of a worker until the test ends, as a worker that is far too slow does."""
    Event("begun").set()
    Event("end").wait()


def test_nothing_waits_for_a_slow_worker_that_has_the_files(bucket: Bucket) -> None:
    """A worker that has just joined has nothing to do, and so steals its reads, and keeps what it reads."""
    with dask.config.set({"distributed.scheduler.work-stealing": True}), cluster("pandas", 1) as client:
        assert bucket.table("fsspec").y.sum().compute() == FILES * sum(range(ROWS))
        (slow,) = client.nthreads()
        client.cluster.scale(2)
        client.wait_for_workers(2)
        blocked = client.submit(stop_here, workers=[slow])
        Event("begun").wait()
        from_store(client)
        try:
            for number in (1, 2):  # two queries, the second one of what the new worker has
                again = client.compute((bucket.table("fsspec").y + number).sum())
                assert again.result(timeout=60) == FILES * (sum(range(ROWS)) + number * ROWS)
                assert (from_store(client) > 0) == (number == 1)
        finally:
            Event("end").set()
        blocked.result()


def test_nothing_is_kept_if_it_is_off(bucket: Bucket) -> None:
    with cluster("pandas", 1, cache="off") as client:
        assert bucket.table("fsspec").x.max().compute() == FILES
        assert from_store(client) == 0
        assert dask_gpurt.memory_usage(client).to_pandas().cached.sum() == 0


def test_files_of_web_servers_are_not_kept(client: Client, bucket: Bucket) -> None:
    before = dask_gpurt.memory_usage(client).to_pandas().cached.sum()
    url = f"http://127.0.0.1:{bucket.port}/bucket/table/3.parquet"
    for value in (100, 200):
        bucket.write(3, value)
        assert dd.read_parquet(url).x.max().compute() == value
    assert dask_gpurt.memory_usage(client).to_pandas().cached.sum() == before
