"""Measure a disk alone: several processes each write a file with direct I/O and read it back.

python -m benchmarks.memory.disk --directory /tmp --processes 4 --size 4GiB
"""

from __future__ import annotations

import json
import mmap
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
from dask.utils import parse_bytes

BLOCK = 16 * 2**20


def timed(path: Path, size: int, *, write: bool) -> tuple[float, float]:
    """Write or read a file, and return the start and end times."""
    flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(BLOCK))
    file = os.open(path, flags | os.O_DIRECT, 0o600)
    began = time.time()
    for offset in range(0, size, BLOCK):
        done = os.pwritev(file, [block], offset) if write else os.preadv(file, [block], offset)
        assert done == BLOCK
    os.fsync(file)
    ended = time.time()
    os.close(file)
    return began, ended


def speed(directory: Path, processes: int, size: int) -> dict[str, float]:
    """Return the write and read bandwidth of all processes together, in bytes per second."""
    files = [directory / f"disk-speed-{number}" for number in range(processes)]
    figures = {}
    with ProcessPoolExecutor(processes) as pool:
        try:
            for what in ("write", "read"):
                spans = [pool.submit(timed, file, size, write=what == "write") for file in files]
                began, ended = zip(*(span.result() for span in spans), strict=True)
                figures[what] = processes * size / (max(ended) - min(began))
        finally:
            for file in files:
                file.unlink(missing_ok=True)
    return figures


@click.command(help=__doc__.partition("\n")[0])
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False, exists=True), default=".")
@click.option("--processes", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--size", default="4GiB", show_default=True, help="Bytes of each file.")
def main(directory: Path, processes: int, size: str) -> None:
    figures = speed(directory, processes, parse_bytes(size) // BLOCK * BLOCK)
    click.echo(json.dumps({"processes": processes, "size": size, "bytes_per_second": figures}))


if __name__ == "__main__":
    main()
