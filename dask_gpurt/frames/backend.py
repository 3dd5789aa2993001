"""Define the seam between the runtime and a dataframe library.

A backend cuts a partition into pieces, one for each owner, packs a piece into one buffer,
reads pieces back out of such buffers and puts an output partition together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dask_gpurt.device import Block, Device
from dask_gpurt.device.base import Buffer

Frame = Any


@dataclass(frozen=True)
class Piece:
    """Hold the rows of one input partition that one owner needs, ordered by output partition.

    Attributes
    ----------
    rows
        The rows, in the backend's own form.
    partitions
        The output partitions in it.
    offsets
        The row at which each output partition begins, and the number of rows last.
    """

    rows: Any
    partitions: tuple[int, ...]
    offsets: tuple[int, ...]

    def __len__(self) -> int:
        return self.offsets[-1]

    def halves(self, cut: Callable[[Any, int, int], Any]) -> tuple[Piece, Piece]:
        """Return two pieces with half of the rows each; ``cut(rows, start, stop)`` takes some."""
        middle, end = len(self) // 2, len(self)
        first = tuple(min(offset, middle) for offset in self.offsets)
        second = tuple(max(offset - middle, 0) for offset in self.offsets)
        return (
            Piece(cut(self.rows, 0, middle), self.partitions, first),
            Piece(cut(self.rows, middle, end), self.partitions, second),
        )


@dataclass(frozen=True)
class Hashed:
    """Hold a partition whose rows go where the hash of some columns says.

    The hash is Dask's, so that a row goes where ``tasks`` would send it. A backend that knows
    how may compute it while it splits; ``assign`` has Dask do it, in a column.

    Attributes
    ----------
    frame
        The partition.
    by
        Columns to hash; None where it is the index, or both.
    keys
        The frame that has these columns, which ``frame`` need not have.
    like
        The frame whose dtypes say which columns are cast before they are hashed.
    assign
        Makes of rows of ``keys`` those of ``frame`` with one more column, of output partitions.
    """

    frame: Frame
    by: tuple[str, ...] | None
    keys: Frame
    like: Frame
    assign: Callable[[Frame], Frame]

    def assigned(self) -> Frame:
        """Return ``frame`` with one more column, of output partitions."""
        return self.assign(self.keys)

    def between(self, start: int, stop: int) -> Hashed:
        """Return some of the rows."""
        return replace(self, frame=self.frame.iloc[start:stop], keys=self.keys.iloc[start:stop])


@dataclass(frozen=True)
class Ranged:
    """Hold a partition whose rows go where ranges of one column say, as Dask sorts.

    Attributes
    ----------
    frame
        The partition.
    by
        The column.
    divisions
        A series of where the ranges begin, in ascending order, and where the last one ends.
    assign
        Has Dask make rows of ``frame`` with one more column, of output partitions.
    """

    frame: Frame
    by: Any
    divisions: Any
    assign: Callable[[Frame], Frame]

    def assigned(self) -> Frame:
        """Return ``frame`` with one more column, of output partitions."""
        return self.assign(self.frame)

    def between(self, start: int, stop: int) -> Ranged:
        """Return some of the rows."""
        return replace(self, frame=self.frame.iloc[start:stop])


#: A partition that does not have the column of output partitions yet.
Routed = Hashed | Ranged


def halves(frame: Frame | Routed) -> Sequence[Frame | Routed]:
    """Return the two halves of a partition, as views; nothing of fewer than two rows."""
    rows = len(frame.frame if isinstance(frame, Routed) else frame)
    if rows < 2:
        return ()
    between = frame.between if isinstance(frame, Routed) else lambda a, b: frame.iloc[a:b]
    return between(0, rows // 2), between(rows // 2, rows)


@dataclass(frozen=True)
class Packed:
    """Describe a packed piece: its block in a pool, and the data that are needed to read it."""

    block: Block
    header: bytes


@dataclass(frozen=True)
class Part:
    """Describe the rows of one output partition in one packed piece.

    Attributes
    ----------
    header, buffer
        As they were packed.
    offsets, index
        The rows at which the output partitions begin, and which of them is meant.
    memo
        Lives as long as the buffer: a backend may remember there what it has read.
    """

    header: bytes
    buffer: Buffer
    offsets: tuple[int, ...]
    index: int
    memo: dict[str, Any]


class BlockAllocator(Protocol):
    """Cut the blocks into which pieces are packed."""

    def allocate(self, nbytes: int) -> Block:
        """Cut a block; raises PoolFull."""
        ...

    def give_back(self, block: Block) -> None:
        """Free a block that was not used after all."""
        ...


@contextmanager
def giving_back(block: Block, allocator: BlockAllocator) -> Iterator[None]:
    """Give a block back if it could not be filled."""
    try:
        yield
    except BaseException:
        allocator.give_back(block)
        raise


class Packer(Protocol):
    """Pack pieces, on a device."""

    name: str

    @property
    def device(self) -> Device: ...

    def cut(self, rows: Any, start: int, stop: int) -> Any:
        """Return some rows of ``Piece.rows``."""
        ...

    def pack(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        """Write a piece into one block, complete after the next :meth:`settle`.

        Raises
        ------
        PoolFull
            When ``allocator`` has no block of the size.
        """
        ...

    def settle(self) -> None:
        """Wait until all that this thread has packed is there for peers to read."""
        ...

    def fence(self) -> Callable[[], None] | None:
        """Return what waits, when called, until everything assembled so far has been read; None: it has."""
        ...


class Table(Packer, Protocol):
    """Split, pack and assemble the frames of a dataframe library, on a device."""

    def split(
        self,
        frame: Frame | Routed,
        column: str,
        groups: Sequence[Sequence[int]],
        npartitions: int,
        *,
        drop_column: bool,
        ignore_index: bool,
    ) -> list[Piece | None]:
        """Cut ``frame`` into a piece for each group of output partitions.

        Parameters
        ----------
        column
            Holds the output partition of each row, from 0 to ``npartitions - 1``; the frame
            of a :class:`Hashed` or a :class:`Ranged` does not have it yet.
        groups
            The output partitions of each owner. Rows for a partition in no group are
            dropped.
        drop_column, ignore_index
            Whether ``column`` and the index are left behind.

        Returns
        -------
        list
            As long as ``groups``; None where there are no rows.
        """
        ...

    def assemble(
        self, parts: Sequence[Part], meta: Frame, *, ignore_index: bool, order_by: Any = None
    ) -> Frame:
        """Concatenate parts; ``meta`` is the result where there are none.

        Where ``order_by`` names a column the rows are about to be sorted by it: a backend may
        bring them into its order, equal ones as they come.

        The result shares no memory with the buffers. They may be read until the
        :meth:`fence` that is asked for next has been passed.
        """
        ...
