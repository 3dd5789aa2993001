"""Test the cache of ranges of files."""

from __future__ import annotations

import itertools
import threading

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.reads.caches import RangeCache

SIZE = 64


def contents(file: int, version: int) -> bytes:
    """Return bytes that differ from file to file and from version to version."""
    return bytes((at * 7 + file * 31 + version * 101) % 251 for at in range(SIZE))


def read(cache: RangeCache, file: int, version: int, start: int, stop: int) -> tuple[bytes, dict[int, bytes]]:
    """Read a range as a reader does; return it, and the parts that were not in the cache."""
    found, fetched = b"", {}
    for part in cache.parts(file, version, start, stop):
        data = part.data
        if data is None:
            data = memoryview(contents(file, version)[part.start : part.stop])
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
        found, fetched = read(cache, file, version, start, stop)
        assert found == contents(file, version)[start:stop]
        cache.keep(file, version, fetched)
        assert told[-1] == cache.nbytes <= room
        held = (
            len(part.data)
            for file, version in itertools.product(range(3), range(2))
            for part in cache.parts(file, version, 0, SIZE)
            if part.data is not None
        )
        assert sum(held) == cache.nbytes


@given(spans=st.lists(SPANS, min_size=1))
def test_what_was_kept_is_found(spans: list[list[int]]) -> None:
    cache = RangeCache(lambda: SIZE, lambda nbytes: None)
    for start, stop in spans:
        cache.keep(0, 0, read(cache, 0, 0, start, stop)[1])
        assert read(cache, 0, 0, start, stop) == (contents(0, 0)[start:stop], {})


def test_two_readers_of_one_range_keep_it_once() -> None:
    cache = RangeCache(lambda: 1000, lambda nbytes: None)
    cache.keep(0, 0, {10: contents(0, 0)[10:30]})
    cache.keep(0, 0, {0: contents(0, 0)[0:40]})
    assert cache.nbytes == 40
    assert read(cache, 0, 0, 0, 40) == (contents(0, 0)[:40], {})


def test_a_table_larger_than_the_cache_does_not_evict_itself() -> None:
    cache = RangeCache(lambda: 10 * SIZE, lambda nbytes: None)
    hits = []
    for _ in range(5):
        kept = 0
        for file in range(20):
            _, fetched = read(cache, file, 0, 0, SIZE)
            kept += not fetched
            cache.keep(file, 0, fetched)
        hits.append(kept)
    assert min(hits[1:]) >= 5


def test_a_closed_cache_keeps_nothing() -> None:
    told = [0]
    cache = RangeCache(lambda: 1000, told.append)
    cache.keep(0, 0, {0: b"abc"})
    cache.close()
    cache.keep(0, 0, {0: b"abc"})
    assert cache.nbytes == told[-1] == 0


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
