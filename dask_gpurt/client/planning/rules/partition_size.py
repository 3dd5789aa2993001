"""Choose into how many partitions the files of a table are read.

Dask reads several files as one partition if a query needs few of their columns, but at most the square root
of their number, however little they hold. Each partition is a task in every step of the query, and on a GPU a
task of 10 rows takes as long as one of some million. So a table of 64 small files is read in 8 tasks, and
joined with 16 more. Here its size decides, in programs whose result does not depend on partitions.

Decisions and their figures: ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dask_gpurt.client.planning.footers import Column
from dask_gpurt.client.planning.operations import Columns
from dask_gpurt.client.planning.reads import ParquetRead, is_idle, parquet_reads
from dask_gpurt.client.planning.rules import PartitionSizes
from dask_gpurt.client.planning.rules.dependence import depends_on_partitions
from dask_gpurt.client.planning.table_facts import Independence, TableFacts
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild

#: Counts reads by outcome.
Count = Callable[[str, int], None]

#: The most files that are put together, since a task opens one after the other. Dask's own limit is 100.
MOST_FILES = 100


@dataclass(frozen=True)
class TableRead:
    """Describe a read of a table's files.

    Parameters
    ----------
    bytes
        The estimated size of the columns that are read, in memory.
    files
        The number of files.
    partitions
        The number of partitions that Dask reads it in.
    partition
        The bytes of a partition up to which its files are put together; 0 to leave that to Dask.
    small
        The bytes up to which it is small.
    """

    bytes: int
    files: int
    partitions: int
    partition: int
    small: int


def choose_partitions(reads: Mapping[str, TableRead], *, workers: int, threads: int) -> dict[str, int]:
    """Return the number of partitions of each read for which it changes.

    A small table becomes a single partition, which Dask joins with each partition of another table, in place
    of shuffling both. One worker then sends copies to all, whereas in a shuffle each worker sends its part.
    So that this takes no longer, even on slow links, the copies have to be no more than a worker's part of
    the largest table, which would be shuffled otherwise.

    Of other tables all task threads read the same number of partitions. None has more partitions than Dask
    would make, or more than `MOST_FILES` files in a partition.

    Parameters
    ----------
    reads
        All reads of a plan, by name.
    workers, threads
        The numbers of workers and of their task threads.
    """
    largest = max((read.bytes for read in reads.values()), default=0)
    chosen: dict[str, int] = {}
    for name, read in reads.items():
        needed = math.ceil(read.files / MOST_FILES)
        if needed <= 1 and read.bytes <= read.small and read.bytes * workers**2 <= largest:
            number = 1
        elif read.partition:
            needed = max(1, needed, math.ceil(read.bytes / read.partition))
            number = math.ceil(needed / threads) * threads
        else:
            continue
        if number < read.partitions:
            chosen[name] = number
    return chosen


def bytes_in_memory(columns: Iterable[Column]) -> int:
    """Estimate the size of columns in memory from what footers say.

    A value of fixed width takes at most 8 bytes. Strings are kept as they are, or, if few of them differ, as
    numbers in the file, which hides their length; 16 bytes each include offsets.
    """
    return sum(
        column.rows * 8 if column.has_fixed_width else max(column.encoded, column.rows * 16)
        for column in columns
    )


def with_chosen_partitions(
    plan: Expr,
    sizes: PartitionSizes,
    count: Count = lambda how, number: None,
    facts: TableFacts | None = None,
) -> Expr:
    """Return a tuned plan whose reads have as many partitions as their sizes call for.

    Parameters
    ----------
    plan
        The plan of a computation, whose result goes to the client.
    count
        Called with the outcome, ``"by-size"`` or ``"as-dask"``, and a number of reads.
    facts
        Tells what is in the files, and notes on what of that the plan relies.
    """
    facts = TableFacts() if facts is None else facts
    bare = rebuild(plan, lambda expr: expr.frame if is_idle(expr) else expr)
    found = parquet_reads(bare)
    chosen = {} if not sizes.threads or depends_on_partitions(bare) else _chosen(bare, found, sizes, facts)

    def change(expr: Expr) -> Expr:
        name = name_of(expr)
        return found[name].with_partitions(chosen[name]) if name in chosen else expr

    changed = rebuild(bare, change) if chosen else plan
    count("by-size", len(chosen))
    count("as-dask", len(found) - len(chosen))
    return changed


def _chosen(
    plan: Expr, found: Mapping[str, ParquetRead], sizes: PartitionSizes, facts: TableFacts
) -> dict[str, int]:
    """Return the number of partitions of each read for which it changes; none if a file has gone.

    A table of which a column is not known, by its name, is left to Dask.
    """
    tables: dict[str, TableRead] = {}
    try:
        for name, read in found.items():
            if (found_sizes := facts.sample(read.read)) is None:
                continue
            files, sample = found_sizes
            mean = sum(map(bytes_in_memory, sample)) / max(len(sample), 1)
            limits = sizes.of(read.blocksize)
            tables[name] = TableRead(int(files * mean), math.ceil(files), read.expr.npartitions, *limits)
        chosen = choose_partitions(tables, workers=sizes.workers, threads=sizes.threads)
        if chosen and (known := independence_of(plan, facts)) is not None:
            facts.rely_on_dtypes(known)
            return chosen
        return {}
    except OSError:  # Dask finds out as it reads it
        return {}


def independence_of(plan: Expr, facts: TableFacts) -> Independence | None:
    """Return on what of its tables a plan relies so that its result does not depend on partitions.

    Parameters
    ----------
    plan
        A tuned plan.
    facts
        Tells which dtypes of the tables vary.

    Returns
    -------
    Independence
        None if the result may depend on partitions.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    if (tables := facts.columns(plan)) is None:
        return None
    with_any_nulls = {name: Columns(columns.varying) for name, columns in tables.items()}
    if not depends_on_partitions(plan, with_any_nulls):
        return Independence(plan, without_nulls=False)
    return None if depends_on_partitions(plan, tables) else Independence(plan, without_nulls=True)
