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
from collections.abc import Mapping
from functools import partial

from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.table_sizes import MOST_FILES, Leave, TableRead, with_partitions
from dask_gpurt.dask_hooks.planning import Expr


class Broadcast:
    """Read small tables as a single partition."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan in which small tables are single partitions."""
        changed, number, _ = with_partitions(
            self, plan, facts, partial(choose_small, workers=facts.sizes.workers)
        )
        if number:
            facts.metrics.add("planning.reads.{outcome}", number, "by-size")
        return changed


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


class PartitionSize:
    """Put together the files of tables that are not small."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan whose reads have as many partitions as their sizes call for."""
        changed, number, left = with_partitions(
            self, plan, facts, partial(choose_partitions, threads=facts.sizes.threads)
        )
        if number:
            facts.metrics.add("planning.reads.{outcome}", number, "by-size")
        if left:
            facts.metrics.add("planning.reads.{outcome}", left, "as-dask")
        return changed


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
