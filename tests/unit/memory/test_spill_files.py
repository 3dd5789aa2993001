"""Read files of spilled objects back unchanged, or raise an error that explains why not."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.disk import CorruptFile, DiskTier, aligned
from dask_gpurt.memory.ledger import NoRoom, Tier
from tests.helpers.small_tiers import content, frames


@pytest.fixture(params=["direct", "buffered"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    tier = DiskTier(str(tmp_path))
    tier.direct = request.param == "direct"
    yield tier
    tier.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 1, 4064, 4068, 4096, (4 << 20) - 36, 4 << 20, (9 << 20) + 5])
def test_files_of_any_size(disk: DiskTier, size: int) -> None:
    given = frames(size, 3, cut=1 << 20)
    disk["a"] = given
    assert content(disk["a"]) == content(given)
    [file] = Path(disk.path).iterdir()
    assert file.stat().st_size == disk.used
    assert file.stat().st_mode & 0o077 == 0


def test_parts_are_read_into_memory_that_is_there(disk: DiskTier) -> None:
    given = frames(600, 5000, 0, 4096)
    disk["a"] = given
    for which, part in enumerate(given.buffers):
        room = aligned(disk.part_room("a", which))
        [read] = disk.part("a", which, room)
        assert bytes(read) == b"".join(bytes(piece) for piece in part)
        assert not read.size or np.shares_memory(read, room)


@given(at=st.integers(0, 8 + 1000 - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed(at: int, bit: int) -> None:
    disk = DiskTier(os.environ.get("TMPDIR", "/tmp"))
    try:
        disk["a"] = frames(600, 400, seed=1)
        disk["b"] = frames(10)
        path, other = sorted(Path(disk.path).iterdir())
        data = bytearray(path.read_bytes())
        assert len(data) == 4096  # whole pages
        data[at] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(CorruptFile, match="recomputed") as caught:
            disk["a"]
        assert caught.value.filename == str(path)
        assert str(path) in str(pickle.loads(pickle.dumps(caught.value)))
        assert content(disk["b"]) == content(frames(10))
        del disk["a"]
        disk.settle()
        assert list(Path(disk.path).iterdir()) == [other]
    finally:
        disk.close()


def test_a_file_that_is_short_or_gone_is_noticed(disk: DiskTier) -> None:
    disk["a"] = frames(5000)
    [path] = Path(disk.path).iterdir()
    os.truncate(path, 4096)
    with pytest.raises(CorruptFile, match="truncated"):
        disk["a"]
    path.unlink()
    with pytest.raises(CorruptFile, match="No such file") as caught:
        disk["a"]
    assert caught.value.filename == str(path)
    del disk["a"]
    assert disk.used == 0


def test_one_buffer_is_read_alone(disk: DiskTier) -> None:
    given = frames(5000, 0, 9000, 3, seed=1)
    disk["a"] = given
    for which, expected in enumerate(content(given)[1]):
        (part,) = disk.part("a", which)
        assert part.tobytes() == expected
    [path] = Path(disk.path).iterdir()
    data = bytearray(path.read_bytes())
    data[len(given.header) + 5000 + 4000] ^= 1
    path.write_bytes(data)
    assert disk.part("a", 0)[0].tobytes() == content(given)[1][0]
    with pytest.raises(CorruptFile):
        disk.part("a", 2)


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_loses_nothing(disk: DiskTier, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    disk["a"] = frames(1000, seed=1)
    disk["b"] = frames(2000, seed=2)
    used, files = disk.used, sorted(Path(disk.path).iterdir())
    write, calls = os.pwrite, []

    def full(fd: int, data: Any, at: int) -> int:
        calls.append(fd)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:4096], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(NoRoom, match=r"No space left.*gpurt\.memory\.disk.*local_directory") as caught:
            disk["c"] = frames(9000, seed=3)
    assert disk.path in str(caught.value)
    assert caught.value.tier is Tier.DISK
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(Path(disk.path).iterdir()) == files
    assert disk.used == used
    assert content(disk["a"]) == content(frames(1000, seed=1))
    assert content(disk["b"]) == content(frames(2000, seed=2))
    disk["c"] = frames(9000, seed=3)
    assert content(disk["c"]) == content(frames(9000, seed=3))


def test_a_disk_without_room_for_an_object_is_not_filled_first(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers try to spill again and again, and would write each object to the end of the disk each time."""
    monkeypatch.setattr(DiskTier, "_free", lambda tier: 8192)
    monkeypatch.setattr(os, "pwrite", lambda *written: pytest.fail("bytes were written"))
    with pytest.raises(NoRoom, match="No space left"):
        disk["a"] = frames(9000, seed=1)
    assert disk.used == 0
    assert not list(Path(disk.path).iterdir())
    monkeypatch.undo()
    disk["a"] = frames(9000, seed=1)
    assert content(disk["a"]) == content(frames(9000, seed=1))


def test_direct_io_is_given_up_where_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flags_seen = os.open, []

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        flags_seen.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    disk = DiskTier(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        disk["a"] = frames(5000)
        assert content(disk["a"]) == content(frames(5000))
    assert not disk.direct
    assert [bool(flags & os.O_DIRECT) for flags in flags_seen] == [True, False, False]
    disk.close()


def test_files_are_removed_on_a_thread_of_the_tier(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    real, may_go, threads = os.unlink, threading.Event(), set()

    def slowly(path: str) -> None:
        may_go.wait(10)
        threads.add(threading.current_thread().name)
        real(path)

    disk["a"] = frames(5000)
    monkeypatch.setattr(os, "unlink", slowly)
    del disk["a"]
    assert not disk.used
    may_go.set()
    disk.close()
    assert threads == {"gpurt-unlink_0"}


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(OSError, match="local_directory") as caught:
        DiskTier(str(place))
    assert caught.value.filename == str(place)


def test_files_go_with_the_interpreter_but_not_with_a_fork(tmp_path: Path) -> None:
    code = (
        "import os, sys, numpy as np\n"
        "from dask_gpurt.memory.disk import DiskTier\n"
        "from dask_gpurt.memory.serialize import Frames\n"
        "tier = DiskTier(sys.argv[1])\n"
        "tier['a'] = Frames(b'', ([np.zeros(10, np.uint8)],))\n"
        "child = os.fork()\n"
        "if not child: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "assert tier['a'].nbytes == 10\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True, timeout=60)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="/dev/shm is the second file system here")
def test_its_limit_is_the_free_space_of_its_own_file_system(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tier = DiskTier(directory)
        try:
            shm = os.statvfs("/dev/shm")
            assert 0 < tier.limit() <= shm.f_blocks * shm.f_frsize
            tier["a"] = frames(1 << 20, 1)
            assert tier.limit() >= tier.used
        finally:
            tier.close()
    small = DiskTier(str(tmp_path), capacity=4096)
    assert small.limit() == 4096
    small.close()
