"""Define the result of a bench: its runs, their figures, and the gain of the runtime."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_gpurt.tools.bench.budget import planning

#: The contender with the runtime.
GPURT = "gpurt"
#: The parts of a run's seconds, in chronological order.
PARTS = ("planning", "starting", "computing", "idle", "collecting")


@dataclass(frozen=True)
class Spent:
    """Hold what a run spent: seconds, bytes and memory.

    ``planning``, ``starting``, ``computing``, ``idle``, ``collecting``: seconds that add up to the run: until
    the scheduler has its tasks; until the first task begins; then, for an average task thread, in tasks, and
    without a task; and from the end of the last task until the client has the result.
    ``read_bytes``, ``moved_bytes``, ``spilled_bytes``: bytes read from files, moved to other processes, and
    moved to lower memory tiers or to disk, on all workers.
    ``peak_bytes``: the largest peak memory of a worker process; None if unknown.
    """

    planning: float
    starting: float
    computing: float
    idle: float
    collecting: float
    tasks: int
    read_bytes: float
    moved_bytes: float
    spilled_bytes: float
    peak_bytes: int | None

    @classmethod
    def of(cls, spent: Mapping[str, Any], counted: Mapping[str, float], peak: int | None) -> Spent:
        """Build it from a :func:`~dask_gpurt.tools.bench.budget.budget` and the differences of counters."""
        seconds = spent["seconds"]
        # The gaps of a worker that has left meanwhile would add up to more.
        idle = min(spent["gaps"]["seconds_a_thread"], seconds["computing"])
        return cls(
            planning=planning(seconds),
            starting=seconds["first_task"],
            computing=seconds["computing"] - idle,
            idle=idle,
            collecting=seconds["collect"],
            tasks=sum(int(kind["count"]) for kind in spent["tasks"].values()),
            read_bytes=counted["read_bytes"],
            moved_bytes=counted["moved_bytes"],
            spilled_bytes=counted["spilled_bytes"],
            peak_bytes=peak,
        )


@dataclass(frozen=True)
class Run:
    """Record a run of a query.

    ``warm``: whether it is the second run of its round, which counts. The first run includes one-time costs.
    ``seconds``: seconds from the first expression until the result is on the client.
    """

    query: str
    contender: str
    round: int
    warm: bool
    seconds: float
    spent: Spent


@dataclass(frozen=True)
class Ratio:
    """Hold the ratio of the other method's time to the runtime's.

    ``value``: the median over the rounds of the geometric mean over the queries.
    ``low``, ``high``: the smallest and the largest value of a round.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Machine:
    """Describe the cluster that was measured."""

    workers: int
    threads: int
    hosts: int
    backend: str


@dataclass(frozen=True)
class Observed:
    """Hold the report of the runtime after its last round."""

    fallbacks: Mapping[str, int]
    departed: int


