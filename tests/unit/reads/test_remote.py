"""Test the cache of ranges of files, and reads of remote files through it."""

from __future__ import annotations

import io
import itertools
import pickle
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from dask.dataframe.dask_expr.io import parquet
from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine, PartitionObj
from dask.dataframe.io.parquet.core import ParquetFunctionWrapper
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from benchmarks.chaos.files import Store as StoreOfHost
from benchmarks.chaos.files import StoredFile
from dask_gpurt.dask_hooks.parquet_files import _OfTables, _renewed, _with_files
from dask_gpurt.observe import Metrics
from dask_gpurt.reads import caches, remote
from dask_gpurt.reads.caches import RangeCache
from dask_gpurt.reads.columns import ColumnCache
from dask_gpurt.reads.remote import CachedFiles, Reading, Source, chunks, handed_out, joined, version_of
from dask_gpurt.worker.kept_reads import asked_of


class Stored:
    """Stand in for a file of a store, which tests replace."""

    def __init__(self, data: bytes):
        self.data, self.number, self.fetches = data, 0, 0

    def replace(self, data: bytes) -> None:
        self.data, self.number = data, self.number + 1

    def opened(self) -> Source:
        return Source("path", self.number, len(self.data), self._fetch, lambda: self.number, lambda: None)

    def _fetch(self, start: int, stop: int) -> bytes:
        self.fetches += 1
        return self.data[start:stop]


@pytest.fixture
def cache() -> RangeCache:
    return RangeCache(lambda: 1 << 20, lambda nbytes: None)


def read_all(cache: RangeCache, stored: Stored, between: Any = None, metrics: Metrics | None = None) -> bytes:
    """Read a file in two halves."""
    reading = Reading(cache, metrics or Metrics())

    def read() -> bytes:
        file = reading.open(stored.opened())
        first = bytes(file.read(5))
        if between is not None:
            between()
        return first + bytes(file.read())

    return bytes(reading.run(read, lambda: stored.data))


def test_a_file_that_a_reader_opens_twice_is_fetched_once(cache: RangeCache) -> None:
    """For its footer, and for its columns."""
    stored, reading = Stored(b"0123456789"), Reading(cache, Metrics())

    def read() -> list[bytes]:
        return [bytes(reading.open(stored.opened()).read()) for _ in range(2)]

    assert reading.run(read, list) == [stored.data] * 2
    assert (stored.fetches, cache.nbytes) == (1, 10)


