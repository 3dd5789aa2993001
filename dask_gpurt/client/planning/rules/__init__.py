"""Rules that change a plan, one a module."""

from __future__ import annotations

from dataclasses import dataclass

#: The bytes up to which a table is small by default: of pandas, and on a GPU as a share of a partition, which
#: is what dask_cudf aims at for files, 1/32 of the GPU's memory.
SMALL_ON_PANDAS = 16 << 20
SMALL_SHARE_ON_GPU = 4


@dataclass(frozen=True)
class PartitionSizes:
    """Hold what the number of partitions depends on besides the tables.

    Parameters
    ----------
    workers
        The number of workers.
    threads
        The number of their task threads.
    partition
        The bytes of a partition up to which files are put together; 0 for small tables only, None for the
        default of the library.
    broadcast
        The bytes up to which a table is small; 0 for none, None for the default of the library.
    largest
        The most bytes of a partition by default; None for no limit.
    """

    workers: int
    threads: int
    partition: int | None = None
    broadcast: int | None = None
    largest: int | None = None

    def of(self, blocksize: int) -> tuple[int, int]:
        """Return the bytes of a partition, and of a small table.

        Parameters
        ----------
        blocksize
            The bytes of a partition that dask_cudf aims at; 0 for pandas, whose partitions are left to Dask:
            each is work for many times the time that a task takes in any case.
        """
        by_default = blocksize if self.largest is None else min(blocksize, self.largest)
        small = by_default // SMALL_SHARE_ON_GPU if blocksize else SMALL_ON_PANDAS
        return (
            by_default if self.partition is None else self.partition,
            small if self.broadcast is None else self.broadcast,
        )
