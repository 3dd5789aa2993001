"""Use a library of frames on a GPU for the first time before a program waits for it.

A plan asks the library what operations return, of frames of two rows. The first of these calls in a process
start CUDA, load kernels and compile some: some 0.2 s of the 0.5 s that building a first query takes (H200). A
process that has imported such a library makes them in a thread, as soon as the runtime is switched on there:
while a cluster starts its workers, or a client connects.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pandas as pd

from dask_gpurt.frames.registry import LIBRARIES

logger = logging.getLogger(__name__)

_threads: list[threading.Thread] = []


@cache
def begin() -> None:
    """Use the libraries for GPUs that this process has imported, in a thread; once in a process."""
    _threads.extend(in_threads("gpurt-first-uses", calls))


def wait() -> None:
    """Wait until the calls that :func:`begin` has begun are done."""
    for thread in _threads:
        thread.join()


def in_threads(
    name: str,
    calls_of: Callable[[Any], Iterator[Callable[[], Any]]],
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[threading.Thread]:
    """Make calls of libraries for GPUs that this process has imported, each in a thread; return the threads.

    ``is_wanted``: returns whether to go on; called before each call.
    """

    def use(library: Any) -> None:
        try:
            for call in calls_of(library):
                if not (threading.main_thread().is_alive() and is_wanted()):
                    return
                call()
        except Exception:  # the first query that needs it says so
            logger.debug("%s cannot be used here", library.__name__, exc_info=True)

    imported = (each for each, row in LIBRARIES.items() if row.device != "host" and each in sys.modules)
    # Not daemons, which could be in CUDA while the process ends.
    threads = [threading.Thread(target=use, args=(sys.modules[each],), name=name) for each in imported]
    for thread in threads:
        thread.start()
    return threads


def calls(library: Any) -> Iterator[Callable[[], Any]]:
    """Yield calls of each kind that metadata is made of, the slowest first uses first."""
    rows: dict[str, Any] = {
        "i": [1, 2],
        "f": [0.5, 1.0],
        "s": ["a", "b"],
        "t": pd.to_datetime(["2020-01-01"] * 2),
        "b": [True, False],
    }
    frame = library.from_pandas(pd.DataFrame(rows))
    yield from (
        lambda: (frame.f / frame.i, frame.f * frame.i, 1 - frame.f, frame.i + 1),
        lambda: (frame.i > 1) & (frame.f < 2) & (frame.s == "a") & (frame.t >= rows["t"][0]),
        lambda: frame[frame.b],
        lambda: frame.merge(frame, on="i"),
        lambda: frame.merge(frame, on="s", how="left"),
        lambda: frame.groupby("i").agg({"f": ["sum", "mean"], "t": "max"}),
        lambda: frame.groupby(["s", "i"]).f.sum().reset_index(),
        lambda: frame.groupby("i").s.nunique(),
        lambda: (frame.f.sum(), frame.f.mean(), frame.i.max(), frame.i.count()),
        lambda: (
            frame.s.isin(["a"]),
            frame.s.str.contains("a"),
            frame.s.str.startswith("a"),
            frame.t.dt.year,
        ),
        lambda: frame.sort_values(["i", "f"]).set_index("s").reset_index(),
        lambda: library.concat([frame, frame]).drop_duplicates(),
        lambda: (frame.i.astype("float64"), frame.f.isnull(), frame.f.fillna(0), frame.f.where(frame.b, 0.0)),
        lambda: (frame.iloc[:0].merge(frame.iloc[:0], on="i"), frame.hash_values(), frame.to_pandas()),
    )
