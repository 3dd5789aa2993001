"""Choose the tasks that leave their slot, how many, and the number of threads that read files."""

from __future__ import annotations

import os
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.reads.policy import (
    MAX_BESIDE,
    MIN_READS,
    DetachedReads,
    ReadConcurrency,
    ReadTimes,
    ThreadTime,
)
from dask_gpurt.worker import reading
from dask_gpurt.worker.reading import NTHREADS, set_threads, threads_of


def test_a_task_that_reads_leaves_its_slot_and_counts_until_it_ends() -> None:
    aside = DetachedReads(1)
    assert aside.add("a") == "a"
    assert "a" in aside
    assert aside.add("b") is None
    assert aside.add("a") is None  # a second read in the same task
    assert aside.end("a") == "b"
    assert "a" not in aside
    assert "b" in aside
    assert aside.end("b") is None


def test_the_one_that_has_read_first_leaves_first() -> None:
    aside = DetachedReads(2)
    assert [aside.add(key) for key in "abcd"] == ["a", "b", None, None]
    assert aside.end("c") is None  # it ended in its slot
    assert aside.end("b") == "d"
    assert aside.end("a") is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_never_more_are_aside_than_the_limit_and_all_that_may_are(seed: int, limit: int) -> None:
    rng, aside = random.Random(seed), DetachedReads(limit)
    begun: set[int] = set()
    for key in range(200):
        if begun and rng.random() < 0.5:
            ends = rng.choice(sorted(begun))
            begun.discard(ends)
            told = aside.end(ends)
        else:
            begun.add(key)
            told = aside.add(key)
        assert told is None or told in aside
        assert sum(one in aside for one in begun) == min(limit, len(begun))


@pytest.mark.parametrize(
    ("cores", "allowed", "gpus", "threads"),
    [
        (16, 16, 1, 16),
        (128, 64, 8, 16),  # bound to one of two sockets, which four GPUs share
        (128, 8, 8, 8),
        (256, 256, 2, 32),
        (8, 8, 8, 4),
        (8, 8, 0, 8),
    ],
)
def test_threads_are_the_share_of_the_cores(cores: int, allowed: int, gpus: int, threads: int) -> None:
    assert threads_of(cores, allowed, gpus) == threads


@pytest.mark.parametrize("before", [None, "3"])
def test_the_variable_is_as_it_was_afterwards(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NTHREADS, raising=False)
    if before is not None:
        monkeypatch.setenv(NTHREADS, before)
    restore = set_threads(7)
    assert os.environ[NTHREADS] == "7"
    restore()
    assert os.environ.get(NTHREADS) == before


def test_gpus_that_are_named_are_counted_without_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.diagnostics.nvml.device_get_count", lambda: pytest.fail("it is asked"))
    monkeypatch.setattr(reading, "CPU_COUNT", 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5a7e,0,1")
    monkeypatch.delenv(NTHREADS, raising=False)
    restore = reading.set_reader_threads(None)
    assert os.environ[NTHREADS] == "16"
    restore()


# ---- how many tasks leave their slot --------------------------------------------------------------

MIB = 2**20


def read(seconds: float, waited_s: float, nbytes: int = 10 * MIB) -> ReadTimes:
    times = ReadTimes()
    times.add(seconds, waited_s, nbytes)
    return times


def after(reads: list[tuple[ReadTimes, float]], least: int = 0) -> int:
    pace = ReadConcurrency(least)
    assert pace.beside == least
    for times, computed_s in reads:
        pace.note(times, computed_s)
    return pace.beside


SLOW, FAST = (read(1.1, 1.0), 0.9), (read(0.1, 0.01), 0.9)
#: What tasks have read and computed, and how many of them leave their slot then.
LEAVING: dict[str, tuple[list[tuple[ReadTimes, float]], int]] = {
    "one hides the waits": ([(read(1.1, 1.0), 1.2)] * 9, 1),
    "three hide the waits": ([(read(1.1, 1.0), 0.4)] * 9, 3),
    "no more than are allowed": ([(read(9.1, 9.0), 0.1)] * 9, MAX_BESIDE),
    "compute of others hides waits": (
        [(read(1.1, 1.0), 0.1), (ReadTimes(), 0.6), (ReadTimes(), 0.6)] * 9,
        1,
    ),
    "too little is known": ([(read(1.1, 1.0), 0.4)] * (MIN_READS - 1), 0),
    "files have become fast": ([SLOW] * 9 + [FAST] * 20, 0),
    "files have become slow": ([FAST] * 9 + [SLOW] * 2, 1),
}


@pytest.mark.parametrize("name", LEAVING)
def test_as_many_leave_as_hide_the_waits(name: str) -> None:
    reads, beside = LEAVING[name]
    assert after(reads) == beside


@given(
    seconds=st.floats(0.001, 10),
    share=st.floats(0, 1),
    computed_s=st.floats(0, 10),
    mib_per_s=st.floats(1, 10_000),
)
def test_none_leave_for_a_fast_store_nor_where_reads_compute(
    seconds: float, share: float, computed_s: float, mib_per_s: float
) -> None:
    waited_s = share * seconds
    found = after([(read(seconds, waited_s, int(mib_per_s * MIB * waited_s)), computed_s)] * 4)
    assert 0 <= found <= MAX_BESIDE
    if share < 0.49 or mib_per_s > 257:
        assert found == 0


def test_the_time_of_a_thread_is_divided_into_compute_and_waits() -> None:
    before = ThreadTime.now()
    began = time.thread_time()
    while time.thread_time() < began + 0.05:
        pass
    assert ThreadTime.now().ran_s - before.ran_s >= 0.04
    before = ThreadTime.now()
    time.sleep(0.02)
    seconds, waited_s = ThreadTime.now().since(before)
    assert seconds >= waited_s >= 0.9 * 0.02
