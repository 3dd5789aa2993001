"""Write a device's buffers to files and read them back without passing through host memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.disk import CorruptFile, DiskTier
from dask_gpurt.memory.host import BlockPool, HostTier, PinnedTier
from dask_gpurt.memory.ledger import Ledger, Limits, NoRoom, Tier
from dask_gpurt.memory.serialize import Frames, Raw
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Metrics
from tests.helpers.far_device import Far, FarDevice

KIB = 1024


def data(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def mixed(sizes: list[tuple[int, bool]]) -> Frames:
    """Draw buffers of these sizes, some of them on the device."""
    buffers = [(data(nbytes, seed), far) for seed, (nbytes, far) in enumerate(sizes)]
    return Frames(b"header", tuple([Far(array) if far else array] for array, far in buffers))


def content(frames: Frames) -> list[bytes]:
    return [getattr(piece, "memory", piece).tobytes() for [piece] in frames.buffers]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(str(tmp_path), None, FarDevice().moved)
    yield tier
    tier.close()


@given(sizes=st.lists(st.tuples(st.integers(0, 9000), st.booleans()), max_size=6))
def test_files_of_the_host_and_of_the_device(sizes: list[tuple[int, bool]]) -> None:
    """Each buffer comes back, to the host or to its origin, alone or with the rest."""
    disk, given = DiskTier(os.environ.get("TMPDIR", "/tmp"), None, FarDevice().moved), mixed(sizes)
    try:
        disk["a"] = given
        [path] = Path(disk.path).iterdir()
        assert path.stat().st_size == disk.used == disk.stored("a")
        assert content(disk["a"]) == content(given)
        assert all(isinstance(piece, np.ndarray) for [piece] in disk["a"].buffers)
        back = disk.to_device("a")
        assert (back.header, content(back)) == (given.header, content(given))
        assert [isinstance(piece, Far) for [piece] in back.buffers] == [far for _, far in sizes]
        for which, expected in enumerate(content(given)):
            assert disk.part("a", which)[0].tobytes() == expected
            assert disk.part("a", which, to_device=True)[0].memory.tobytes() == expected
    finally:
        disk.close()


@pytest.mark.parametrize("at", [10, 2000, 4096 + 100, 2 * 4096 + 3])
@pytest.mark.parametrize("how", ["flipped", "cut off"])
def test_damage_is_noticed_wherever_it_is_read(disk: DiskTier, at: int, how: str) -> None:
    disk["a"] = mixed([(2500, False), (3000, True), (50, True)])
    [path] = Path(disk.path).iterdir()
    content = bytearray(path.read_bytes())
    content[at] ^= 64
    path.write_bytes(content[:at] if how == "cut off" else content)
    for read in (disk.__getitem__, disk.to_device):
        with pytest.raises(CorruptFile, match=r"checksum|truncated") as caught:
            read("a")
        assert caught.value.filename == str(path)


def test_a_full_disk_is_noticed_before_the_device_writes(disk: DiskTier, monkeypatch: Any) -> None:
    disk["a"] = mixed([(5000, True)])

    def full(fd: int, at: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom, match="No space left"):
        disk["b"] = mixed([(50000, True)])
    assert disk._device_files.moved["written"] == 5000  # type: ignore[union-attr]
    assert content(disk["a"]) == content(mixed([(5000, True)]))
    assert len(list(Path(disk.path).iterdir())) == 1


@pytest.fixture
def device() -> FarDevice:
    return FarDevice()


@pytest.fixture
def tiered_buffer(device: FarDevice, tmp_path: Path) -> Iterator[TieredBuffer]:
    """Yield a device of 100 KiB above a disk."""
    limits = Limits(100 * KIB, 0, 0, None)
    made = TieredBuffer(
        limits,
        {
            Tier.PINNED: PinnedTier(BlockPool(0)),
            Tier.HOST: HostTier(0),
            Tier.DISK: DiskTier(str(tmp_path), None, device.files(pytest.fail)),
        },
        home=lambda value: Tier.DEVICE,
        device=device,
        ledger=Ledger({tier: 1 << 40 for tier in Tier}),
        metrics=Metrics(),
        priority_of=lambda key: None,
        changed=lambda: None,
    )
    yield made
    made.close()


def test_an_object_comes_up_as_it_went_down(tiered_buffer: TieredBuffer, device: FarDevice) -> None:
    tiered_buffer["x"] = Raw([Far(data(20 * KIB, 1)), Far(data(5, 2))])
    tiered_buffer.spill(1 << 30)
    assert tiered_buffer.tier("x") is Tier.DISK
    found = tiered_buffer["x"]
    assert [far.memory.tobytes() for far in found.buffers] == [
        data(20 * KIB, 1).tobytes(),
        data(5, 2).tobytes(),
    ]
    assert device.moved.moved == {"written": 20 * KIB + 5, "read": 20 * KIB + 5}


@pytest.mark.parametrize("far", [True, False])
def test_spilled_data_that_are_read_once_go_to_the_device_directly(
    tiered_buffer: TieredBuffer, device: FarDevice, far: bool
) -> None:
    """Also data that the host wrote to disk, like a pulled shard."""
    array = data(20 * KIB, 1)
    frames = Frames(b"raw", ([Far(array) if far else array],))
    assert tiered_buffer.store_below("x", frames, "shards", home=Tier.DEVICE) is Tier.DISK
    with tiered_buffer.reading([("x", 0)]) as found:
        buffer, _ = found["x", 0]
        assert buffer.memory.tobytes() == array.tobytes()
        assert tiered_buffer.tier("x") is Tier.DISK
    assert device.moved.moved["read"] == 20 * KIB
    assert not device.moved.moved["gathered"]


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["kvikio", "pinned"])
@pytest.mark.parametrize("sizes", [[1], [0, 5, 4096], [(9 << 20) + 3, 100], [1000] * 20])
def test_a_gpu_writes_and_reads_files(tmp_path: Path, way: str, sizes: list[int]) -> None:
    import cupy

    from dask_gpurt.device.cuda import CudaDevice
    from dask_gpurt.device.cuda_files import CudaFiles

    files = CudaFiles(CudaDevice(), pytest.fail, with_kvikio=way == "kvikio")
    disk = DiskTier(str(tmp_path), None, files)
    arrays = [data(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    expected = [array.tobytes() for array in arrays]
    disk["a"] = Frames(b"header", ([data(300)], *[[cupy.asarray(array)] for array in arrays]))
    disk["b"] = Frames(b"header", tuple([array] for array in arrays))  # at any offset
    assert [piece.tobytes() for [piece] in disk["a"].buffers[1:]] == expected
    back = [piece for [piece] in disk.to_device("a").buffers[1:]]
    back_alone = [disk.part("b", which, to_device=True)[0] for which in range(len(sizes))]
    for found in (back, back_alone):
        assert [cupy.asnumpy(cupy.asarray(buffer)).tobytes() for buffer in found] == expected
    [path, _] = sorted(Path(disk.path).iterdir())
    content = bytearray(path.read_bytes())
    content[4096] ^= 1  # where the first buffer of the device begins
    path.write_bytes(content)
    if sizes[0]:
        with pytest.raises(CorruptFile):
            disk.to_device("a")
    disk.close()


@pytest.mark.gpu
@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_without_kvikio_files_are_moved_otherwise_and_that_is_said_once(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    from dask_gpurt.device import cuda_files
    from dask_gpurt.device.cuda import CudaDevice

    def refuses() -> Any:
        raise error("no kvikio here")

    monkeypatch.setattr(cuda_files, "_kvikio", refuses)
    said: list[str] = []
    disk = DiskTier(str(tmp_path), None, cuda_files.CudaFiles(CudaDevice(), said.append))
    for seed, key in enumerate("ab"):
        disk[key] = Frames(b"header", ([cupy.asarray(data(10_000, seed))],))
    for seed, key in enumerate("ab"):
        [[piece]] = disk.to_device(key).buffers
        assert cupy.asnumpy(cupy.asarray(piece)).tobytes() == data(10_000, seed).tobytes()
    assert said == ["no kvikio here"]
    disk.close()
