"""Fail workers, files and tiers while data are spilled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Future, wait

import dask_gpurt
from tests.helpers.clusters import cluster
from tests.helpers.waiting import until

MIB = 2**20
SMALL = {"memory__tiers": True, "memory__device": 4 * MIB, "memory__pinned": 2 * MIB, "memory__host": 2 * MIB}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory of the workers' files.

    The failures here concern host memory, whether or not the host has a GPU.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        yield tmp_path


def blocks(client: Client, count: int) -> list[Future]:
    """Return arrays of 1 MiB, each filled with its own number."""
    return client.map(lambda i: np.full(MIB, i, np.uint8), range(count), pure=False)


def contents(client: Client, arrays: list[Future]) -> list[tuple[int, int, int]]:
    """Return the minimum, the maximum and the number of bytes of each."""
    return client.gather(client.map(lambda a: (int(a.min()), int(a.max()), a.size), arrays, pure=False))


def right(count: int) -> list[tuple[int, int, int]]:
    return [(i, i, MIB) for i in range(count)]


def workers(client: Client) -> list[str]:
    return list(client.nthreads())


def where_files_go(client: Client) -> dict[str, Path]:
    """Return the directory of each worker's files, once it exists."""

    def found(dask_worker: Any) -> list[Path]:
        return list(Path(dask_worker.local_directory).glob("gpurt-tier-*"))

    until(lambda: all(client.run(found).values()))
    return {worker: path for worker, [path] in client.run(found).items()}


def test_a_worker_is_killed_while_it_writes_a_file(directory: Path) -> None:
    def dies_as_it_writes() -> None:
        from dask_gpurt.memory import disk

        def write(fd: int, *_: Any) -> None:
            os.ftruncate(fd, 4096)
            os.kill(os.getpid(), signal.SIGKILL)

        disk.write = write

    with cluster(**SMALL) as client:
        victim, other = workers(client)
        before = where_files_go(client)
        client.run(dies_as_it_writes, workers=[victim])
        made = blocks(client, 48)
        assert contents(client, made) == right(48)
        client.wait_for_workers(2, timeout=60)
        now = where_files_go(client)
        assert now[other] == before[other]
        assert victim not in now
        # The nanny removes a dead worker's local directory, with all partly written files.
        assert not before[victim].parent.exists()
        assert set(directory.rglob("gpurt-tier-*")) == set(now.values())
        until(lambda: set(dask_gpurt.memory_usage(client).to_pandas(names="metrics").worker) == set(now))


def damage_one(client: Client, made: list[Future], directory: Path) -> tuple[int, Path]:
    """Flip a bit in one file; returns the number of the block in it, and the file."""
    wait(made)
    client.run(lambda dask_worker: dask_worker.data.spill(1 << 40))
    path = min(directory.rglob("gpurt-tier-*/*"))
    content = bytearray(path.read_bytes())
    number = content[MIB // 2]
    content[MIB // 2] ^= 1
    path.write_bytes(content)
    return number, path


@pytest.mark.parametrize("who", ["client", "peer"])
def test_a_file_is_damaged(directory: Path, who: str) -> None:
    """Its objects are recomputed where needed; all other work continues."""
    with cluster(workers=2, **SMALL) as client:
        here, there = workers(client)
        made = client.map(lambda i: np.full(MIB, i, np.uint8), range(24), pure=False, workers=[here])
        number, path = damage_one(client, made, directory)
        if who == "client":
            assert made[number].result(timeout=30)[0] == number
        else:
            asking = client.submit(np.max, made[number], workers=[there])
            assert asking.result(timeout=30) == number
        assert contents(client, made) == right(24)
        assert not path.exists()
        assert set(workers(client)) == {here, there}
        fallback = dask_gpurt.report(client)["workers"][here]["fallbacks"]["memory.spill-unreadable"]
        assert str(path) in fallback["reason"]


def test_a_file_is_damaged_that_nothing_can_make_again(directory: Path) -> None:
    with cluster(workers=1, **SMALL) as client:
        made = [client.scatter(np.full(MIB, i, np.uint8)) for i in range(24)]
        number, _ = damage_one(client, made, directory)
        damaged = made.pop(number)
        with pytest.raises(Exception, match=r"cancelled|lost"):
            client.submit(np.sum, damaged).result(timeout=30)
        assert contents(client, made) == [row for row in right(24) if row[0] != number]


def test_it_is_switched_off_with_a_damaged_file(directory: Path) -> None:
    with cluster(workers=1, **SMALL) as client:
        made, before = blocks(client, 24), workers(client)
        damage_one(client, made, directory)
        dask_gpurt.disable(client)
        assert contents(client, made) == right(24)
        assert workers(client) == before
        assert "WorkerBuffer" not in client.run(lambda dask_worker: type(dask_worker.data).__name__).values()


def test_a_worker_that_closes_reads_nothing_back(directory: Path) -> None:
    def note_reads(file: str) -> None:
        from dask_gpurt.memory.disk import DiskTier

        DiskTier.__getitem__ = lambda *_: Path(file).touch()

    with cluster(workers=2, **SMALL) as client:
        made = blocks(client, 48)
        wait(made)
        closing = workers(client)[:1]
        client.run(note_reads, str(directory / "read"), workers=closing)
        client.restart_workers(closing, timeout=60)
        del made
    assert not (directory / "read").exists()