def test_what_is_found_saves_the_time_of_fetching_it(
    cache: RangeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, metrics, stored = [0.0], Metrics(), Stored(b"0123456789")
    monkeypatch.setattr(caches.time, "perf_counter", lambda: now[0])
    fetch = stored._fetch

    def slow(start: int, stop: int) -> bytes:
        now[0] += 0.5 * (stop - start)
        return fetch(start, stop)

    monkeypatch.setattr(stored, "_fetch", slow)
    read_all(cache, stored, metrics=metrics)
    assert metrics.total("reads.seconds.saved") == {}
    read_all(cache, stored, metrics=metrics)
    assert metrics.total("reads.seconds.saved") == {(): 5.0}
    assert metrics.total("reads.hits.{source}") == {("cache",): 2}


def test_a_file_replaced_while_it_is_read_is_read_again_and_not_kept(cache: RangeCache) -> None:
    stored, metrics = Stored(b"0123456789"), Metrics()
    assert read_all(cache, stored, lambda: stored.replace(b"abcdefghij"), metrics) == b"abcdefghij"
    assert cache.nbytes == 0
    assert metrics.total("reads.replaced") == {(): 1}


def test_an_error_from_bytes_of_two_files_is_not_raised(cache: RangeCache) -> None:
    stored = Stored(b"0123456789")

    def mixed() -> None:
        stored.replace(b"abcdefghij")
        raise ValueError("corrupt")

    assert read_all(cache, stored, mixed) == b"abcdefghij"


def test_other_errors_are_raised(cache: RangeCache) -> None:
    def fails() -> None:
        raise ValueError("corrupt")

    with pytest.raises(ValueError, match="corrupt"):
        read_all(cache, Stored(b"0123456789"), fails)
    assert cache.nbytes == 0


def test_a_file_that_ends_early_is_an_error(cache: RangeCache) -> None:
    stored = Stored(b"0123456789")
    with pytest.raises(OSError, match="bytes instead of"):
        read_all(cache, stored, lambda: setattr(stored, "data", b"01"))


class Store:
    """Stand in for a file system of a store: its files, and the ranges that were fetched of them."""

    def __init__(self, **files: bytes):
        self.files = {name: Stored(data) for name, data in files.items()}
        self.fetched: list[tuple[str, int, int]] = []

    async_impl = asynchronous = False

    def _strip_protocol(self, path: str) -> str:
        return path

    def invalidate_cache(self) -> None:
        pass

    def open(self, path: str, mode: str, **_: Any) -> Any:
        return path

    def source(self, path: str) -> Source | None:
        return None if path == "web" else self.files[path].opened()._replace(file=(self, path))

    def cat_ranges(self, paths: Any, starts: Any, ends: Any, **_: Any) -> list[bytes]:
        firsts, lasts = ([each] * len(paths) if each is None else each for each in (starts, ends))
        self.fetched += zip(paths, firsts, lasts, strict=True)
        return [
            self.files[path].data[start:stop] for path, start, stop in zip(paths, firsts, lasts, strict=True)
        ]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store(a=b"0123456789", b=b"abcdefg", web=b"of the web")
    monkeypatch.setattr(remote, "of_fsspec", store.source)
    return store


def ranges(cache: RangeCache, store: Store, *asked: Any, then: Any = lambda found: found) -> Any:
    """Read ranges as cudf does, and do something with them as a part of that read."""

    def through() -> Any:
        return then(CachedFiles(store, reading).cat_ranges(*asked))

    reading = Reading(cache, Metrics())
    return reading.run(through, lambda: then(store.cat_ranges(*asked)))


def test_files_that_are_fetched_as_a_whole_come_from_the_cache_without_a_copy(
    cache: RangeCache, store: Store
) -> None:
    first = ranges(cache, store, ["a", "b"], None, None)
    assert first == [b"0123456789", b"abcdefg"]
    assert store.fetched == [("a", 0, 10), ("b", 0, 7)]
    second = ranges(cache, store, ["b", "a"], None, None)
    assert second[0] is first[1]
    assert second[1] is first[0]
    assert ranges(cache, store, ["a", "a", "b"], [2, 8, 0], [4, 10, 1]) == [b"23", b"89", b"a"]
    assert len(store.fetched) == 2


def test_only_the_ranges_that_are_not_there_are_fetched(cache: RangeCache, store: Store) -> None:
    assert ranges(cache, store, ["a", "a"], [2, 2], [5, 5]) == [b"234"] * 2
    assert store.fetched == [("a", 2, 5)]
    store.fetched.clear()
    assert ranges(cache, store, ["a", "b"], None, None) == [b"0123456789", b"abcdefg"]
    assert store.fetched == [("a", 0, 2), ("a", 5, 10), ("b", 0, 7)]


@pytest.mark.parametrize("asked", [(["web", "a"], None, None), (["a", "b"], [-3, -3], [None, None])])
def test_other_ranges_are_the_stores(cache: RangeCache, store: Store, asked: Any) -> None:
    expected = store.cat_ranges(*asked)
    assert ranges(cache, store, *asked) == expected
    assert cache.nbytes == 0


def test_columns_of_a_file_of_a_store_are_known_by_it_and_its_version(
    cache: RangeCache, store: Store
) -> None:
    def read(found: list[bytes]) -> Any:
        return found, asked_of(found, "cudf", ["x"], [[0, 1], [2]]), handed_out(found[:1])

    for _ in range(2):
        found, asked, others = ranges(cache, store, ["a", "b"], None, None, then=read)
        assert asked.parts == (((store, "a"), (0, 1), (False, True)), ((store, "b"), (2,), (False, True)))
        assert asked.columns == ("x",)
        assert asked.versions() == (0, 0)
        assert asked.are_lasting((0, 0))
        assert asked.are_still((0, 0))
        assert others == ()
    assert asked_of(found, "cudf") is None  # the read is over
    store.files["b"].replace(b"ABCDEFG")
    assert ranges(cache, store, ["a", "b"], None, None, then=read)[1].versions() == (0, 1)


def test_columns_of_bytes_of_two_files_are_not_kept(cache: RangeCache, store: Store) -> None:
    still = []

    def read(found: list[bytes]) -> list[bytes]:
        if (asked := asked_of(found, "cudf")) is not None:
            store.files["a"].replace(b"ABCDEFGHIJ")
            still.append(asked.are_still((0,)))
        return found

    assert ranges(cache, store, ["a"], None, None, then=read) == [b"ABCDEFGHIJ"]
    assert still == [False]


@pytest.mark.parametrize(
    ("known", "version"),
    [
        ({"ETag": '"a"', "size": 3}, ("ETag", '"a"')),
        ({"generation": 5}, ("generation", "5")),
        ({b"ETag": b'"a"'}, ("ETag", '"a"')),
        ({"ETag": 'W/"a"'}, None),
        ({"ETag": ""}, None),
        ({"size": 3, "mtime": 1.0, "LastModified": "now"}, None),
    ],
)
def test_only_what_tells_contents_apart_is_a_version(known: Any, version: Any) -> None:
    assert version_of(known) == version


def test_the_chunks_of_columns_are_all_that_arrow_reads() -> None:
    written = io.BytesIO()
    table = pa.table(
        {
            "a": range(100),
            "b.c": ["x"] * 100,
            "n": [{"a": at, "l": [at]} for at in range(100)],
            "z": range(100),
        }
    )
    pq.write_table(table, written, row_group_size=30)
    data = written.getvalue()
    footer = pq.read_metadata(io.BytesIO(data))
    for columns in (["a"], ["b.c", "z"], ["n"], None):
        wanted = list(chunks(footer, columns, range(footer.num_row_groups)))
        blank = bytearray(len(data))
        for start, stop in wanted:
            blank[start:stop] = data[start:stop]
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        blank[start:] = data[start:]
        assert pq.read_table(io.BytesIO(bytes(blank)), columns=columns) == pq.read_table(
            io.BytesIO(data), columns=columns
        )


def test_near_ranges_are_joined() -> None:
    far = 10 << 20
    assert joined([(far, far + 5), (4, 10), (0, 3), (20, 30)]) == [(0, 30), (far, far + 5)]


def test_a_file_is_not_read_by_a_file_system_that_had_the_same_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask keeps the last one that it has pickled, by its address; it may be gone, with its credentials."""
    stores = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"x": [name]}), tmp_path / name / "file")
        stores.append(fs.SubTreeFileSystem(str(tmp_path / name), fs.LocalFileSystem()))
    before = id(stores[1]), pickle.dumps(stores[0])
    monkeypatch.setattr(parquet.FragmentWrapper, "_filesystem_pickle_cache", before)
    file = parquet.FragmentWrapper(ds.ParquetFileFormat().make_fragment("file", stores[1]), stores[1])
    assert _renewed(file).fragment.to_table()["x"].to_pylist() == ["b"]


# ---- tables of files, decoded -----------------------------------------------------------------------

NUMBERS = 400


def content(first: int) -> pd.DataFrame:
    """Return a frame of most types, with an index and nulls."""
    rows = range(first, first + NUMBERS)
    return pd.DataFrame(
        {
            "x": rows,
            "real": [None if row % 7 == 0 else row / 3 for row in rows],
            "word": [None if row % 5 == 0 else f"w{row}" for row in rows],
            "when": pd.Timestamp("2020-01-01") + pd.to_timedelta(list(rows), unit="D"),
            "kind": pd.Categorical([f"k{row % 3}" for row in rows]),
        },
        index=pd.Index([f"i{row}" for row in rows], name="label"),
    )


class Folder:
    """Hold a file in a store of this host."""

    def __init__(self, path: Path):
        self.path = str(path / "0.parquet")
        self.columns = ColumnCache(lambda: 1 << 24, lambda nbytes: None)
        self.metrics = Metrics()

    def write(self, first: int, *, index: str = "label") -> None:
        new, frame = Path(f"{self.path}.new"), content(first)
        if index == "unnamed":
            frame.index.name = None
        (frame.reset_index() if index == "none" else frame).to_parquet(new, row_group_size=100)
        new.replace(self.path)

    def read(self, columns: list[Any], *, keeping: bool = True, **how: Any) -> pa.Table:
        given: list[Any] = [how.get("groups") or [None], columns, how.get("schema"), how.get("filters")]
        given += how.get("partitions", ([], None))
        options = how.get("options", {})
        if not keeping:
            return ArrowDatasetEngine._read_table(self.path, StoreOfHost(), *given, **options)
        reading = Reading(RangeCache(int, lambda nbytes: None), self.metrics, self.columns)
        files = CachedFiles(StoreOfHost(), reading)

        def read() -> Any:
            return _OfTables._read_table(self.path, files, *given, **options)

        return reading.run(read, lambda: self.read(columns, keeping=False, **how))

    @property
    def decoded(self) -> float:
        return self.metrics.total("reads.bytes.{source}").get(("decoded",), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path)
    found.write(0)
    return found


HOWS: dict[str, dict[str, Any]] = {
    "whole": {},
    "groups": {"groups": [1, 3]},
    "filters": {"filters": [("x", ">", 150), ("word", "!=", "w152")]},
    "filtered groups": {"filters": [[("real", "<", 50.0)], [("x", "==", 399)]], "groups": [0, 1, 3]},
    "no rows": {"filters": [("x", "<", 0), ("real", "<", 1e9)]},
}


@pytest.mark.parametrize("index", ["label", "none", "unnamed"])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_tables_are_as_arrow_reads_them_and_columns_are_decoded_once(
    folder: Folder, how: Any, index: str
) -> None:
    folder.write(0, index=index)
    how = how | {"schema": pq.read_schema(folder.path)}
    last: Any = None if index == "unnamed" else "label"  # as Dask asks for such an index
    for columns in (["x", "word"], ["when", "x", last], ["kind", "word"], ["real", last], ["x"]):
        for _ in range(2):
            found, expected = (
                folder.read(list(columns), **how),
                folder.read(list(columns), keeping=False, **how),
            )
            assert found.equals(expected, check_metadata=True)
            for one, other in zip(found.columns, expected.columns, strict=True):
                assert list(map(len, one.chunks)) == list(map(len, other.chunks))
            pd.testing.assert_frame_equal(found.to_pandas(), expected.to_pandas())
    before = folder.decoded
    folder.read(["word", "when"] if index == "none" else ["real", last], **how)
    assert folder.decoded == before > 0


def test_kept_columns_are_in_memory_that_the_system_gets_back(folder: Folder) -> None:
    """Arrow's own allocator leaves what is freed to the thread that had allocated it."""
    before = pa.system_memory_pool().bytes_allocated()
    folder.read(["x", "word"])
    kept = folder.columns.nbytes
    assert pa.system_memory_pool().bytes_allocated() - before >= kept > 0
    folder.columns.release(kept)
    assert pa.system_memory_pool().bytes_allocated() == before


def test_pieces_of_one_partition_make_one_table(folder: Folder) -> None:
    """As by Dask's engine, while frames of its subclasses repeat the index for each piece."""
    how: tuple[Any, ...] = (content(0)[["x"]], ["x"], False, None, {}, {"schema": None})
    plain = ParquetFunctionWrapper(ArrowDatasetEngine, StoreOfHost(), *how)
    files = CachedFiles(StoreOfHost(), Reading(RangeCache(int, lambda nbytes: None), folder.metrics))
    pieces = [{"piece": (folder.path, [group], None)} for group in (0, 1)]
    pd.testing.assert_frame_equal(_with_files(plain, files)(pieces), plain(pieces))


@pytest.mark.parametrize("filters", [None, [("x", "<", 50)]])
def test_values_of_paths_are_in_all_tables(tmp_path: Path, filters: Any) -> None:
    """Whether a read asks for them or not, and also if nothing else is missing."""
    pq.write_to_dataset(pa.Table.from_pandas(content(0), preserve_index=False), tmp_path, ["kind"])
    folder = Folder(tmp_path / "kind=k1")
    folder.path = str(next((tmp_path / "kind=k1").glob("*.parquet")))
    how = {"schema": ds.dataset(tmp_path, partitioning="hive").schema, "filters": filters}
    how["partitions"] = [PartitionObj("kind", pd.Index(["k0", "k1", "k2"]))], [("kind", "k1")]
    how["options"] = {"dataset": {"partitioning": "hive"}}
    for columns in (["x", "kind"], ["x"], ["word"], ["kind", "word"], ["x", "word"], ["x"]):
        found, expected = folder.read(columns, **how), folder.read(columns, keeping=False, **how)
        assert found.select(expected.column_names).equals(expected)
        for key in [key for key in folder.columns._order if key[1] == "kind"]:
            folder.columns._drop(key)
    before = folder.decoded
    folder.read(["x", "word"], **how)
    assert folder.decoded - before < 1000  # the values of the path only


def test_tables_by_other_filters_share_nothing(folder: Folder) -> None:
    schema = pq.read_schema(folder.path)
    rows = [folder.read(["x"], filters=[("x", "<", most)], schema=schema).num_rows for most in (10, 20, 10)]
    assert rows == [10, 20, 10]
    assert folder.read(["x"], schema=schema).num_rows == NUMBERS


@pytest.mark.parametrize("at", range(1, 8))
def test_a_file_replaced_between_any_two_calls_of_its_store_is_not_mixed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Whether its version is asked for, its footer read, or its columns."""
    folder.read(["x"])
    calls = count(1)

    def replacing(original: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                folder.write(1000)
            return original(*args, **kwargs)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(StoreOfHost, "info", replacing(StoreOfHost.info))
        patch.setattr(StoredFile, "_fetch_range", replacing(StoredFile._fetch_range))
        found = folder.read(["x", "word"]).to_pandas()
    assert [f"w{x}" for x in found.x if x % 5] == list(found.word.dropna())
    fresh = folder.read(["x", "word"]).to_pandas()
    pd.testing.assert_frame_equal(fresh, content(1000 if next(calls) > at else 0)[["x", "word"]])


# ---- the cache of ranges -----------------------------------------------------------------------------

SIZE = 64


def bytes_of(file: int, version: int) -> bytes:
    """Return bytes that differ from file to file and from version to version."""
    return bytes((at * 7 + file * 31 + version * 101) % 251 for at in range(SIZE))


def read_range(
    cache: RangeCache, file: int, version: int, start: int, stop: int
) -> tuple[bytes, dict[int, bytes]]:
    """Read a range as a reader does; return it, and the parts that were not in the cache."""
    found, fetched = b"", {}
    for part in cache.parts(file, version, start, stop):
        data = part.data
        if data is None:
            data = memoryview(bytes_of(file, version)[part.start : part.stop])
            fetched[part.start] = bytes(data)
        found += bytes(data)
    return found, fetched


SPANS = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), SPANS, st.integers(0, 150)), max_size=60)


@given(steps=STEPS)
def test_ranges_are_of_their_file_and_version_and_fit(steps: list[tuple[int, int, list[int], int]]) -> None:
    room, told = 150, [0]
    cache = RangeCache(lambda: room, told.append)
    for file, version, (start, stop), room in steps:  # the cache asks for it
        cache.fit()
        assert cache.nbytes <= room
        found, fetched = read_range(cache, file, version, start, stop)
        assert found == bytes_of(file, version)[start:stop]
        cache.keep(file, version, fetched)
        assert told[-1] == cache.nbytes <= room
        held = (
            len(part.data)
            for file, version in itertools.product(range(3), range(2))
            for part in cache.parts(file, version, 0, SIZE)
            if part.data is not None
        )
        assert sum(held) == cache.nbytes


def test_a_table_larger_than_the_cache_does_not_evict_itself() -> None:
    cache = RangeCache(lambda: 10 * SIZE, lambda nbytes: None)
    hits = []
    for _ in range(5):
        kept = 0
        for file in range(20):
            _, fetched = read_range(cache, file, 0, 0, SIZE)
            kept += not fetched
            cache.keep(file, 0, fetched)
        hits.append(kept)
    assert min(hits[1:]) >= 5


def test_a_cache_that_closes_drops_what_another_thread_keeps_just_now() -> None:
    closing = threading.Thread(target=lambda: cache.close())

    def room() -> int:
        closing.start()
        closing.join(0.1)  # it has to wait for this thread
        return 1000

    cache = RangeCache(room, lambda nbytes: None)
    cache.keep(0, 0, {0: b"abc"})
    closing.join()
    assert cache.nbytes == 0
