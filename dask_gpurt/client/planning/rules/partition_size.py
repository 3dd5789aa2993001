"""Read the files of a table in as many partitions as their size calls for.

Dask reads several files as one partition if a query needs few of their columns, but at most the square root
of their number, however little they hold. Each partition is a task in every step of the query, and on a GPU a
task of 10 rows takes as long as one of some million. So a table of 64 small files is read in 8 tasks, and
joined with 16 more. Here its size decides: all task threads read the same number of partitions, each of at
most the size that is asked for. None has more partitions than Dask would make, or more than `MOST_FILES`.

What it does not reason about
    Smaller partitions than Dask's, which were tried and took longer. Rows that filters leave out. Tables in
    object storage, of which one task would wait for one file after the other. Frames that are not read.
Why the result is the same
    As for :mod:`.broadcast`: the result is independent of partitions, and tasks check on what that relies.
The figure
    Together with :mod:`.broadcast` 1.48 times as fast on two H200s at scale 100 of TPC-H
    (``tpch-partitions-2xh200-sf100.json``); off on pandas by default. Larger and smaller partitions:
    ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.table_sizes import MOST_FILES, Leave, TableRead, with_partitions
from dask_gpurt.dask_hooks.planning import Expr


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
