"""Run generators in child processes, and synchronise the processes at a barrier."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import psutil
from rich.console import Console

SPAWN = get_context("spawn")
#: Seconds that processes have to exit; part of each time limit is reserved for this.
GRACE = 5.0


class Barrier:
    """Synchronise processes of one host: each counts its arrivals in its own line of a mapped file.

    A process that leaves the context by an exception breaks the barrier. All others then raise
    ``BrokenBarrierError`` with its traceback when they arrive.
    """

    LINE = 8  # of 8 bytes: no two processes write to the same cache line
    PAUSE_S = 20e-6  # lets copying threads run
    BROKEN = np.iinfo(np.int64).min

    def __init__(self, file: Path, rank: int, parties: int):
        self._arrivals = np.memmap(file, np.int64, mode="r+", shape=(parties, self.LINE))[:, 0]
        self._rank = rank
        self._reason = file.with_suffix(".broken")

    @classmethod
    def prepare(cls, file: Path, parties: int) -> Path:
        """Create the file."""
        np.zeros((parties, cls.LINE), np.int64).tofile(file)
        return file

    def meet(self) -> None:
        """Block until all processes have arrived."""
        self._arrivals[self._rank] += 1
        mine = int(self._arrivals[self._rank])
        while (self._arrivals < mine).any():
            if (self._arrivals == self.BROKEN).any():
                raise BrokenBarrierError(self._reason.read_text())
            time.sleep(self.PAUSE_S)

    def __enter__(self) -> Barrier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, BrokenBarrierError):
            self._reason.write_text("".join(traceback.format_exception(error)))
            self._arrivals[self._rank] = self.BROKEN


class Child:
    """Run a generator in a process of its own, and receive its values."""

    def __init__(self, generator: Callable[..., Iterator[Any]], *arguments: Any):
        self.pipe, theirs = SPAWN.Pipe(duplex=False)
        self.process = SPAWN.Process(target=hand_over, args=(theirs, generator, *arguments))
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """Block until the next value; raise ``EOFError`` after the last one."""
        try:
            failed, value = self.pipe.recv()
        except EOFError:
            self.process.join(GRACE)
            if self.process.exitcode == 0:
                raise
            raise RuntimeError(f"a process ended with exit code {self.process.exitcode}") from None
        if failed:
            raise RuntimeError(value)
        return value

    def values(self, limit: float) -> Iterator[Any]:
        """Receive all values, within ``limit`` seconds."""
        deadline = time.monotonic() + limit
        with suppress(EOFError):
            # The deadline also ends a generator that always has another value ready.
            while (left := deadline - time.monotonic()) > 0 and self.pipe.poll(left):
                yield self.receive()
            raise TimeoutError(f"it was not done after {limit:.0f} s")

    def end(self) -> None:
        """Kill the process and its descendants, if they are still running."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for one in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.join(GRACE)


def hand_over(pipe: Any, generator: Callable[..., Iterator[Any]], *arguments: Any) -> None:
    """Send a generator's values, and an exception as text, which any process can unpickle."""
    try:
        for value in generator(*arguments):
            pipe.send((False, value))
    except Exception:
        pipe.send((True, traceback.format_exc()))


def one_of_each(children: Sequence[Child]) -> list[Any]:
    """Receive the next value of every child, in any order; raise the first failure."""
    values: dict[int, Any] = {}
    waiting: dict[Any, int] = {child.pipe: rank for rank, child in enumerate(children)}
    while waiting:
        for pipe in connection.wait(list(waiting)):
            rank = waiting.pop(pipe)
            values[rank] = children[rank].receive()
    return [values[rank] for rank in range(len(children))]


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    Console(stderr=True).print(line, style="dim", highlight=False)
