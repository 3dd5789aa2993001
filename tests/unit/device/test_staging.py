"""Copy through bounce buffers: each byte once, nothing in flight after an error, copies after the end."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.base import PAGE, Fence
from dask_gpurt.device.copies import Copy
from dask_gpurt.device.staging import BounceBuffers, Chunk, Staging, read_pages, whole_pages

CHUNK = 64


class Late:
    """Copy as a device does: the bytes arrive only when a thread waits for them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self._lock = threading.Lock()
        self._fail_at = fail_at
        self.started = self.in_flight = 0

    def start(self, copy: Copy) -> Fence:
        with self._lock:
            self.started += 1
            fails = self.started == self._fail_at
            self.in_flight += 1

        def wait() -> None:
            ctypes.memmove(copy.to, copy.at, copy.nbytes)
            with self._lock:
                self.in_flight -= 1
            if fails:
                raise RuntimeError("the device refuses")

        return wait


def new(late: Late, threads: int = 3) -> Staging:
    return Staging(
        late.start, BounceBuffers(2, lambda nbytes: np.full(nbytes, 255, np.uint8), CHUNK), threads
    )


def memory(sizes: list[int]) -> tuple[np.ndarray, np.ndarray, list[Copy]]:
    """Return bytes, zeros, and copies of the given sizes from these to those, with a gap behind each."""
    ends = list(accumulate((size + 1 for size in sizes), initial=0))
    source = np.random.default_rng(sum(sizes)).integers(1, 256, ends[-1], np.uint8)
    target = np.zeros(ends[-1], np.uint8)
    starts = zip(ends, sizes, strict=False)
    to, at = int(target.ctypes.data), int(source.ctypes.data)
    return source, target, [Copy(to + start, at + start, size) for start, size in starts]


