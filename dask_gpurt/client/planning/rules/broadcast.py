"""Read a small table as a single partition, so that Dask broadcasts it in joins.

This is where it is decided whether a join broadcasts a table. Dask joins a side of one partition with each
partition of the other side, in place of shuffling both, and decides so itself as it lowers the join
(``Merge.is_broadcast_join``). Here a table becomes that one partition. One worker then sends copies to all,
whereas in a shuffle each worker sends its part. So that this takes no longer, even on slow links, the copies
have to be no more than a worker's part of the largest table, which would be shuffled otherwise.

What it does not reason about
    Sides that are small because of filters or joins: only the footers of files are known before a query runs.
    Whether the table is joined at all. Joins that broadcast at run time, whose rows would be in other
    partitions than later operations rely on. Joins that must not broadcast: :mod:`dask_gpurt.client.lowering`
    forbids these (``Lowering.is_broadcast_join``).
Why the result is the same
    The result of the plan is independent of partitions (:mod:`.dependence`), and tasks check on which dtypes
    of files that relies.
The figure
    1.10 times as fast on two cores at scale 1 of TPC-H (``tpch-partitions-2cpu-sf1.json``); what was
    rejected: ``docs/decisions/partitions.md``.
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