@dataclass(frozen=True, repr=False)
class BenchResult:
    """Report what the runtime gains on a cluster, and where the time goes.

    Parameters
    ----------
    from_files
        Whether tables were read from files; otherwise each query generated them.
    contenders
        ``gpurt`` and the shuffle method that it was compared with; only ``gpurt`` if the runtime was already
        on before.
    runs
        All runs, in order. Each result was equal to the first result of its query.
    """

    machine: Machine
    tables: str
    from_files: bool
    contenders: tuple[str, ...]
    runs: tuple[Run, ...]
    observed: Observed

    @property
    def ratio(self) -> Ratio | None:
        """Return the gain of the runtime; None if there is nothing to compare it with."""
        if len(self.contenders) == 1:
            return None
        ours, theirs = (self._seconds(name) for name in self.contenders)
        of_rounds = [
            statistics.geometric_mean(theirs[query, number] / ours[query, number] for query in self.queries)
            for number in sorted({number for _, number in ours})
        ]
        return Ratio(statistics.median(of_rounds), min(of_rounds), max(of_rounds))

    def _seconds(self, contender: str) -> dict[tuple[str, int], float]:
        """Return the seconds of warm runs, by query and round."""
        return {(run.query, run.round): run.seconds for run in self.runs if self._is(run, contender)}

    @staticmethod
    def _is(run: Run, contender: str, *, warm: bool = True) -> bool:
        return run.contender == contender and run.warm is warm

    @property
    def rounds(self) -> int:
        """Return the number of rounds."""
        return len({run.round for run in self.runs})

    @property
    def queries(self) -> list[str]:
        """Return the names of the queries, in order."""
        return list(dict.fromkeys(run.query for run in self.runs))

    def typical(self, query: str, contender: str) -> Run:
        """Return the warm run with the median duration; as a whole run, so that its parts add up."""
        mine = [run for run in self.runs if run.query == query and self._is(run, contender)]
        return sorted(mine, key=lambda run: run.seconds)[(len(mine) - 1) // 2]

    def first_seconds(self, query: str, contender: str) -> float:
        """Return the median seconds of the first run of each round."""
        return statistics.median(
            run.seconds for run in self.runs if run.query == query and self._is(run, contender, warm=False)
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame with a row for each query and contender, in seconds and bytes.

        Returns
        -------
        pandas.DataFrame
            Medians over rounds of the ``first`` and ``warm`` seconds, and the fields of :class:`Spent` of the
            warm run with the median duration.
        """
        return pd.DataFrame(
            [
                {
                    "query": query,
                    "contender": contender,
                    "first": self.first_seconds(query, contender),
                    "warm": statistics.median(
                        seconds for (of, _), seconds in self._seconds(contender).items() if of == query
                    ),
                    **asdict(self.typical(query, contender).spent),
                }
                for query in self.queries
                for contender in self.contenders
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON-serialisable values."""
        return asdict(self) | {"ratio": None if self.ratio is None else asdict(self.ratio)}

    def verdict(self) -> str:
        """Return a sentence on the gain of the runtime."""
        if self.ratio is None:
            return "The runtime was already on, and was left on: there is nothing to compare it with."
        ratio, other = self.ratio, self.contenders[-1]
        of_rounds = (
            f"{ratio.low:.2f} to {ratio.high:.2f} in {self.rounds} rounds; " if self.rounds > 1 else ""
        )
        return (
            f"{other} takes {ratio.value:.2f} times as long as the runtime ({of_rounds}geometric mean of "
            f"{len(self.queries)} queries)."
        )

    def doubts(self) -> Iterator[str]:
        """Yield sentences on what makes the ratio say less than it seems to."""
        if self.observed.departed:
            yield f"Workers that left meanwhile: {self.observed.departed}. Their work was done again."
        for id, count in sorted(self.observed.fallbacks.items()):
            yield f"The runtime fell back {count} times, {id}: `dask gpurt doctor` gives the reason."
        if self.ratio is not None and self.rounds == 1:
            yield "There was only 1 round: measure more --rounds before you decide."
        elif self.ratio is not None and self.ratio.low <= 1 <= self.ratio.high:
            yield "The rounds do not agree: measure more --rounds, or a larger --scale, on an idle cluster."

    def heading(self) -> str:
        """Return a line that describes what was measured."""
        of = self.machine
        return f"{of.workers} workers, {of.threads} threads, {of.backend}; {self.tables}"

    def _table(self, columns: Sequence[str]) -> str:
        """Return columns of :meth:`to_pandas` as a table of text, with a row for each query and contender."""
        frame = self.to_pandas()[["query", "contender", *columns]]
        texts = {
            SHORT.get(name, name): [readable(name, value) for value in frame[name]]
            for name in map(str, frame)
        }
        return pd.DataFrame(texts).to_string(index=False)

    def __str__(self) -> str:
        tables = (SECONDS_CAPTION, self._table(SECONDS), SIZES_CAPTION, self._table(SIZES))
        return "\n".join([self.heading(), *tables, self.verdict(), *self.doubts()])

    def __repr__(self) -> str:
        return f"<BenchResult: {self}>"


#: The printed columns, in two tables that each fit into a terminal.
SECONDS = ("first", "warm", *PARTS)
SECONDS_CAPTION = """
Seconds of the first and the warm run, and the parts of the warm run: planning, starting;
computing and idle of an average task thread; and collecting the result"""
SIZES = ("tasks", "read_bytes", "moved_bytes", "spilled_bytes", "peak_bytes")
SIZES_CAPTION = "\nThe warm run: tasks, bytes of all workers, and peak memory of one worker"
#: Short headings, so that a table fits into 80 characters.
SHORT = {
    "planning": "plan",
    "starting": "start",
    "computing": "comp",
    "collecting": "coll",
}
SHORT |= {name: name.removesuffix("_bytes") for name in SIZES} | {"contender": "by"}


def readable(name: str, value: Any) -> str:
    """Return a value of a column as text: seconds with two decimals, bytes with a unit."""
    if value is None or value != value:
        return "-"
    if name.endswith("_bytes"):
        return short_bytes(int(value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def short_bytes(nbytes: int) -> str:
    """Return a number of bytes with three digits and a unit."""
    number, unit = format_bytes(nbytes).split()
    digits = 0 if unit == "B" else max(0, 3 - len(number.partition(".")[0]))
    return f"{float(number):.{digits}f} {unit}"
