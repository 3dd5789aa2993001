"""Sample the contents of the tiers during the demo, and plot them over time."""

from __future__ import annotations

import math
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import pandas as pd
from dask.utils import format_bytes

from dask_gpurt.observe.shown_tiers import SHOWN

COLOURS = dict(
    zip(SHOWN, ("var(--gpurt)", "var(--gpurt)", "#64a5ab", "#22a06b", "#e2803a", "#c9475f"), strict=True)
)
#: The edges of the plot area.
LEFT, RIGHT, TOP, BOTTOM = 90, 730, 8, 228


class _Sample(NamedTuple):
    seconds: float
    used: dict[str, int]
    capacity: dict[str, int]


class TierSampler:
    """Sample the tiers on a thread during watched operations. The sampler's clock stops in between.

    Parameters
    ----------
    read
        Returns the frame of :func:`dask_gpurt.memory_usage`.
    period
        Seconds between two samples.
    most
        Maximum number of samples. Beyond it, every other sample is dropped and the period is doubled.
    """

    def __init__(self, read: Callable[[], pd.DataFrame], *, period: float = 0.1, most: int = 600):
        self._read = read
        self._period = period
        self._most = most
        self._samples: list[_Sample] = []
        self._starts: list[tuple[float, str]] = []
        self._seconds = 0.0
        self._failed = 0
        self._error: str | None = None

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Sample during the body, which is labelled with ``name``."""
        self._starts.append((self._seconds, name))
        began, ended = time.perf_counter() - self._seconds, threading.Event()
        # Python waits at its exit for threads that are no daemons, and this one may wait for a lost cluster.
        thread = threading.Thread(
            target=self._sample, args=(began, ended), name="gpurt-tier-view", daemon=True
        )
        try:
            thread.start()  # which ctrl-C may interrupt once the thread runs
            yield
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()
            self._seconds = time.perf_counter() - began

    def _sample(self, began: float, ended: threading.Event) -> None:
        self._take(began)
        while not ended.wait(self._period):
            self._take(began)
        self._take(began)

    def _take(self, began: float) -> None:
        try:
            rows = self._read()
            used = _by_tier(rows, rows["capacity"] - rows["headroom"])
            capacity = _by_tier(rows, rows["capacity"])
        # The demo continues without the sample, and reports the number of failures at the end.
        except Exception as error:
            self._failed += 1
            self._error = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            return
        if used:
            self._samples.append(_Sample(time.perf_counter() - began, used, capacity))
        if len(self._samples) > self._most:
            del self._samples[1::2]
            self._period *= 2

    def seen(self) -> dict[str, Any]:
        """Return all samples, as plain values.

        Returns
        -------
        dict
            ``seconds``: the time of each sample; ``used`` and ``capacity``: bytes by tier, summed over the
            workers; ``starts``: the starts of watched operations; ``failed``: the number of failed samples;
            ``error``: the last error.
        """
        samples = self._samples
        return {
            "seconds": [round(sample.seconds, 3) for sample in samples],
            "used": {tier: [sample.used.get(tier, 0) for sample in samples] for tier in SHOWN},
            "capacity": {
                tier: max((sample.capacity.get(tier, 0) for sample in samples), default=0) for tier in SHOWN
            },
            "starts": [[round(seconds, 3), name] for seconds, name in self._starts],
            "failed": self._failed,
            "error": self._error,
        }


def _by_tier(rows: pd.DataFrame, nbytes: pd.Series[Any]) -> dict[str, int]:
    return {str(tier): int(total) for tier, total in nbytes.groupby(rows["tier"]).sum().items()}


def tier_chart(seen: Mapping[str, Any]) -> dict[str, Any]:
    """Lay out a line per tier with its capacity (if inside the plot), axes, and a band per operation.

    Parameters
    ----------
    seen
        The result of :meth:`TierSampler.seen`.
    """
    seconds: Sequence[float] = seen["seconds"]
    most = max((max(used, default=0) for used in seen["used"].values()), default=0)
    step = int(2 ** math.ceil(math.log2(max(most, 4) / 4)))
    top, end = step * max(1, math.ceil(most / step)), max(seconds, default=0) or 1

    def x(at: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * min(at / end, 1), 1)

    def y(nbytes: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * nbytes / top, 1)

    lines = [
        {
            "tier": tier,
            "colour": COLOURS[tier],
            "most": max(seen["used"][tier], default=0),
            "points": " ".join(f"{x(at)},{y(n)}" for at, n in zip(seconds, seen["used"][tier], strict=True)),
            "limit": y(capacity) if 0 < (capacity := seen["capacity"][tier]) <= top else None,
            "capacity": capacity,
        }
        for tier in SHOWN
    ]
    return {
        "lines": lines,
        "rows": [{"y": y(at), "label": format_bytes(at)} for at in range(0, top + 1, step)],
        "columns": [{"x": x(at), "label": f"{at:g} s"} for at in _ticks(end)],
        "bands": [
            {"x": x(start), "width": x(until) - x(start), "name": name}
            for start, until, name in _operations(seen["starts"], end)
        ],
        "edges": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    }


def _ticks(end: float) -> list[float]:
    """Return at most ten round numbers of seconds for an axis."""
    scale = 10 ** math.floor(math.log10(end))
    step = next(scale * part for part in (0.1, 0.2, 0.5, 1, 2) if end / (scale * part) <= 10)
    return [i * step for i in range(math.floor(end / step) + 1)]


def _operations(starts: Sequence[tuple[float, str]], end: float) -> list[tuple[float, float, str]]:
    """Return begin, end and name of each operation, whose rounds are consecutive."""
    first = {name: start for start, name in reversed(starts)}
    in_order = sorted((start, name) for name, start in first.items())
    return [(start, until, name) for (start, name), (until, _) in pairwise([*in_order, (end, "")])]
