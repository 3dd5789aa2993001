"""The lower tiers: mappings that hold what a dict would, until they are full."""

from __future__ import annotations

import errno
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_gpurt.memory.disk import CorruptFile, DiskTier
from dask_gpurt.memory.frames import Frames
from dask_gpurt.memory.pageable import HostTier
from dask_gpurt.memory.pinned import BlockPool, PinnedTier
from dask_gpurt.memory.tiers import NoRoom, Tier

BLOCK, CAPACITY = 512, 8 * 512
DISK_CAPACITY = 4 * 4096


def random_bytes(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def frames(*sizes: int, seed: int = 0, cut: int = 300) -> Frames:
    """Buffers of these sizes, each in pieces of at most ``cut`` bytes."""
    whole = [random_bytes(size, seed + i) for i, size in enumerate(sizes)]
    buffers = tuple([array[at : at + cut] for at in range(0, array.size, cut)] for array in whole)
    return Frames(f"header {seed}".encode() * (seed % 3), buffers)


def content(found: Frames) -> tuple[bytes, list[bytes]]:
    return found.header, [b"".join(piece.tobytes() for piece in buffer) for buffer in found.buffers]


def pinned() -> PinnedTier:
    return PinnedTier(BlockPool(CAPACITY, block=BLOCK))


# ---- against a dict ------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b/../c", "('x-1', 0)", "ü", "e"])
SIZES = st.lists(st.integers(0, 1500), max_size=4)


class Mappings(RuleBasedStateMachine):
    """One tier and a dict: the same operations, the same content, limits kept."""

    @initialize(kind=st.sampled_from(["pinned", "host", "disk"]))
    def start(self, kind: str) -> None:
        self.model: dict[str, tuple[bytes, list[bytes]]] = {}
        make: dict[str, Callable[[], Any]] = {
            "pinned": pinned,
            "host": lambda: HostTier(CAPACITY),
            "disk": lambda: DiskTier(os.environ.get("TMPDIR", "/tmp"), DISK_CAPACITY),
        }
        self.kind, self.tier = kind, make[kind]()

    def cost(self, frames: tuple[bytes, list[bytes]]) -> int:
        header, buffers = frames
        if self.kind == "host":
            return sum(map(len, buffers))
        if self.kind == "disk":
            return -(-(len(header) + sum(map(len, buffers))) // 4096) * 4096
        end = 0
        for buffer in buffers:
            end = -(-end // 256) * 256 + len(buffer)
        return -(-end // BLOCK) * BLOCK

    @property
    def capacity(self) -> int:
        return DISK_CAPACITY if self.kind == "disk" else CAPACITY

    @property
    def expected(self) -> int:
        return sum(map(self.cost, self.model.values()))

    @rule(key=KEYS, sizes=SIZES, seed=st.integers(0, 99))
    def put(self, key: str, sizes: list[int], seed: int) -> None:
        given = frames(*sizes, seed=seed)
        fits = self.expected + self.cost(content(given)) <= self.capacity
        try:
            self.tier[key] = given
        except NoRoom as error:
            assert not fits
            assert error.tier == self.kind
        else:
            assert fits
            self.model[key] = content(given)

    @precondition(lambda self: self.kind != "disk")
    @rule(key=KEYS, sizes=SIZES, seed=st.integers(0, 99))
    def adopt(self, key: str, sizes: list[int], seed: int) -> None:
        given = content(frames(*sizes, seed=seed))
        try:
            room = self.tier.adopt(key, given[0], sizes)
        except NoRoom:
            assert self.expected + self.cost(given) > self.capacity
            return
        for buffer, data in zip(room.buffers, given[1], strict=True):
            for piece in buffer:
                piece[:] = np.frombuffer(data[: piece.size], np.uint8)
                data = data[piece.size :]
            assert not data
        self.model[key] = given

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        if key in self.model:
            del self.tier[key], self.model[key]
        else:
            with pytest.raises(KeyError):
                del self.tier[key]

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.model.clear()

    @invariant()
    def same(self) -> None:
        assert set(self.tier) == set(self.model)
        assert len(self.tier) == len(self.model)
        assert {key: content(self.tier[key]) for key in self.model} == self.model
        assert "z" not in self.tier
        assert self.tier.used == self.expected <= self.tier.capacity

    def teardown(self) -> None:
        if getattr(self, "kind", "host") != "host":
            self.tier.close()


Mappings.TestCase.settings = settings(max_examples=120, stateful_step_count=20, deadline=None)
TestMappings = Mappings.TestCase


# ---- blocks ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 6 * BLOCK), st.integers(-8, -1)), max_size=40))
def test_blocks_never_overlap(steps: list[int]) -> None:
    """Sizes are allocated, negative numbers free one of what there is."""
    pool = BlockPool(16 * BLOCK + 17, block=BLOCK)
    assert pool.capacity == 16 * BLOCK
    held: list[tuple[list[np.ndarray], int]] = []
    for number, step in enumerate(steps):
        if step < 0:
            if held:
                pieces, mark = held.pop(step % len(held))
                assert all((piece == mark).all() for piece in pieces)
                pool.free(pieces)
        else:
            blocks = -(-step // BLOCK)
            try:
                pieces = pool.allocate(step)
            except NoRoom as error:
                assert (error.tier, error.nbytes) == (Tier.PINNED, step)
                assert blocks * BLOCK > pool.capacity - pool.used
                continue
            assert sum(piece.size for piece in pieces) == step
            assert all(piece.size % BLOCK == 0 for piece in pieces[:-1])
            for piece in pieces:
                piece[:] = number
            held.append((pieces, number))
        assert pool.used == sum(-(-sum(p.size for p in pieces) // BLOCK) * BLOCK for pieces, _ in held)
    for pieces, mark in held:
        assert all((piece == mark).all() for piece in pieces)
        pool.free(pieces)
    assert pool.used == 0
    assert len(pool.allocate(pool.capacity)) <= 1  # all neighbours were merged


def test_a_run_that_is_long_enough_comes_before_shorter_ones() -> None:
    pool = BlockPool(8 * BLOCK, block=BLOCK)
    blocks = [pool.allocate(BLOCK) for _ in range(8)]
    for index in (0, 2, 4, 5, 6):
        pool.free(blocks[index])
    [piece] = pool.allocate(3 * BLOCK - 1)
    assert piece.ctypes.data == blocks[4][0].ctypes.data
    assert [piece.size for piece in pool.allocate(BLOCK + 1)] == [BLOCK, 1]


def test_what_was_not_allocated_can_not_be_freed() -> None:
    pool = BlockPool(4 * BLOCK, block=BLOCK)
    pieces = pool.allocate(BLOCK)
    pool.free(pieces)
    with pytest.raises(KeyError):
        pool.free(pieces)
    with pytest.raises(ValueError, match="multiple of 256"):
        BlockPool(4096, block=100)


def test_memory_is_registered_once_and_aligned() -> None:
    seen: list[Any] = []

    def register(memory: np.ndarray) -> Callable[[], None]:
        seen.append((memory.size, memory.ctypes.data % 4096))
        return lambda: seen.append("undone")

    pool = BlockPool(4 * BLOCK, block=BLOCK, register=register)
    assert pool.ready.wait(10)
    pieces = pool.allocate(700)
    pieces[0][:] = 7
    pool.close()
    pool.close()
    assert seen == [(4 * BLOCK, 0), "undone"]
    with pytest.raises(NoRoom):
        pool.allocate(1)
    assert (pieces[0] == 7).all()
    pool.free(pieces)
    with pytest.raises(NoRoom):
        pool.allocate(1)


def test_memory_that_is_registered_stays_with_its_process() -> None:
    """A fork would have copies of pages that a device writes to, and which of both those are is not said."""
    pool = BlockPool(4 * BLOCK, block=BLOCK, register=lambda memory: lambda: None)
    assert pool.ready.wait(10)
    (piece,) = pool.allocate(BLOCK)
    piece[:] = 7
    child = os.fork()
    if not child:
        faulthandler.disable()
        piece[0] = 8  # not there: the child ends
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    assert (piece == 7).all()
    pool.close()


def test_an_empty_pool_has_no_room() -> None:
    tier = PinnedTier(BlockPool(0, register=lambda memory: pytest.fail("nothing to register")))
    with pytest.raises(NoRoom):
        tier["a"] = frames(1)
    tier["b"] = frames(0)
    assert content(tier["b"]) == (b"", [b""])
    tier.close()


def test_a_failed_copy_takes_no_memory() -> None:
    broken = Frames(b"", ([np.zeros(10, np.uint8), np.zeros((2, 5), np.uint8)],))
    for tier in (pinned(), HostTier(CAPACITY)):
        with pytest.raises(Exception, match="broadcast"):
            tier["a"] = broken
        assert tier.used == 0
        assert "a" not in tier


def test_small_buffers_share_blocks() -> None:
    tier = pinned()
    tier["a"] = frames(*[100] * 4)
    assert tier.used == 2 * BLOCK
    starts = [buffer[0].ctypes.data % 256 for buffer in tier["a"].buffers]
    assert starts == [0, 0, 0, 0]


def test_threads_share_a_tier(tmp_path: Path) -> None:
    tiers: list[Any] = [pinned(), HostTier(CAPACITY), DiskTier(str(tmp_path), CAPACITY)]
    wrong: list[Any] = []

    def work(tier: Any, name: int) -> None:
        for step in range(60):
            given = frames(400, 100 * (step % 9), seed=name * 1000 + step)
            try:
                tier[str(name)] = given
            except NoRoom:
                tier.pop(str(name), None)
                continue
            if content(tier[str(name)]) != content(given):
                wrong.append((tier, name, step))

    threads = [threading.Thread(target=work, args=(tier, name)) for tier in tiers for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for tier in tiers:
        tier.clear()
        assert tier.used == 0


# ---- files -------------------------------------------------------------------------------------


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


@settings(deadline=None, max_examples=200)
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
        with pytest.raises(CorruptFile, match="computed again") as caught:
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
    with pytest.raises(CorruptFile, match="ends too early"):
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
    write, calls = os.write, []

    def full(fd: int, data: Any) -> int:
        calls.append(fd)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:4096])

    for key in ("c", "a"):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(
                NoRoom, match=r"No space left.*gpurt\.memory\.disk.*local_directory"
            ) as caught:
                disk[key] = frames(9000, seed=3)
        assert disk.path in str(caught.value)
        assert caught.value.tier is Tier.DISK
        assert isinstance(caught.value.__cause__, OSError)
    assert sorted(Path(disk.path).iterdir()) == files
    assert disk.used == used
    assert set(disk) == {"a", "b"}
    assert content(disk["a"]) == content(frames(1000, seed=1))
    assert content(disk["b"]) == content(frames(2000, seed=2))
    disk["c"] = frames(9000, seed=3)
    assert content(disk["c"]) == content(frames(9000, seed=3))


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
    assert "a" not in disk
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
        "from dask_gpurt.memory.frames import Frames\n"
        "tier = DiskTier(sys.argv[1])\n"
        "tier['a'] = Frames(b'', ([np.zeros(10, np.uint8)],))\n"
        "child = os.fork()\n"
        "if not child: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "assert tier['a'].nbytes == 10\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True, timeout=60)
    assert not list(tmp_path.iterdir())
