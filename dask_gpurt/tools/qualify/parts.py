"""Divide what was recorded into computations, and estimate what the runtime leaves of their time. Pure.

The time of a computation has parts that add up to it. Each part is multiplied by a factor, which was fitted
to queries of TPC-H that both Dask and the runtime had run, for seconds each; ``python -m
benchmarks.qualify.fit`` prints the factors and their error. In short programs gaps and planning stay, so
there are two estimates. Neither knows what rules leave out.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from dask.utils import key_split

from dask_gpurt.tools.qualify.recording import Recording

#: The parts of the time of tasks, by what their names contain; the first one counts.
KINDS = {
    "shuffles": re.compile("shuffle|p2p|hash-?join|rechunk|barrier|quantile|set_index|sort"),
    "joins": re.compile("merge|join|align"),
    "reads": re.compile("read|from_?map|from_?pandas"),
    "groups": re.compile("group|agg|chunk|-tree|unique|duplicates|value_counts"),
}
#: What else threads do, and what the time is in which they do nothing.
OTHER, WAITING, DISK, IDLE, BEFORE = "other tasks", "waiting for data", "disk", "gaps", "planning and program"
PARTS = (*KINDS, OTHER, WAITING, DISK, IDLE, BEFORE)
#: Without the arrivals of graphs, a pause of this many seconds divides computations.
PAUSE_S = 0.25


@dataclass(frozen=True)
class Computation:
    """Say where the time of a computation went."""

    began: float
    ended: float
    #: Seconds by part, as if each thread had an equal share; they add up to the time of the computation.
    #: ``BEFORE`` is the time since the end of the one before: planning, results, the program itself.
    parts: Mapping[str, float]
    #: Its rows of the task stream.
    rows: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        """Return its time, with the time before it."""
        return sum(self.parts.values())


def kind_of(key: Any) -> str:
    """Return which part the tasks of a key belong to."""
    name = key_split(key)
    return next((kind for kind, words in KINDS.items() if words.search(name)), OTHER)


def computations(found: Recording) -> list[Computation]:
    """Divide what was recorded where a graph arrives while no task runs, or where nothing runs for long."""
    spans = sorted(((*_span(row), row) for row in found.rows if row["startstops"]), key=lambda each: each[:2])
    if not spans:
        return []
    starts = [start for start, _, _ in spans]
    ends = list(accumulate((stop for _, stop, _ in spans), max))
    cuts = [(0, min([*found.graphs[:1], starts[0]]))]
    for at, arrived in _pauses(starts, ends) if not found.graphs else _arrivals(found.graphs, starts):
        if cuts[-1][0] < at < len(spans) and ends[at - 1] <= arrived:
            cuts.append((at, arrived))
    made, before = [], found.began
    for (first, arrived), (last, _) in pairwise([*cuts, (len(spans), found.ended)]):
        rows = [row for _, _, row in spans[first:last]]
        arrived = max(before, min(arrived, starts[first]))
        end = max(arrived, ends[last - 1])
        made.append(Computation(arrived, end, _parts(rows, arrived, end, before, found.threads), rows))
        before = end
    return made


def _span(row: Mapping[str, Any]) -> tuple[float, float]:
    return min(each["start"] for each in row["startstops"]), max(each["stop"] for each in row["startstops"])


def _arrivals(graphs: Sequence[float], starts: Sequence[float]) -> Iterator[tuple[int, float]]:
    for arrived in graphs:
        yield bisect_left(starts, arrived), arrived


def _pauses(starts: Sequence[float], ends: Sequence[float]) -> Iterator[tuple[int, float]]:
    for at, (end, start) in enumerate(zip(ends, starts[1:], strict=False), 1):
        if start - end > PAUSE_S:
            yield at, start


def _parts(
    rows: Sequence[Mapping[str, Any]], began: float, ended: float, before: float, threads: int
) -> dict[str, float]:
    """Add up what threads did; a thread has one task at a time, but fetches and spills beside it."""
    sums = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        for span in row["startstops"]:
            action, seconds = span["action"], span["stop"] - span["start"]
            if action == "compute":
                sums[kind_of(row["key"])] += seconds
            else:
                sums[DISK if action.startswith("disk") else WAITING] += seconds
    room = (ended - began) * threads
    busy = sum(sums.values())
    scale = min(1.0, room / busy) if busy else 1.0  # transfers of several tasks go on at the same time
    parts = {part: seconds * scale / threads for part, seconds in sums.items()}
    return {**parts, IDLE: max(0.0, room - busy) / threads, BEFORE: began - before}


# ---- estimates -----------------------------------------------------------------------------------------

#: The share of each part that is left, by the library of the frames; what is not named stays as it is.
FACTORS: Mapping[str, Mapping[str, float]] = {
    "pandas": {
        **{"shuffles": 0.20, "joins": 0.51, "reads": 0.96, "groups": 0.79},
        **{OTHER: 0.59, WAITING: 0.06, IDLE: 0.15, BEFORE: 0.49},
    },
    "cudf": {
        **{"shuffles": 0.15, "joins": 0.46, "reads": 0.54, "groups": 0.68},
        **{OTHER: 0.45, WAITING: 0.05, IDLE: 0.18, BEFORE: 0.04},
    },
    # Arrays, bags and functions: only rechunks go through the runtime.
    "": {"shuffles": 0.50},
}
#: What stays in short programs, in which threads wait for latencies, and plans are new.
STAYS = (IDLE, BEFORE)


class Estimate(NamedTuple):
    """Hold the estimated seconds with the runtime: of long programs, and if gaps and planning stay."""

    seconds: float
    stays: float


def estimate(parts: Mapping[str, float], library: str) -> Estimate:
    """Estimate the seconds with the runtime from those of each part without, and the library of frames."""
    left = {part: FACTORS[library].get(part, 1.0) * seconds for part, seconds in parts.items()}
    stays = {part: parts[part] for part in STAYS}
    return Estimate(sum(left.values()), sum({**left, **stays}.values()))


def library_of(rows: Iterable[Mapping[str, Any]], parts: Mapping[str, float]) -> str:
    """Return the library of the frames that tasks return; empty if they return something else.

    Performance reports have no types: there, what reads or joins is taken for pandas.
    """
    types = {str(row["typename"]).partition(".")[0] for row in rows if row.get("typename")}
    if not types:
        return "pandas" if parts["reads"] + parts["joins"] else ""
    return next((library for library in ("cudf", "pandas") if library in types), "")
