"""Keep columns of Parquet files in memory of a GPU, and copy them for later reads."""

from __future__ import annotations

import contextlib
import decimal
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dask_gpurt
from benchmarks.reads.store import serve
from dask_gpurt.memory.host import BlockPool, PinnedTier
from dask_gpurt.memory.ledger import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.reads.below import ColumnsBelow
from dask_gpurt.reads.columns import LEAST_AGE_NS, ColumnCache, ColumnRead
from dask_gpurt.worker.kept_reads import asked_of
from tests.helpers.clusters import cluster

pytestmark = pytest.mark.gpu

ROWS = 1000


def table(seed: int) -> pa.Table:
    """Return a table of most types, with nulls and empty lists."""
    random = np.random.default_rng(seed)
    rows = ROWS + 50 * seed
    numbers = random.integers(0, 100, rows)
    some = [None if number % 7 == 0 else int(number) for number in numbers]
    return pa.table(
        {
            "number": numbers,
            "maybe": pa.array(some, pa.int32()),
            "flag": numbers % 2 == 0,
            "real": random.random(rows).astype("float32"),
            "time": np.datetime64("2020-01-01", "us") + numbers.astype("m8[s]"),
            "word": pa.array([None if each is None else "w" * (each % 5) for each in some]),
            "price": pa.array([decimal.Decimal(int(each)) / 100 for each in numbers], pa.decimal128(12, 2)),
            "list": pa.array([None if each is None else [each] * (each % 3) for each in some]),
            "fields": pa.array([{"a": int(each), "b": {"c": str(each)}} for each in numbers]),
        }
    )


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    for number, path in enumerate(paths):
        pq.write_table(table(number), path, row_group_size=300)
    time.sleep(1.1 * LEAST_AGE_NS / 1e9)
    return paths


def unseen(nbytes: int) -> None:
    """Take the bytes of a cache."""


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.PINNED])
def test_columns_of_all_types_are_those_of_the_library(files: list[str], tier: Tier) -> None:
    import pylibcudf as plc
    from rmm.pylibrmm.stream import DEFAULT_STREAM

    from dask_gpurt.device.cuda import CudaDevice
    from dask_gpurt.frames import cudf_reads

    calls = []
    device, cache = CudaDevice(), ColumnCache(lambda: 1 << 30, unseen)
    if tier is Tier.PINNED:
        pool = BlockPool(1 << 28, register=device.register)
        pool.free(pool.allocate(1))  # columns are dropped while the first slab is pinned
        pinned = PinnedTier(pool)
        below = ColumnsBelow(pinned, device, lambda: cudf_reads, lambda: 1 << 28, unseen)
        cache = ColumnCache(int, unseen, below)

    def read(
        paths: list[str], columns: list[str] | None, groups: Any = None, *, plainly: bool = False
    ) -> Any:
        options = plc.io.parquet.ParquetReaderOptions.builder(plc.io.SourceInfo(paths)).build()
        if columns is not None:
            options.set_column_names(columns)
        if groups is not None:
            options.set_row_groups(groups)

        def call(some: Any) -> Any:
            calls.append(some)
            if some is not None:
                options.set_column_names(list(some))
            return plc.io.parquet.read_parquet(options)

        if plainly:
            return call(None)
        asked = asked_of(paths, "cudf", columns, groups)
        assert asked is not None
        reading = ColumnRead(cache, cudf_reads, asked, call, contextlib.nullcontext, Metrics())
        found = reading.read(DEFAULT_STREAM)
        reading.keep()
        return found

    def same(*how: Any) -> None:
        found, expected = read(*how), read(*how, plainly=True)
        calls.pop()
        assert found.column_names(include_children=True) == expected.column_names(include_children=True)
        assert found.per_file_user_data == expected.per_file_user_data
        assert pa.table(found.tbl.to_arrow()).equals(pa.table(expected.tbl.to_arrow()))

    every = table(0).column_names
    same(files, None)
    same(files, every)
    same(files[1:2], every[::-1])
    same([files[2], files[0]], ["fields", "word", "list"])
    assert calls == [None]
    same(files[:2], every[:3], [[0, 2], [3]])
    same(files[1:2], every[:3], [[3]])
    assert len(calls) == 2
    same(files[:2], every[1:5], [[0, 2], [3]])
    same(files[:1], every, [[]])
    assert calls == [None, None, ["real", "time"], None]
    if tier is Tier.PINNED:
        assert pinned.used == below.nbytes > 0
        below.close()
        assert pinned.used == 0
        pinned.close()
    device.close()


