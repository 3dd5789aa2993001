"""Say in plain lines what has been found of each computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dask.utils import format_time

from dask_gpurt.client.explain.plan import Explanation
from dask_gpurt.client.explain.run import advise, measure
from dask_gpurt.tools.qualify.parts import PARTS, Computation, Estimate, estimate, library_of

#: The computations that are printed, those that took longest.
PRINTED = 20
#: Parts below this share of the time are left out.
LEAST_SHARE = 0.02


@dataclass(frozen=True)
class Qualified:
    """Hold what is known of a computation."""

    computation: Computation
    #: How Dask has planned it, and how the runtime would; empty if the program was not seen.
    plans: Sequence[tuple[Explanation, Explanation]]
    #: The number of task threads.
    threads: int

    @cached_property
    def estimate(self) -> Estimate:
        """Return the seconds with the runtime."""
        found = self.computation
        return estimate(found.parts, library_of(found.rows, found.parts))

    def advice(self) -> tuple[str, ...]:
        """Return what to change in the program, as ``explain`` does."""
        found = self.computation
        names = {name: label for stock, _ in self.plans for name, label in stock.names.items()}
        reads = tuple(read for _, ours in self.plans for read in ours.reads)
        plan = Explanation(len(found.rows), 0.0, reads=reads, names=names)
        run = measure(found.rows, plan, began=found.began, ended=found.ended, threads=self.threads)
        return advise(plan, replace(run, seconds=found.seconds))


def lines(found: Sequence[Qualified]) -> Iterator[str]:
    """Describe computations in the order in which they ran, and all together."""
    by_time = sorted(range(len(found)), key=lambda at: -found[at].computation.seconds)
    printed = set(by_time[:PRINTED])
    for number, each in enumerate(found, 1):
        if number - 1 in printed:
            yield f"computation {number} of {len(found)}: " + "\n  ".join(_lines(each))
    if len(found) > PRINTED:
        yield f"and {len(found) - PRINTED} shorter ones"
    parts = {part: sum(each.computation.parts[part] for each in found) for part in PARTS}
    seconds = sum(parts.values())
    total = Estimate(*map(sum, zip(*(each.estimate for each in found), strict=True)))
    yield f"all: {format_time(seconds)}\n  {_parts(parts)}\n  {_estimated(seconds, total)}"


def _lines(found: Qualified) -> Iterator[str]:
    computation = found.computation
    tasks = f"{len(computation.rows):,} task{'' if len(computation.rows) == 1 else 's'}"
    yield f"{format_time(computation.seconds)}, {tasks} on {found.threads} threads"
    yield _parts(computation.parts)
    yield _estimated(computation.seconds, found.estimate)
    for stock, ours in found.plans:
        done = dict.fromkeys(f"  {note}" for note in ours.notes if note.done)
        if done or ours.tasks != stock.tasks:
            yield f"the runtime would plan {ours.tasks:,} tasks in place of {stock.tasks:,}"
            yield from done
    if advice := found.advice():
        yield "what would help most, with the runtime or without:"
        yield from (f"  {number}. {text}" for number, text in enumerate(advice, 1))


def _parts(parts: Mapping[str, float]) -> str:
    least = LEAST_SHARE * sum(parts.values())
    ordered = sorted(parts.items(), key=lambda each: -each[1])
    return ", ".join(f"{part} {format_time(seconds)}" for part, seconds in ordered if seconds > least)


def _estimated(seconds: float, left: Estimate) -> str:
    times = dict.fromkeys(f"{seconds / each:.1f}" for each in left if each)
    fast = f"{' or '.join(times)} times as fast"
    long, short = map(format_time, left)
    return f"with the runtime about {long}, or {short} if gaps and planning stay: {fast}"