def copied(source: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Return what the target has to hold: the bytes, and zeros in the gaps."""
    expected = source.copy()
    expected[[end - 1 for end in accumulate(size + 1 for size in sizes)]] = 0
    return expected


WAYS: list[Callable[[Staging], Callable[..., Fence]]] = [lambda s: s.to_host, lambda s: s.to_device]


@pytest.mark.parametrize("way", WAYS, ids=["to-host", "to-device"])
@given(sizes=st.lists(st.integers(0, 20 * CHUNK), max_size=8), threads=st.integers(1, 5))
def test_each_byte_is_copied_and_no_other(
    way: Callable[[Staging], Callable[..., Fence]], sizes: list[int], threads: int
) -> None:
    late, ordered = Late(), []
    own = new(late, threads)
    source, target, copies = memory(sizes)
    way(own)(copies, lambda: ordered.append(threading.current_thread().name), None)()
    own.close()
    assert np.array_equal(target, copied(source, sizes))
    chunks = sum(-(-size // CHUNK) for size in sizes)
    assert (late.started, late.in_flight, len(ordered)) == (chunks, 0, min(threads, chunks))
    assert all(name.startswith("gpurt-stage") for name in ordered)


@pytest.mark.parametrize("way", WAYS, ids=["to-host", "to-device"])
@pytest.mark.parametrize("fail_at", [1, 5, 12])
def test_no_copy_is_in_flight_after_one_has_failed(
    way: Callable[[Staging], Callable[..., Fence]], fail_at: int
) -> None:
    late = Late(fail_at)
    own = new(late)
    source, target, copies = memory([12 * CHUNK])
    fence = way(own)(copies, lambda: None, (source, target))
    with pytest.raises(RuntimeError, match="the device refuses"):
        fence()
    assert late.in_flight == 0
    source, target, copies = memory([3 * CHUNK])  # and the threads copy on
    way(own)(copies, lambda: None, (source, target))()
    own.close()
    assert np.array_equal(target, copied(source, [3 * CHUNK]))


@pytest.mark.parametrize("way", WAYS, ids=["to-host", "to-device"])
def test_the_calling_thread_copies_after_the_end(way: Callable[[Staging], Callable[..., Fence]]) -> None:
    own = new(Late())
    own.close()
    source, target, copies = memory([5 * CHUNK, 1])
    here: list[str] = []
    way(own)(copies, lambda: here.append(threading.current_thread().name), (source, target))()
    assert np.array_equal(target, copied(source, [5 * CHUNK, 1]))
    assert here == [threading.current_thread().name]


@pytest.mark.parametrize("way", WAYS, ids=["to-host", "to-device"])
def test_without_pinned_buffers_the_device_copies_by_itself(
    way: Callable[[Staging], Callable[..., Fence]], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> np.ndarray:
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    own = Staging(Late().start, BounceBuffers(2, refuse, CHUNK), 1)
    for _ in range(2):
        source, target, copies = memory([5 * CHUNK, 1])
        way(own)(copies, lambda: None, (source, target))()
        assert np.array_equal(target, copied(source, [5 * CHUNK, 1]))
    own.close()
    assert caplog.text.count("no pinned buffers (cudaErrorMemoryAllocation: out of memory)") == 1


def test_memory_is_kept_until_it_is_copied() -> None:
    class Owner:
        pass

    import weakref

    begun, go_on = threading.Event(), threading.Event()
    own, owner = new(Late()), Owner()
    gone = weakref.ref(owner)
    source, target, copies = memory([CHUNK])

    def order() -> None:
        begun.set()
        go_on.wait(10)

    fence = own.to_host(copies, order, owner)
    del owner
    assert begun.wait(10)
    assert gone() is not None
    go_on.set()
    fence()
    own.close()
    assert np.array_equal(target, copied(source, [CHUNK]))


# ---- files -------------------------------------------------------------------------------------------


def aligned(nbytes: int) -> np.ndarray:
    memory = np.full(nbytes + PAGE, 255, np.uint8)
    return memory[-memory.ctypes.data % PAGE :][:nbytes]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def late(source: np.ndarray, memory: np.ndarray, begun: list[int]) -> Fence:
    """Copy asynchronously, as a device does: the bytes arrive only when a thread waits for them."""
    begun.append(source.size)

    def wait() -> None:
        begun.remove(source.size)
        np.copyto(memory, source)

    return wait


@given(sizes=st.lists(st.integers(1, 3 * PAGE), max_size=6, unique=True), number=st.integers(1, 3))
def test_chunks_are_written_once_they_have_been_copied(fd: int, sizes: list[int], number: int) -> None:
    os.ftruncate(fd, 0)
    sources = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    begun: list[int] = []

    def chunks() -> Iterator[Chunk]:
        at = 0
        for source in sources:
            assert len(begun) < number  # a buffer is reused only once it has been written
            yield Chunk(source.size, at, lambda memory, source=source: late(source, memory, begun))
            at += whole_pages(source.size)

    BounceBuffers(number, aligned).write(fd, chunks())
    assert not begun
    padded = [source.tobytes() + bytes(-source.size % PAGE) for source in sources]
    assert os.pread(fd, 1 << 20, 0) == b"".join(padded)


def test_each_thread_has_its_own_buffers() -> None:
    buffers = BounceBuffers(2, aligned)
    own = buffers.of_thread()
    assert [memory.ctypes.data for memory in buffers.of_thread()] == [memory.ctypes.data for memory in own]
    assert all(memory.ctypes.data % PAGE == 0 for memory in own)
    with ThreadPoolExecutor(1) as threads:
        others = threads.submit(buffers.of_thread).result()
    assert not any(np.shares_memory(one, other) for one in own for other in others)


@pytest.mark.parametrize("least", [1, PAGE, PAGE + 5])
def test_pages_are_read_as_far_as_the_file_goes(fd: int, least: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 2 * PAGE + 5, np.uint8)
    os.pwrite(fd, content.data, 0)
    memory = aligned(2 * PAGE)
    read_pages(fd, memory, PAGE, least)
    assert (memory[:least] == content[PAGE:][:least]).all()
    with pytest.raises(EOFError):
        read_pages(fd, memory, PAGE, PAGE + 6)
