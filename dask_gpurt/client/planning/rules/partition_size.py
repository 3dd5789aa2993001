"""Read the files of a table in as many partitions as their size calls for, and a small table in one.

Dask reads several files as one partition if a query needs few of their columns, but at most the square root
of their number, however little they hold. Each partition is a task in every step of the query, and on a GPU a
task of 10 rows takes as long as one of some million. So a table of 64 small files is read in 8 tasks, and
joined with 16 more. Here its size decides: all task threads read the same number of partitions, each of at
most the size that is asked for. None has more partitions than Dask would make, or more than `MOST_FILES`.

A small table becomes a single partition, which Dask joins with each partition of the other side, in place of
shuffling both (``Merge.is_broadcast_join``): here it is decided whether a join broadcasts a table. One worker
then sends copies to all, whereas in a shuffle each worker sends its part. So that this takes no longer, even
on slow links, the copies have to be no more than a worker's part of the largest table.

What it does not reason about
    Smaller partitions than Dask's, which were tried and took longer. Sides that are small because of filters
    or joins: only the footers of files are known before a query runs. Whether a table is joined at all.
    Tables in object storage, of which one task would wait for one file after the other. Joins that must not
    broadcast: :mod:`dask_gpurt.client.lowering` forbids these (``Lowering.is_broadcast_join``).
Why the result is the same
    The result of the plan is independent of partitions (:mod:`.dependence`), and tasks check on which dtypes
    of files that relies.
The figure
    Small tables: 1.10 times as fast on two cores at scale 1 of TPC-H (``tpch-partitions-2cpu-sf1.json``).
    Both: 1.48 times on two H200s at scale 100 (``tpch-partitions-2xh200-sf100.json``); large tables are left
    to Dask on pandas by default. What was rejected: ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dask_gpurt.client.planning.footers import Column
from dask_gpurt.client.planning.reads import ParquetRead, parquet_reads
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import independent_part, labels_shown, rely_on_independence
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild

#: The most files that are put together, since a task opens one after the other. Dask's own limit is 100.
MOST_FILES = 100


@dataclass(frozen=True)
class TableRead:
    """Describe a read of a table's files.

    ``bytes``: the estimated size of the columns that are read, in memory.
    ``files``: the number of files.
    ``partitions``: the number of partitions that it is read in.
    ``partition``: the bytes of a partition up to which its files are put together; 0 to leave that to Dask.
    ``small``: the bytes up to which it is small.
    """

    bytes: int
    files: int
    partitions: int
    partition: int
    small: int


#: Called with the name of a read that is left to Dask, and the reason.
Leave = Callable[[str, str], None]


class PartitionSize:
    """Read small tables as a single partition, and others in as many as their size calls for."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan with other numbers of partitions; a read that is changed already stays so."""
        bare, dependent = facts.bare(plan)
        reads = parquet_reads(bare)
        if reads and (dependent or not facts.sizes.threads):
            reason = f"results depend on partitions: {dependent}" if dependent else "there are no workers"
            facts.note(self, name_of(plan), f"has its reads as Dask makes them, since {reason}")
        part, kept = independent_part(bare) if dependent else (bare, frozenset[str]())
        found = {name: read for name, read in reads.items() if name not in kept}
        chosen = self._chosen(part, found, facts) if found and facts.sizes.threads else {}
        for outcome, number in (("by-size", len(chosen)), ("as-dask", len(reads) - len(chosen))):
            if number:
                facts.metrics.add("planning.reads.{outcome}", number, outcome)
        if not chosen:
            return plan
        shown = labels_shown(part, {name: found[name] for name in chosen})

        def change(expr: Expr) -> Expr:
            if (name := name_of(expr)) not in chosen:
                return expr
            return found[name].with_partitions(chosen[name], labelled=name in shown)

        for name, number in chosen.items():
            text = f"is read in {number} partitions, not {found[name].expr.npartitions}"
            facts.note(self, name, text, done=True)
        changed = rebuild(bare, change)
        if not dependent:
            facts.note_bare(changed)
        return changed

    def _chosen(self, plan: Expr, found: Mapping[str, ParquetRead], facts: Facts) -> Mapping[str, int]:
        """Return the number of partitions of each read for which it changes; none if a file has gone."""

        def leave(name: str, reason: str) -> None:
            facts.note(self, name, reason)

        try:
            tables = _tables(found, facts, leave)
            chosen = choose_small(tables, leave, workers=facts.sizes.workers)
            rest = {name: read for name, read in tables.items() if name not in chosen}
            chosen |= choose_partitions(rest, leave, threads=facts.sizes.threads)
            if chosen and not rely_on_independence(facts.tables, plan):
                leave(name_of(plan), "has its reads as Dask makes them, since dtypes vary from file to file")
                return {}
        except OSError as error:  # Dask finds out as it reads it
            leave(name_of(plan), f"has its reads as Dask makes them: {error!r}")
            return {}
        return chosen


