"""Estimate the sizes of the tables that a plan reads, and change the number of their partitions.

Shared by the rules that go by size, :mod:`.broadcast` and :mod:`.partition_size`. They change no read unless
all results that are made of it are independent of partitions, as :mod:`.dependence` finds out, and have tasks
check what that relies on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress

from dask_gpurt.client.planning.footers import Column
from dask_gpurt.client.planning.operations import Columns
from dask_gpurt.client.planning.reads import ParquetRead, parquet_reads
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import (
    depends_on_partitions,
    labels_shown,
    why_dependent,
)
from dask_gpurt.client.planning.table_facts import Independence, TableFacts
from dask_gpurt.dask_hooks.planning import Expr, in_sequence, is_sequence, name_of, rebuild

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
#: Returns the new number of partitions of those reads for which it changes, by name.
Choose = Callable[[Mapping[str, TableRead], Leave], Mapping[str, int]]


def with_partitions(rule: object, plan: Expr, facts: Facts, choose: Choose) -> tuple[Expr, int, int]:
    """Return a plan with other numbers of partitions, and how many reads were changed and were left.

    ``rule``: the rule that asks.
    ``plan``: a tuned plan, in which a read that a rule has changed is not changed again.
    ``facts``: see :class:`.Facts`.
    ``choose``: decides, given the reads whose size is known.
    """
    bare, dependent = facts.bare(plan)
    reads = parquet_reads(bare)
    if reads and (dependent or not facts.sizes.threads):
        reason = f"results depend on partitions: {dependent}" if dependent else "there are no workers"
        facts.note(rule, name_of(plan), f"has its reads as Dask makes them, since {reason}")
    part, kept = independent_part(bare) if dependent else (bare, frozenset[str]())
    found = {name: read for name, read in reads.items() if name not in kept}
    if not found or not facts.sizes.threads or not (chosen := _chosen(rule, part, found, facts, choose)):
        return plan, 0, len(reads)

    shown = labels_shown(part)

    def change(expr: Expr) -> Expr:
        if (name := name_of(expr)) not in chosen:
            return expr
        return found[name].with_partitions(chosen[name], labelled=name in shown)

    for name, number in chosen.items():
        text = f"is read in {number} partitions, not {found[name].expr.npartitions}"
        facts.note(rule, name, text, done=True)
    changed = rebuild(bare, change)
    if not dependent:
        facts.note_bare(changed)
    return changed, len(chosen), len(reads) - len(chosen)


def independent_part(plan: Expr) -> tuple[Expr, frozenset[str]]:
    """Return those results of a plan that do not depend on partitions, and the names of all in the others."""
    results = list(plan.operands) if is_sequence(plan) else [plan]
    free = [why_dependent(each) is None for each in results]
    kept = (each for each, is_free in zip(results, free, strict=True) if not is_free)
    names = frozenset(name_of(each) for result in kept for each in result.walk())
    return in_sequence(*compress(results, free)), names


def _chosen(
    rule: object, plan: Expr, found: Mapping[str, ParquetRead], facts: Facts, choose: Choose
) -> Mapping[str, int]:
    """Return the number of partitions of each read for which it changes; none if a file has gone."""

    def leave(name: str, reason: str) -> None:
        facts.note(rule, name, reason)

    try:
        if not (chosen := choose(_tables(found, facts, leave), leave)):
            return {}
        if (known := independence_of(plan, facts.tables)) is None:
            leave(name_of(plan), "has its reads as Dask makes them, since dtypes vary from file to file")
            return {}
    except OSError as error:  # Dask finds out as it reads it
        leave(name_of(plan), f"has its reads as Dask makes them: {error!r}")
        return {}
    facts.tables.rely_on_dtypes(known)
    return chosen


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


def independence_of(plan: Expr, facts: TableFacts) -> Independence | None:
    """Return on what of its tables a plan relies so that its result does not depend on partitions.

    ``plan``: a tuned plan.
    ``facts``: tells which dtypes of the tables vary.
    Returns None if the result may depend on partitions.
    Raises OSError if a file cannot be read.
    """
    if (tables := facts.columns(plan)) is None:
        return None
    with_any_nulls = {name: Columns(columns.varying) for name, columns in tables.items()}
    if not depends_on_partitions(plan, with_any_nulls):
        return Independence(plan, without_nulls=False)
    return None if depends_on_partitions(plan, tables) else Independence(plan, without_nulls=True)
