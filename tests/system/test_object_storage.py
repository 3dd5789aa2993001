"""Run programs over files in an object store: S3 of moto, on the loopback device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client

from tests.helpers.clusters import cluster, counters

pytestmark = pytest.mark.nightly
s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

FILES, ROWS, KEYS = 4, 5_000, 200
GROUPS = pd.DataFrame({"key": np.arange(KEYS), "group": np.arange(KEYS) % 7})


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """Run a store; return what a program has to tell fsspec about it."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {"endpoint_url": f"http://{host}:{port}", "key": "a", "secret": "b"}
    server.stop()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster("pandas") as client:
        yield client


def part(number: int, rows: int = ROWS) -> pd.DataFrame:
    random = np.random.default_rng(number)
    return pd.DataFrame({"key": random.integers(0, KEYS, rows), "value": random.random(rows)})


def put(options: dict[str, Any], path: str, frame: pd.DataFrame) -> None:
    # Programs that write files do not share their caches of listings with programs that read them.
    store = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
    store.makedirs(path.partition("/")[0], exist_ok=True)
    with store.open(path, "wb") as file:
        frame.to_parquet(file, row_group_size=1_000)


def expected(parts: list[pd.DataFrame]) -> pd.DataFrame:
    joined = pd.concat(parts).query("value > 0.2").merge(GROUPS, on="key")
    return joined.groupby("group").value.agg(["sum", "count"])


def sums(options: dict[str, Any], name: str) -> dd.DataFrame:
    storage_options = options | {"use_listings_cache": False}
    left = dd.read_parquet(f"s3://{name}/left/*.parquet", storage_options=storage_options)
    right = dd.read_parquet(f"s3://{name}/right/", storage_options=storage_options)
    joined = left[left.value > 0.2].merge(right, on="key", broadcast=False)
    return joined.groupby("group").value.agg(["sum", "count"], split_out=2)


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    """Name the bucket of a test."""
    return request.node.name.replace("_", "-")[:60].strip("-")


@pytest.fixture
def parts(options: dict[str, Any], bucket: str) -> list[pd.DataFrame]:
    """Write the tables of a test into its bucket."""
    made = [part(number) for number in range(FILES)]
    for number, frame in enumerate(made):
        put(options, f"{bucket}/left/{number}.parquet", frame)
    for number in range(2):
        put(options, f"{bucket}/right/{number}.parquet", GROUPS[number::2])
    return made


def test_tables_are_read_joined_grouped_and_written(
    client: Client, options: dict[str, Any], bucket: str, parts: list[pd.DataFrame]
) -> None:
    before = counters(client)
    for turn in range(2):  # the second one is planned from what is kept
        program = sums(options, bucket)
        found = program.compute().sort_index()
        pd.testing.assert_frame_equal(found, expected(parts), check_index_type=False)
        program.reset_index().to_parquet(f"s3://{bucket}/out-{turn}/", storage_options=options)
        written = dd.read_parquet(f"s3://{bucket}/out-{turn}/", storage_options=options).compute()
        found = written.set_index("group").sort_index()
        pd.testing.assert_frame_equal(found, expected(parts), check_index_type=False)
    after = counters(client)
    assert after["shuffle.runs"] > before.get("shuffle.runs", 0)
    assert after["reads.aside"] > before.get("reads.aside", 0), "no task computed while another one read"
