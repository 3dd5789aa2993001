"""Test reads of remote files through the cache of ranges."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dask_gpurt.observe import Metrics
from dask_gpurt.reads.ranges import RangeCache
from dask_gpurt.reads.remote import Reading, Source, chunks, joined, version_of


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


def test_the_second_read_is_served_from_the_cache(cache: RangeCache) -> None:
    stored = Stored(b"0123456789")
    assert [read_all(cache, stored) for _ in range(2)] == [stored.data] * 2
    assert stored.fetches == 2


def test_a_file_replaced_between_reads_is_read_anew(cache: RangeCache) -> None:
    stored = Stored(b"0123456789")
    read_all(cache, stored)
    stored.replace(b"abcdefghij")
    assert read_all(cache, stored) == stored.data
    assert cache.nbytes == 10  # of the new one only


def test_a_file_replaced_while_it_is_read_is_read_again_and_not_kept(cache: RangeCache) -> None:
    stored, metrics = Stored(b"0123456789"), Metrics()
    assert read_all(cache, stored, lambda: stored.replace(b"abcdefghij"), metrics) == b"abcdefghij"
    assert cache.nbytes == 0
    assert metrics.total("reads.replaced") == {(): 1}


def test_a_file_partly_cached_that_is_replaced_meanwhile_is_read_again(cache: RangeCache) -> None:
    stored = Stored(b"0123456789")
    cache.keep("path", 0, {0: b"01234"})
    assert read_all(cache, stored, lambda: stored.replace(b"abcdefghij")) == b"abcdefghij"


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