def test_files_of_a_store_are_fetched_and_decoded_once_until_they_are_replaced(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    server = serve(tmp_path)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    options = {"key": "k", "secret": "s", "endpoint_url": url, "use_listings_cache": False}
    (tmp_path / "table").mkdir()

    def put(number: int, value: int) -> None:
        """Write or replace a file; all have the same size, and the same time of modification."""
        frame = pd.DataFrame({"x": [value] * ROWS, "y": range(ROWS), "z": "text"})
        frame.to_parquet(tmp_path / ".new", compression=None, row_group_size=300)
        os.utime(tmp_path / ".new", (1e9, 1e9))
        (tmp_path / ".new").replace(tmp_path / "table" / f"{number}.parquet")

    def total(columns: list[str], **given: Any) -> int:
        table = dd.read_parquet("s3://bucket/table", columns=columns, storage_options=options, **given)
        return sum(int(table[name].sum().compute()) for name in columns)

    try:
        for number in range(4):
            put(number, number)
        with dask.config.set({"dataframe.backend": "cudf"}), cluster("cudf", 1) as client:
            sums = {"x": 6 * ROWS, "y": 4 * ROWS * (ROWS - 1) // 2}
            for given in ({}, {"split_row_groups": 1}):
                for columns in (["x"], ["x", "y"], ["y"], ["x"]):
                    assert total(columns, **given) == sum(sums[name] for name in columns)
            counters = dask_gpurt.report(client)["counters"]
            size = (tmp_path / "table" / "0.parquet").stat().st_size
            assert counters["reads.bytes.store"] == 4 * size
            assert counters["reads.bytes.device"] > counters["reads.bytes.decoded"] > 0
            for value in (100, 200):
                put(3, value)
                for _ in range(2):
                    assert total(["x"]) == (3 + value) * ROWS
            assert dask_gpurt.report(client)["counters"]["reads.bytes.store"] == 6 * size
            assert "reads.not-kept" not in dask_gpurt.report(client)["fallbacks"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spoiled(frame: Any) -> Any:
    frame["number"].values[:] = -1
    frame["maybe"].fillna(7, inplace=True)
    return frame.head(1)


def test_what_a_task_writes_into_its_result_and_full_memory_change_nothing(files: list[str]) -> None:
    expected = pd.concat([table(number).to_pandas() for number in range(3)])
    with cluster("cudf", 1) as client, dask.config.set({"dataframe.backend": "cudf"}):
        frame = dd.read_parquet(files, columns=["number", "maybe", "word"], blocksize=None)
        for _ in range(3):
            found = frame.compute()
            assert int(found.number.sum()) == expected.number.sum()
            assert int(found.maybe.sum()) == expected.maybe.sum()
            assert int(found.word.str.len().sum()) == expected.word.str.len().sum()
            frame.map_partitions(spoiled, meta=frame._meta).compute()
        report = dask_gpurt.report(client)
        assert report["counters"]["reads.bytes.device"] >= 5 * report["counters"]["reads.bytes.decoded"] > 0
        assert "reads.not-kept" not in report["fallbacks"]


def described(frame: Any) -> tuple[list[Any], pa.Table]:
    """Return what a task gets: the facts about a frame, and its values."""
    index = frame.index
    of_index = [type(index).__name__, index.name, str(index.dtype), len(index), list(index.to_pandas()[:3])]
    dtypes = [(label, str(dtype)) for label, dtype in frame.dtypes.items()]
    of_columns = [repr(frame.columns), frame._data.label_dtype, frame._data.level_names]
    return [*of_index, dtypes, *map(str, of_columns)], frame.to_arrow(preserve_index=True)


def refuse_reads(dask_worker: Any) -> None:
    import cudf

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("cudf reads")

    dask_worker.reader, cudf.read_parquet = cudf.read_parquet, refused


def allow_reads(dask_worker: Any) -> None:
    import cudf

    cudf.read_parquet = dask_worker.reader


def indexed(tmp_path: Path) -> str:
    """Return the path of a file with an index that pandas has stored, days, and numbers with a precision."""
    frame = table(1).to_pandas()[["number", "maybe", "word", "price"]]
    frame["day"] = [np.datetime64("2021-01-01") + int(n) for n in frame.number]
    schema = pa.schema(
        [
            ("day", pa.timestamp("ms")),
            ("word", pa.string()),
            ("price", pa.decimal128(12, 2)),
            ("number", pa.int64()),
        ]
    )
    path = str(tmp_path / "indexed.parquet")
    stored = frame.set_index("number")[["day", "word", "price"]]
    pq.write_table(pa.Table.from_pandas(stored, schema=schema), path, row_group_size=300)
    return path


def test_frames_of_kept_columns_are_those_that_cudf_reads(files: list[str], tmp_path: Path) -> None:
    path = indexed(tmp_path)
    table(2).to_pandas()[["number", "word"]].to_parquet(tmp_path / "numbered.parquet", row_group_size=300)
    time.sleep(1.1 * LEAST_AGE_NS / 1e9)
    reads: list[Any] = [
        lambda: dd.read_parquet(files, columns=["word", "number", "time"], blocksize=None),
        lambda: dd.read_parquet(files, blocksize=None),
        lambda: dd.read_parquet(files[0], columns=["price", "flag"], split_row_groups=1),
        lambda: dd.read_parquet(path, blocksize=None),
        lambda: dd.read_parquet(path, columns=["day"], blocksize=None),
        lambda: dd.read_parquet(path, columns=["price", "word"], index=False, blocksize=None),
        lambda: dd.read_parquet(str(tmp_path / "numbered.parquet"), blocksize=None),
    ]
    named = reads[:1]
    # Whose index is not of its columns.
    others = [lambda: dd.read_parquet(str(tmp_path / "numbered.parquet"), split_row_groups=1)]

    def computed(some: Sequence[Any] = reads) -> list[Any]:
        tasks = [dask.delayed(described)(part) for read in some for part in read().to_delayed()]
        return list(dask.compute(*tasks))

    def compare(found: list[Any], expected: list[Any]) -> None:
        assert len(found) == len(expected)
        for (facts, values), (known, rows) in zip(found, expected, strict=True):
            assert facts == known
            assert values.equals(rows)

    with dask.config.set({"dataframe.backend": "cudf"}), cluster("cudf", 1) as client:
        first, numbered = computed(), computed(others)
        compare(computed(), first)
        for _ in range(2):
            compare(computed(others), numbered)
        compare(computed(), first)
        client.run(refuse_reads)
        again = computed(named)  # of others cudf may have other values than the columns
        compare(again, first[: len(again)])
        client.run(allow_reads)
        pq.write_table(table(5), files[1], row_group_size=300)
        time.sleep(1.1 * LEAST_AGE_NS / 1e9)
        changed = computed()
        more = table(5).num_rows - table(1).num_rows
        total = [sum(values.num_rows for _, values in found) for found in (first, changed)]
        assert total == [total[0], total[0] + 2 * more]
        compare(computed(), changed)
        client.run(refuse_reads)
        compare(computed(named), changed[: len(again)])
        client.run(allow_reads)
        assert "reads.not-kept" not in dask_gpurt.report(client)["fallbacks"]


def test_columns_that_find_no_room_come_back_from_pinned_memory(files: list[str]) -> None:
    def fill(dask_worker: Any) -> None:
        dask_worker.plugins["gpurt"].tiers.columns._room = int

    def kept_now(dask_worker: Any) -> tuple[int, int, int]:
        tiers = dask_worker.plugins["gpurt"].tiers
        return tiers.columns.nbytes, tiers.below.nbytes, tiers.pinned.used

    names = ["number", "maybe", "word"]
    expected = pd.concat([table(number).to_pandas() for number in range(3)])[names]
    with cluster("cudf", 1) as client, dask.config.set({"dataframe.backend": "cudf"}):
        client.run(fill)
        for _ in range(3):
            found = dd.read_parquet(files, columns=names, blocksize=None).compute().to_pandas()
            assert int(found.number.sum()) == expected.number.sum()
            assert int(found.maybe.sum()) == expected.maybe.sum()
            assert list(found.word.fillna("")) == list(expected.word.fillna(""))
            ((kept, below, used),) = client.run(kept_now).values()
            assert (kept, below) == (0, used)
            assert below > 0
        counters = dask_gpurt.report(client)["counters"]
        assert counters["reads.bytes.pinned"] == 2 * counters["reads.bytes.decoded"] > 0
        memory = dask_gpurt.memory_usage(client).to_pandas()
        assert memory[memory.tier == "pinned"].cached.sum() == below
