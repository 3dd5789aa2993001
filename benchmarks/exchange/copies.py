"""Time the copies of an assembly on a GPU: one call of CUDA, its flag for overlap, or one kernel.

    python -m benchmarks.exchange.copies --json copies.json

Milliseconds of the calling thread, and until the GPU has copied, alone and beside threads that run Python;
then the same copies beside matrix products on another stream: how long each side takes. Contenders take
turns. Every range must arrive.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from dask.utils import format_bytes, parse_bytes
from rich.console import Console

from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.tpch.figures import rounded, spread
from dask_gpurt.device.copies import Copy

Start = Callable[[Sequence[Copy], Any], None]
#: Rows and columns of the matrices, and products beside the copies.
MATRIX, PRODUCTS = 8192, 6
console = Console(stderr=True)


def _batch(copies: Sequence[Copy], stream: Any, *, overlap: bool) -> None:
    """Start copies as :func:`~dask_gpurt.device.cuda_memory.copy_async` does, with or without the flag."""
    bindings: Any = importlib.import_module("cuda.bindings.runtime")
    attributes = bindings.cudaMemcpyAttributes()
    attributes.srcAccessOrder = bindings.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    if overlap:
        attributes.flags = int(bindings.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)
    to, at, sizes = (list(column) for column in zip(*copies, strict=True))
    error, *_ = bindings.cudaMemcpyBatchAsync(to, at, sizes, len(copies), [attributes], [0], 1, stream.ptr)
    if error != bindings.cudaError_t.cudaSuccess:
        raise RuntimeError(error.name)


def ways() -> dict[str, Start]:
    """Return the contenders by name."""
    from dask_gpurt.device.cuda_memory import copy_on_device

    return {
        "one call": lambda copies, stream: _batch(copies, stream, overlap=False),
        "one call, prefer overlap": lambda copies, stream: _batch(copies, stream, overlap=True),
        "one kernel": copy_on_device,
    }


class Assembly:
    """Hold ranges of one array, and the array that they are copied to in another order, as 8-byte columns.

    Parameters
    ----------
    count, total
        Number of ranges, and bytes of all.
    """

    def __init__(self, count: int, total: int):
        cupy: Any = importlib.import_module("cupy")
        # No multiple of 16, as in a partition of int64 columns.
        self._size = total // count // 16 * 16 - 8
        self._count = count
        self.given = cupy.random.randint(0, 256, self._size * count, dtype=cupy.uint8)
        self.made = cupy.zeros_like(self.given)
        self.order = np.random.default_rng(count).permutation(count)
        made, given = self.made.data.ptr, self.given.data.ptr
        self.copies = [
            Copy(made + slot * self._size, given + int(source) * self._size, self._size)
            for slot, source in enumerate(self.order)
        ]
        cupy.cuda.get_current_stream().synchronize()

    def check(self) -> None:
        """Compare the ranges, and forget them."""
        expected = self.given.reshape(self._count, self._size)[self.order.tolist()].ravel()
        if not bool((self.made == expected).all()):
            raise ValueError(f"{self._count} ranges of {self._size} bytes did not arrive")
        self.made[:] = 0


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """Run threads that execute Python in the body."""
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            sum(range(100))

    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in started:
            thread.join()


def time_alone(assembly: Assembly, repeat: int) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of each way until it returns, and until the GPU is done."""
    cupy: Any = importlib.import_module("cupy")
    stream = cupy.cuda.Stream(non_blocking=True, priority=-5)
    samples: dict[str, list[tuple[float, float]]] = {}
    for turn in range(repeat + 1):
        for name, start in ways().items():
            began = time.perf_counter()
            start(assembly.copies, stream)
            returned = time.perf_counter()
            stream.synchronize()
            if turn:  # the first one compiles
                done = time.perf_counter()
                samples.setdefault(name, []).append(((returned - began) * 1e3, (done - began) * 1e3))
            else:
                assembly.check()
    return _spreads(("call", "done"), samples)


def time_beside(assembly: Assembly, repeat: int) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of matrix products and of copies that are started together."""
    cupy: Any = importlib.import_module("cupy")
    compute = cupy.cuda.Stream(non_blocking=True)
    stream = cupy.cuda.Stream(non_blocking=True, priority=-5)
    with compute:
        left = cupy.ones((MATRIX, MATRIX), cupy.float32)
        out = left @ left
    compute.synchronize()
    samples: dict[str, list[tuple[float, float]]] = {}
    for turn in range(repeat + 1):
        for name, start in {"no copies": _nothing, **ways()}.items():
            first, computed, copied = (cupy.cuda.Event() for _ in range(3))
            first.record(compute)
            with compute:
                for _ in range(PRODUCTS):
                    cupy.matmul(left, left, out=out)
            computed.record(compute)
            stream.wait_event(first)
            start(assembly.copies, stream)
            copied.record(stream)
            for event in (computed, copied):
                event.synchronize()
            if turn:
                times = (cupy.cuda.get_elapsed_time(first, event) for event in (computed, copied))
                samples.setdefault(name, []).append((next(times), next(times)))
    return _spreads(("compute", "copies"), samples)


def _spreads(
    what: tuple[str, str], samples: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, dict[str, Any]]:
    return {
        name: {each: spread(times) for each, times in zip(what, zip(*of, strict=True), strict=True)}
        for name, of in samples.items()
    }


def _said(found: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{name} {', '.join(format(each['median'], '.3f') for each in of.values())}"
        for name, of in found.items()
    )


def _nothing(_: Sequence[Copy], __: Any) -> None:
    pass


@click.command(help=__doc__.partition("\n")[0], context_settings={"show_default": True})
@click.option("--counts", default="16,128,1024", help="Numbers of ranges.")
@click.option("--totals", default="1MiB,16MiB,256MiB", help="Bytes of all ranges.")
@click.option("--threads", default="0,2", help="Numbers of threads that run Python meanwhile.")
@click.option("--repeat", default=15)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(counts: str, totals: str, threads: str, repeat: int, output: Path | None) -> None:
    found: dict[str, Any] = {"alone": {}, "beside products": {}}
    for count, total in product(map(int, counts.split(",")), map(parse_bytes, totals.split(","))):
        assembly, name = Assembly(count, total), f"{count} ranges, {format_bytes(total)}"
        for number in map(int, threads.split(",")):
            with busy(number):
                alone = time_alone(assembly, repeat)
            found["alone"][f"{name}, {number} threads"] = alone
            console.print(f"{name}, {number} threads: {_said(alone)} ms")
        found["beside products"][name] = beside = time_beside(assembly, repeat)
        console.print(f"{name}, beside products: {_said(beside)} ms")
        write(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "switch_interval": sys.getswitchinterval(),
                **environment(),
                "milliseconds": rounded(found),
            },
            output,
        )


if __name__ == "__main__":
    main()
