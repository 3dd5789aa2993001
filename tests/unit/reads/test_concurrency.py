"""Choose how many tasks leave their slot from how long their reads wait."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.reads.policy import MAX_BESIDE, MIN_READS, ReadConcurrency, ReadTimes, ThreadTime

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


def test_as_many_leave_as_hide_the_waits() -> None:
    assert after([(read(1.1, 1.0), 1.2)] * 9) == 1
    assert after([(read(1.1, 1.0), 0.4)] * 9) == 3
    assert after([(read(9.1, 9.0), 0.1)] * 9) == MAX_BESIDE


def test_compute_of_other_tasks_hides_waits_too() -> None:
    read_and_others = [(read(1.1, 1.0), 0.1), (ReadTimes(), 0.6), (ReadTimes(), 0.6)]
    assert after(read_and_others * 9) == 1


def test_nothing_leaves_before_enough_is_known() -> None:
    assert after([(read(1.1, 1.0), 0.4)] * (MIN_READS - 1)) == 0


def test_files_that_change_are_learnt() -> None:
    slow, fast = (read(1.1, 1.0), 0.9), (read(0.1, 0.01), 0.9)
    assert after([slow] * 9 + [fast] * 20) == 0
    assert after([fast] * 9 + [slow] * 2) > 0


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
