"""Write and read files through bounce buffers: late copies, several buffers, truncated files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.base import PAGE, Fence
from dask_gpurt.device.staging import BounceBuffers, Chunk, read_pages, whole_pages


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
