"""Make rows for benchmarks, and fingerprints that identify sets of rows in any order."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from dask.base import compute
from dask.delayed import delayed

#: Bytes of a key and a payload, both int64.
ROW_BYTES = 16
GIB = 2**30
#: The modulus of sums.
WRAP = 2**64
#: A prime. Its multiples modulo n are a permutation of the numbers below n unless it divides n.
STRIDE = 1_000_000_007
#: The factor from a key to its weight.
WEIGHT = 0x9E3779B97F4A7C1


class Fingerprint(NamedTuple):
    """Identify a set of rows regardless of order: sums modulo 2**64, and the range of the keys."""

    rows: int
    key: int
    payload: int
    key_times_payload: int
    weight: int | None
    lowest: int | None
    highest: int | None
    ascends: bool


def make_random(part: int, rows: int, highest: int, backend: str) -> Any:
    """Make a partition of uniformly random keys below ``highest``, with a random payload."""
    random = arrays_of(backend).random.RandomState(part)
    key, payload = (random.randint(0, end, rows, dtype="int64") for end in (highest, 2**62))
    return importlib.import_module(backend).DataFrame({"key": key, "payload": payload})


def make_unique(part: int, rows: int, total: int, backend: str) -> Any:
    """Make a partition of a permutation of the keys below ``total``; the weight follows from the key."""
    position = arrays_of(backend).arange(part * rows, (part + 1) * rows, dtype="int64")
    key = position * STRIDE % total
    return importlib.import_module(backend).DataFrame({"key": key, "weight": key * WEIGHT})


def arrays_of(backend: str) -> Any:
    """Return the array library of a dataframe backend."""
    return importlib.import_module({"pandas": "numpy", "cudf": "cupy"}[backend])


def fingerprint(frame: Any) -> Fingerprint:
    """Take the fingerprint of a partition of any backend."""
    if frame.index.name == "key":
        frame = frame.reset_index()
    key, payload = frame["key"], frame["payload"]
    return Fingerprint(
        rows=len(frame),
        key=int(key.sum()) % WRAP,
        payload=int(payload.sum()) % WRAP,
        key_times_payload=int((key * payload).sum()) % WRAP,
        weight=int(frame["weight"].sum()) % WRAP if "weight" in frame.columns else None,
        lowest=int(key.min()) if len(frame) else None,
        highest=int(key.max()) if len(frame) else None,
        ascends=bool(key.is_monotonic_increasing),
    )


def fingerprints(frame: Any) -> list[Fingerprint]:
    """Take the fingerprints of all partitions, on the workers."""
    taken = [delayed(fingerprint)(part) for part in frame.to_delayed(optimize_graph=False)]
    return list(compute(*taken))


def totals(parts: Sequence[Fingerprint]) -> tuple[int | None, ...]:
    """Add up fingerprints: rows, key, payload, key times payload, weight."""

    def total(values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) % WRAP if known else None

    return tuple(total([part[i] for part in parts]) for i in range(5))


def check(parts: Sequence[Fingerprint], expected: tuple[int | None, ...], sorts: bool) -> None:
    """Raise unless the partitions hold the expected rows and, if ``sorts``, are in the order of their key.

    Expected totals of None are not checked.
    """
    found = totals(parts)
    known = [(one, other) for one, other in zip(found, expected, strict=True) if other is not None]
    if any(one != other for one, other in known):
        raise ValueError(f"rows and checksums are {found}, not {expected}")
    ends = [end for part in parts for end in (part.lowest, part.highest) if end is not None]
    if sorts and not (ends == sorted(ends) and all(part.ascends for part in parts if part.rows)):
        raise ValueError("the result is not in the order of its key")