def choose_small(reads: Mapping[str, TableRead], leave: Leave, *, workers: int) -> dict[str, int]:
    """Return 1 for each read that becomes a single partition, by name.

    ``reads``: all reads of a plan.
    ``leave``: called with the name of a read that is left, and the reason.
    ``workers``: the number of workers.
    """
    largest = max((read.bytes for read in reads.values()), default=0)
    chosen: dict[str, int] = {}
    for name, read in reads.items():
        if (reason := _why_not(read, largest, workers)) is None:
            chosen[name] = 1
        else:
            leave(name, f"is not read as a single partition to broadcast: {reason}")
    return chosen


def _why_not(read: TableRead, largest: int, workers: int) -> str | None:
    if read.partitions <= 1:
        return "it is one already"
    if math.ceil(read.files / MOST_FILES) > 1:
        return f"{read.files} files are too many for one task"
    if read.bytes > read.small:
        return f"its {read.bytes} bytes are more than {read.small}"
    if read.bytes * workers**2 > largest:
        return f"copies of its {read.bytes} bytes are more than a worker's part of {largest}"
    return None


def choose_partitions(reads: Mapping[str, TableRead], leave: Leave, *, threads: int) -> dict[str, int]:
    """Return the number of partitions of each read for which it changes.

    ``reads``: the reads of a plan, by name.
    ``leave``: called with the name of a read that is left, and the reason.
    ``threads``: the number of task threads.
    """
    chosen: dict[str, int] = {}
    for name, read in reads.items():
        if not read.partition:
            leave(name, "is read in partitions of the size that Dask chooses, which is the default on pandas")
            continue
        needed = max(1, math.ceil(read.files / MOST_FILES), math.ceil(read.bytes / read.partition))
        number = math.ceil(needed / threads) * threads
        if number < read.partitions:
            chosen[name] = number
        else:
            leave(name, f"has {read.partitions} partitions, no more than the {number} needed")
    return chosen


# ---- sizes ------------------------------------------------------------------------------------------


def _tables(found: Mapping[str, ParquetRead], facts: Facts, leave: Leave) -> dict[str, TableRead]:
    """Describe the reads; a table of which a column is not known, by its name, is left to Dask."""
    tables: dict[str, TableRead] = {}
    for name, read in found.items():
        if (sampled := facts.tables.sample(read.read)) is None:
            leave(name, "is left to Dask: a column is not in its files")
            continue
        files, sample = sampled
        mean = sum(map(bytes_in_memory, sample)) / max(len(sample), 1)
        limits = facts.sizes.of(read.blocksize)
        tables[name] = TableRead(int(files * mean), math.ceil(files), read.expr.npartitions, *limits)
    return tables


def bytes_in_memory(columns: Iterable[Column]) -> int:
    """Estimate the size of columns in memory from what footers say.

    A value of fixed width takes at most 8 bytes. Strings are kept as they are, or, if few of them differ, as
    numbers in the file, which hides their length; 16 bytes each include offsets.
    """
    return sum(
        column.rows * 8 if column.has_fixed_width else max(column.encoded, column.rows * 16)
        for column in columns
    )
